"""Which of the routers is used."""

import pytest

from rollmesh.mesh import Preference, addresses_of


@pytest.mark.parametrize(
    ("setting", "addresses"),
    [
        ("", ()),
        ("a:1", ("a:1",)),
        (" b:2 , a:1,,b:2", ("b:2", "a:1")),
    ],
)
def test_a_setting_names_each_router_once_in_its_order(
    setting: str, addresses: tuple[str, ...]
) -> None:
    assert addresses_of(setting) == addresses


def test_the_first_that_is_up_is_used_and_left_at_once_when_it_goes_down() -> None:
    routers = Preference(3, steady_ms=100)
    assert routers.choose(0) is None
    routers.up(1, 0)
    routers.up(2, 0)
    assert routers.choose(0) == 1
    routers.down(1)
    assert routers.choose(1) == 2
    routers.down(2)
    assert routers.choose(2) is None


def test_a_preferred_router_is_returned_to_when_it_has_been_up_for_a_while() -> None:
    routers = Preference(2, steady_ms=100)
    routers.up(1, 0)
    assert routers.choose(0) == 1
    routers.up(0, 0)
    assert routers.choose(0) == 0  # it was not up before
    routers.down(0)
    assert routers.choose(20) == 1
    routers.up(0, 50)
    assert routers.choose(149) == 1
    routers.down(0)  # it begins again
    routers.up(0, 149)
    assert routers.choose(248) == 1
    assert routers.choose(249) == 0


def test_another_router_is_not_gone_to_because_it_has_been_up_for_longer() -> None:
    routers = Preference(2, steady_ms=100)
    routers.up(0, 0)
    routers.up(1, 0)
    assert routers.choose(0) == 0
    assert routers.choose(1_000) == 0
