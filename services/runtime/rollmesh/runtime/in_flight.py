"""A limit on the bytes of all requests that a process holds at a time.

Every request is limited by itself, but not the sum of them.
"""

from rollmesh.runtime.errors import OverloadedError

_SMALL_BYTES = 256 * 1024
_RETRY_MS = 1000


class BytesInFlight:
    """The bytes of the requests that are being received and answered.

    Large requests may hold three quarters of the limit, so they never keep small ones out. A
    request that is alone may have any size.
    """

    def __init__(self, most: int) -> None:
        """Takes the limit in bytes."""
        self._most = most
        self.held = 0
        """Bytes that are held now."""

    def take(self, count: int, *, held: int, size: float) -> None:
        """Adds bytes of a request; `give` must be called with them when it has been answered.

        Args:
            count: Number of bytes to add.
            held: Number of bytes that were added for the same request before.
            size: Size of the complete request, bytes; infinity if it is not known.

        Raises:
            OverloadedError: There is no room for them.
        """
        most = self._most if size <= _SMALL_BYTES else self._most - self._most // 4
        if self.held + count > most and self.held > held:
            raise OverloadedError(
                f"requests of {self.held} bytes are being answered, and there is no room for "
                "another; try again",
                retry_delay_ms=_RETRY_MS,
            )
        self.held += count

    def give(self, count: int) -> None:
        """Removes bytes of a request that has been answered."""
        self.held -= count
