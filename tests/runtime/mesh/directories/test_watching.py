from contextlib import aclosing

from rollmesh.mesh.directories.watching import CallWatch, Route
from tests.waiting import until


class Call:
    """A call that nobody ends."""

    def cancel(self) -> bool:
        raise AssertionError


async def look() -> None:
    raise AssertionError("nobody is silent")


async def test_gateways_without_calls_are_watched_no_longer() -> None:
    async with aclosing(CallWatch(look, lambda _: True)) as watch:
        for number in range(3):
            with watch.over(Route(f"gateway-{number}:1", "", is_new=False), Call()):
                pass
        assert watch.gateways == 3
        await until(lambda: watch.gateways == 0)
