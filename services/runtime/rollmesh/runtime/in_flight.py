"""A limit on the bytes of all requests that a process holds.

Every request is limited by itself, but not the sum of them.
"""

from dataclasses import dataclass

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
        self.owned: dict[str, int] = {}
        """Bytes of each owner."""


@dataclass(slots=True, eq=False)
class HeldRequest:
    """The bytes of one request, and whom they count for. It begins without bytes."""

    in_flight: BytesInFlight
    """Where they count."""
    size: float
    """Bytes of the complete request, infinity if it is not known."""
    owner: str = ""
    """Owner of the bytes, such as a session, empty if there is none."""
    held: int = 0
    """Bytes that it holds now."""

    def hold(self, more: int = 0, owner: str | None = None) -> None:
        """Adds bytes. With an owner, all of them, and further ones, count for it from now on.

        Raises:
            OverloadedError: There is no room for them.
        """
        whole, owner = self.in_flight, self.owner if owner is None else owner
        most = whole.most - (whole.most // 4 if self.size > _SMALL_BYTES else 0)
        if more > 0 and whole.held + more > most and whole.held > self.held:
            raise OverloadedError(
                f"requests of {whole.held} bytes are being answered, and there is no room for "
                "another; try again",
                retry_delay_ms=_RETRY_MS,
            )
        held, owned = self.held + more, whole.owned.get(owner, 0)
        others = owned - (self.held if owner == self.owner else 0)
        if owner and others and others + held > whole.most // _SHARES:
            raise OverloadedError(
                f"requests of {owned} bytes of {owner} are being answered, a quarter of "
                "max_bytes_in_flight; try again, or send fewer requests at a time",
                retry_delay_ms=_RETRY_MS,
            )
        if self.owner and self.held:
            whole.owned[self.owner] -= self.held
            if not whole.owned[self.owner]:
                del whole.owned[self.owner]
        if owner and held:
            whole.owned[owner] = whole.owned.get(owner, 0) + held
        whole.held += more
        self.held, self.owner = held, owner

    def give(self) -> None:
        """Removes all bytes: the request has been answered."""
        self.hold(-self.held, "")
