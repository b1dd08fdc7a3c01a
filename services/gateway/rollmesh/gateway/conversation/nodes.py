"""The nodes of a conversation tree: one message group each, with the ids that it adds."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollmesh.chat.images.placing import Placeholder
from rollmesh.chat.messages import MessageGroup, RenderContext
from rollmesh.chat.templates.path import Seen
from rollmesh.gateway.conversation.reasons import Fidelity, Finish, Lineage
from rollmesh.mesh.generations.sampled import Tops
from rollmesh.runtime.codec.arrays import Logprobs, TokenIds
from rollmesh.v1 import sampling_pb2


@dataclass(frozen=True, slots=True)
class Sample:
    """What the engine sampled for one turn."""

    token_ids: TokenIds
    """Sampled ids, uint32 [S]."""
    logprobs: Logprobs
    """Their log-probabilities, float32 [S]."""
    spans: tuple[sampling_pb2.VersionSpan, ...]
    """Their policy versions and engines, by index into `token_ids`; they cover all tokens."""
    finish: Finish
    prompt_tokens: int
    """Number of ids in the engine's prompt."""
    cached_tokens: int
    """Number of prompt ids whose KV entries were reused."""
    prompt_crc32: int
    """CRC-32 of the prompt ids as the engine received them."""
    tops: Tops | None = None
    """The most likely ids at each position, if the request wanted them."""

    @property
    def engine_id(self) -> str:
        """The engine that sampled the last token."""
        return self.spans[-1].engine_id


@dataclass(slots=True, eq=False)
class Node:
    """One message group of a conversation; a root has no group and adds no ids."""

    node_id: int
    parent: "Node | None"
    render_context: RenderContext
    messages: MessageGroup
    token_ids: TokenIds
    """The ids that the node adds, uint32 [N]."""
    scaffold_tokens: int
    """Number of leading ids that were not sampled; all of them if `sample` is None."""
    images: tuple[Placeholder, ...] = ()
    """Where its images are in its ids, in order."""
    sample: Sample | None = None
    reasons: frozenset[Fidelity] = frozenset()
    said: Lineage | None = None
    """The lineage that the request gives the turn; None if it gives none."""
    stored: bool = False
    """Whether the journal has it."""
    ends_turn: bool = True
    """False for an answer that was cut; the next node closes it."""
    end: int = 0
    """Length of the context up to and including this node."""
    record_bytes: int = 0
    """Approximate upper bound of the path's size in a record, up to this node, bytes."""
    as_printed: bool | None = None
    """Whether the template renders a sampled answer as it was sampled; None if not checked yet."""
    seen: Seen | None = None
    """What is known of the template's render up to this node; lost on restart."""
    children: list["Node"] = field(default_factory=list)
    by_key: dict[bytes, list["Node"]] = field(default_factory=dict)
    by_lenient_key: dict[bytes, list["Node"]] = field(default_factory=dict)

    def up(self) -> Iterator["Node"]:
        """Yields the nodes from this node to the root's child."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> list["Node"]:
        """Returns the nodes from the root's child to this node."""
        return [*self.up()][::-1]

    def placeholders(self) -> list[Placeholder]:
        """Returns where the images are in the context after this node, in order."""
        return [
            one._replace(offset=one.offset + node.end - len(node.token_ids))
            for node in self.path()
            for one in node.images
        ]

    def context(self) -> list[TokenIds]:
        """Returns the arrays whose concatenation is the context after this node."""
        return [node.token_ids for node in self.path()]
