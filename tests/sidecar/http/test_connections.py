"""Which connections are admitted, and for whom they count."""

import pytest

from rollmesh.sidecar.http.connections import Places, address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 4711), "10.0.0.1"),
        (("::ffff:10.0.0.1", 4711, 0, 0), "10.0.0.1"),
        (("2001:db8::1", 4711, 0, 0), "2001:db8::/64"),
        (("2001:db8::ffff:0:0:2", 1, 0, 0), "2001:db8::/64"),
        (("2001:db8:0:1::1", 4711, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80::/64"),
        ("/run/sidecar.sock", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_a_connection_counts_for_its_address_or_its_ipv6_network(
    peer: object, address: str
) -> None:
    assert address_of(peer) == address


def test_each_address_has_its_share_and_all_together_have_the_total() -> None:
    places = Places(3, 2)
    taken = [places.take(one) for one in ("a", "a", "a", "b", "c")]
    assert [not problem for problem in taken] == [True, True, False, True, False]
    assert taken[2] == "your address already has 2 connections"
    assert taken[4] == "the sidecar already has 3 connections"
    places.leave("a")
    assert not places.take("b")
    for one in ("a", "b", "b"):
        places.leave(one)
    assert places.taken == 0
    assert [not places.take("c") for _ in range(3)] == [True, True, False]
