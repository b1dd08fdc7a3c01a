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
    """The bytes of the requests that are being received and answered, each a `HeldRequest`.

    Large requests may hold three quarters of the limit, so they never keep small ones out. An owner
    may hold a quarter, so it never keeps the others out. A request that is alone may have any size.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        """Bytes that are held now."""
        self.owned: Counter[str] = Counter()
        """Bytes of each owner."""


class HeldRequest:
    """The bytes of one request, and whom they count for."""

    def __init__(self, in_flight: BytesInFlight, size: float, owner: str = "") -> None:
        """Starts without bytes.

        Args:
            in_flight: Where they count.
            size: Bytes of the complete request, infinity if it is not known.
            owner: Owner of the bytes, such as a session, empty if there is none.
        """
        self._all = in_flight
        self._size = size
        self._owner = owner
        self._held = 0

    def take(self, count: int) -> None:
        """Adds bytes.

        Raises:
            OverloadedError: There is no room for them.
        """
        most, held = self._all.most, self._all.held
        if self._size > _SMALL_BYTES:
            most -= most // 4
        if held + count > most and held > self._held:
            raise OverloadedError(
                f"requests of {held} bytes are being answered, and there is no room for another; "
                "try again",
                retry_delay_ms=_RETRY_MS,
            )
        self._own(self._owner, count)
        self._all.held += count
        self._held += count

    def belongs_to(self, owner: str) -> None:
        """Counts the bytes, and further ones, for another owner.

        Raises:
            OverloadedError: There is no room for them.
        """
        owned = self._all.owned
        self._own(owner, self._held)
        if self._owner and self._held:
            owned[self._owner] -= self._held
            if not owned[self._owner]:
                del owned[self._owner]
        self._owner = owner

    def give(self) -> None:
        """Removes all bytes: the request has been answered."""
        self.belongs_to("")
        self._all.held -= self._held
        self._held = 0

    def _own(self, owner: str, count: int) -> None:
        if not owner:
            return
        owned = self._all.owned[owner]
        others = owned - (self._held if owner == self._owner else 0)
        if others and owned + count > self._all.most // _SHARES:
            raise OverloadedError(
                f"requests of {owned} bytes of {owner} are being answered, a quarter of "
                "max_bytes_in_flight; try again, or send fewer requests at a time",
                retry_delay_ms=_RETRY_MS,
            )
        if count:
            self._all.owned[owner] += count
