"""What a template needs to know of a conversation that is held as tokens."""

from dataclasses import dataclass
from typing import Protocol

from rollmesh.chat.messages import MessageGroup
from rollmesh.runtime.codec.arrays import TokenIds


@dataclass(frozen=True, slots=True)
class Seen:
    """The text that a context was seen to be, in what the template printed."""

    chars: int
    """Its length."""
    digest: bytes
    """Its BLAKE2b digest."""


class HeldGroup(Protocol):
    """One group of a conversation, with the ids that stand for it."""

    as_printed: bool | None
    """Whether the template prints a sampled answer as it was sampled; None while nobody looked."""
    seen: Seen | None
    """What the context up to this group was seen to be."""

    @property
    def end(self) -> int:
        """Length of the context up to and including this group, in tokens."""

    @property
    def messages(self) -> MessageGroup:
        """Its messages."""

    @property
    def token_ids(self) -> TokenIds:
        """The ids that it adds to those before it; uint32 [N]."""

    @property
    def sample(self) -> object | None:
        """What was sampled; None for a group that the template printed."""

    @property
    def ends_turn(self) -> bool:
        """False for an answer that was cut: what follows closes it."""
