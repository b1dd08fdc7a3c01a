"""Calls that were refused, by the address that they came from."""

from collections import OrderedDict

_FREE = 16
"""Refusals that an address gets at once."""
_HALF_LIFE_MS = 10_000
_FIRST_DELAY_MS, _LONGEST_DELAY_MS = 10, 2_000


class Failures:
    """Counts refused calls, and says how long the next answer to the same address takes.

    Only refusals are delayed: nobody can make others wait who show what they should. A count halves
    every ten seconds, and the oldest addresses are forgotten.
    """

    def __init__(self, most: int = 1024) -> None:
        """Takes the number of addresses that are remembered."""
        self._most = most
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def failed(self, peer: str, now_ms: int) -> tuple[int, int]:
        """Counts a refused call.

        Args:
            peer: Address that it came from, without its port.
            now_ms: The time, milliseconds.

        Returns:
            The address's count, rounded, and the delay of the answer, milliseconds.
        """
        count, at_ms = self._counts.pop(peer, (0.0, now_ms))
        count = count * 0.5 ** ((now_ms - at_ms) / _HALF_LIFE_MS) + 1
        self._counts[peer] = (count, now_ms)
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)
        over = round(count) - _FREE
        if over <= 0:
            return round(count), 0
        delay_ms = _FIRST_DELAY_MS * 2 ** min(over - 1, 16)
        return round(count), min(delay_ms, _LONGEST_DELAY_MS)

    def __len__(self) -> int:
        """Returns the number of addresses that are remembered."""
        return len(self._counts)


def address_of(peer: str) -> str:
    """Returns a peer as gRPC names it, `ipv4:10.0.0.1:4711`, without its port."""
    return peer.rpartition(":")[0] or peer
