"""Decides when a stored session is removed: some time after every consumer has settled it."""

from dataclasses import dataclass, field

REMEMBERED_MS = 30 * 24 * 3600 * 1000
"""How long ids of removed sessions are kept, milliseconds; a gateway may resend until then."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long settled sessions are kept, and how many bytes may be stored."""

    settled_ms: int
    """How long settled sessions are kept for a backward `Seek`, milliseconds."""
    max_bytes: int
    """Stored bytes at which new sessions are rejected."""
    near_full: float = field(default=0.9)
    """Fraction of `max_bytes` above which settled sessions are removed at once, oldest first."""

    def settled_before(self, stored_bytes: int, now_ms: int) -> int:
        """Returns the time before which a unit must have been settled to be removed now.

        Args:
            stored_bytes: Bytes in use.
            now_ms: The current time.
        """
        full = stored_bytes > self.near_full * self.max_bytes
        return now_ms if full else now_ms - self.settled_ms


def is_over(seq: int | None, settled_ms: int | None, start_seq: int, settled_before: int) -> bool:
    """Returns whether a consumer will never need a unit again.

    Args:
        seq: Position of the unit in the consumer's log; None if it is a group still waiting.
        settled_ms: When the consumer settled it; None if it has not.
        start_seq: Units up to and including this position are not delivered to the consumer.
        settled_before: As returned by `Retention.settled_before`.
    """
    if seq is None:
        return False
    return seq <= start_seq if settled_ms is None else settled_ms <= settled_before
