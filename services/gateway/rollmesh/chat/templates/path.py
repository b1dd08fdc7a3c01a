"""The part of a conversation held as tokens that templates need."""

from dataclasses import dataclass
from typing import Protocol

from rollmesh.chat.messages import MessageGroup
from rollmesh.runtime.codec.arrays import TokenIds


@dataclass(frozen=True, slots=True)
class Seen:
    """A prefix of a render that was compared with the context and is equal to it."""

    chars: int
    """Length of the prefix."""
    digest: bytes
    """BLAKE2b digest of the prefix."""


class HeldGroup(Protocol):
    """One group of a conversation, with its ids."""

    as_printed: bool | None
    """Whether the template prints an answer as it was sampled; None before the comparison."""
    seen: Seen | None
    """The render of the context up to this group, if it was compared and is equal."""

    @property
    def end(self) -> int:
        """Length of the context up to and including this group, in tokens."""
        ...

    @property
    def messages(self) -> MessageGroup:
        """The messages."""
        ...

    @property
    def token_ids(self) -> TokenIds:
        """The ids that the group adds; uint32 [N]."""
        ...

    @property
    def sample(self) -> object | None:
        """What was sampled; None for a group that the template printed."""
        ...

    @property
    def ends_turn(self) -> bool:
        """False for a truncated answer; the next group closes it."""
        ...
