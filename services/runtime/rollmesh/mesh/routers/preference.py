"""The routers of a mesh, in the order of preference, and the rule by which one of them is used."""

STEADY_MS = 10_000
"""Time for which a preferred router must be up before it is returned to, milliseconds."""


def addresses_of(routers: str) -> tuple[str, ...]:
    """Returns the addresses of a setting, `host:port,host:port`, each once and in their order."""
    found = (address.strip() for address in routers.split(","))
    return tuple(dict.fromkeys(address for address in found if address))


class Preference:
    """Which of several routers is used. All members prefer the same order.

    The first one that is up is used. If the one in use goes down, the first of the others that are
    up follows at once. A router that was down is returned to when it has been up for 10 s: one that
    dies again and again is left once, not every time.
    """

    def __init__(self, count: int, steady_ms: int = STEADY_MS) -> None:
        """Starts with all of them down."""
        self._up_ms: list[int | None] = [None] * count
        self._was_down = [False] * count
        self._steady_ms = steady_ms
        self.current: int | None = None
        """The one in use; None if none is up."""

    def is_up(self, number: int) -> bool:
        """Returns whether a router is up."""
        return self._up_ms[number] is not None

    def up(self, number: int, now_ms: int) -> None:
        """Notes that a router is up."""
        self._up_ms[number] = now_ms

    def down(self, number: int) -> None:
        """Notes that a router has gone down."""
        self._up_ms[number] = None
        self._was_down[number] = True

    def choose(self, now_ms: int) -> int | None:
        """Chooses and returns the router to use; None if none is up."""
        current = self.current
        if current is not None and not self.is_up(current):
            current = None
        for number, up_ms in enumerate(self._up_ms):
            if number == current:
                break
            if up_ms is None:
                continue
            steady_ms = self._steady_ms if self._was_down[number] else 0
            if current is None or up_ms + steady_ms <= now_ms:
                current = number
                break
        self.current = current
        return current
