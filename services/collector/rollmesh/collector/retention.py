"""When a stored session is removed, some time after every consumer has settled it."""

from dataclasses import dataclass

REMEMBERED_MS = 30 * 24 * 3600 * 1000
"""How long ids of removed sessions are kept, milliseconds. A gateway may resend until then."""
_NEAR_FULL = 0.9
"""Fraction of the room above which settled sessions are removed at once, oldest first."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long settled sessions are kept, and how many bytes may be stored."""

    settled_ms: int
    """How long settled sessions are kept for a backward `Seek`, milliseconds."""
    max_bytes: int
    """Stored bytes at which new sessions are rejected."""

    def settled_before(self, stored_bytes: int, now_ms: int) -> int:
        """Returns the time before which a unit must have been settled to be removed now."""
        full = stored_bytes > _NEAR_FULL * self.max_bytes
        return now_ms if full else now_ms - self.settled_ms
