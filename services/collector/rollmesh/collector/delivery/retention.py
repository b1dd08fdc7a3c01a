"""When a stored session may go: once every consumer has settled it, and long enough ago."""

from dataclasses import dataclass, field

REMEMBERED_MS = 30 * 24 * 3600 * 1000
"""How long the ids of removed sessions are known: a gateway may send one again until then."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long settled sessions stay, and how much is stored."""

    settled_ms: int
    """Time that they stay for a `Seek` back, milliseconds."""
    max_bytes: int
    """Bytes at which nothing more is taken."""
    near_full: float = field(default=0.9)
    """Share of `max_bytes` above which settled sessions go at once, the oldest first."""

    def settled_before(self, stored_bytes: int, now_ms: int) -> int:
        """Returns by when a unit must have been settled to go now.

        Args:
            stored_bytes: Bytes in use.
            now_ms: The time.
        """
        full = stored_bytes > self.near_full * self.max_bytes
        return now_ms if full else now_ms - self.settled_ms


def is_over(seq: int | None, settled_ms: int | None, start_seq: int, settled_before: int) -> bool:
    """Says whether a consumer is done with a unit for good.

    Args:
        seq: Place of the unit in the consumer's log; None: it is a group that still waits.
        settled_ms: When the consumer settled it; None: it has not.
        start_seq: Units up to this place are not delivered to the consumer.
        settled_before: From `Retention`.
    """
    if seq is None:
        return False
    return seq <= start_seq if settled_ms is None else settled_ms <= settled_before
