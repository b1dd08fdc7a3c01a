"""A limit on the bytes of all requests that a process holds.

Every request is limited by itself, but not the sum of them.
"""

from collections import Counter

from rollmesh.runtime.errors import OverloadedError

_SMALL_BYTES = 256 * 1024
_RETRY_MS = 1000
_SHARES = 4
"""An owner may hold one of this many parts of the limit."""


class BytesInFlight:
    """The bytes of the requests that are being received and answered.

    Large requests may hold three quarters of the limit, so they never keep small ones out. An owner
    may hold a quarter, so it never keeps the others out. A request that is alone may have any size.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._owned: Counter[str] = Counter()
        self.held = 0
        """Bytes that are held now."""

    def take(self, count: int, *, held: int, size: float, owner: str = "") -> None:
        """Adds bytes of a request. `give` must be called with them when it has been answered.

        Args:
            count: Number of bytes to add.
            held: Number of bytes that were added for the same request before.
            size: Bytes of the complete request, infinity if it is not known.
            owner: Owner of the bytes, such as a session, empty if there is none.

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
        self._own(owner, count, held)
        self.held += count

    def give(self, count: int, owner: str = "") -> None:
        """Removes bytes of a request that has been answered."""
        self.held -= count
        self._disown(owner, count)

    def move(self, count: int, owner: str, to: str) -> None:
        """Counts bytes for another owner.

        Raises:
            OverloadedError: There is no room for them.
        """
        self._own(to, count, 0)
        self._disown(owner, count)

    def _own(self, owner: str, count: int, held: int) -> None:
        """Adds bytes of an owner, which had `held` of the same request."""
        owned = self._owned[owner] if owner else 0
        if owned > held and owned + count > self._most // _SHARES:
            raise OverloadedError(
                f"requests of {owned} bytes of {owner} are being answered, a quarter of "
                "max_bytes_in_flight; try again, or send fewer requests at a time",
                retry_delay_ms=_RETRY_MS,
            )
        if owner and count:
            self._owned[owner] += count

    def _disown(self, owner: str, count: int) -> None:
        if owner and count:
            self._owned[owner] -= count
            if not self._owned[owner]:
                del self._owned[owner]


class HeldRequest:
    """The bytes of one request, and whom they count for."""

    def __init__(self, in_flight: BytesInFlight, owner: str, size: float) -> None:
        """Starts without bytes."""
        self._in_flight = in_flight
        self._owner = owner
        self._size = size
        self._held = 0

    def take(self, count: int) -> None:
        """Adds bytes.

        Raises:
            OverloadedError: There is no room for them.
        """
        self._in_flight.take(count, held=self._held, size=self._size, owner=self._owner)
        self._held += count

    def belongs_to(self, owner: str) -> None:
        """Counts the bytes, and further ones, for another owner.

        Raises:
            OverloadedError: There is no room for them.
        """
        self._in_flight.move(self._held, self._owner, owner)
        self._owner = owner

    def give(self) -> None:
        """Removes all bytes: the request has been answered."""
        self._in_flight.give(self._held, self._owner)
        self._held = 0
