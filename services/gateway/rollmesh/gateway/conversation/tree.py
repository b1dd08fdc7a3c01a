"""The conversation tree of one session: plain state, no I/O.

A node is one message group (a message, or a run of tool results) and holds the ids that it adds.
Invariants:

* The concatenated ids of the nodes from a root to a node are exactly the context after that node.
* The ids of a sampled node are the ids that the engine received after its parent
  (`scaffold_tokens` of them) followed by the sampled ids; nothing is ever tokenised again.
* Paths are shared, never copied: two conversations with a common prefix share its nodes.
* `nodes` lists parents before children. Ids need not be in that order: a turn's id is reserved
  when the turn begins.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollmesh.chat.canonical import contradicts_reasoning, exact_key, is_mended_echo, lenient_key
from rollmesh.chat.messages import Message, MessageGroup, RenderContext
from rollmesh.chat.templates.path import Seen
from rollmesh.gateway.conversation.reasons import Fidelity, Finish, Lineage
from rollmesh.gateway.conversation.sampled import Tops
from rollmesh.runtime.codec.arrays import Logprobs, TokenIds
from rollmesh.v1 import sampling_pb2, trajectory_pb2

_TOKEN_BYTES, _NODE_BYTES, _SPAN_BYTES, _ROW_BYTES = 9, 192, 24, 512
"""Record bytes per token, at most per node and per version span, and per trajectory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the engine sampled for one turn."""

    token_ids: TokenIds
    """Sampled ids, uint32 [S]."""
    logprobs: Logprobs
    """Their log-probabilities, float32 [S]."""
    spans: tuple[sampling_pb2.VersionSpan, ...]
    """Their policy versions, by index into `token_ids`; together they cover all tokens."""
    finish: Finish
    engine_id: str
    prompt_tokens: int
    """Number of ids in the engine's prompt."""
    cached_tokens: int
    """Number of prompt ids whose KV entries were reused."""
    prompt_crc32: int
    """CRC-32 of the prompt ids as the engine received them."""
    tops: Tops | None = None
    """The most likely ids at each position, if the request wanted them."""


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

    def path(self) -> list["Node"]:
        """Returns the nodes from the root's child to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def context(self) -> list[TokenIds]:
        """Returns the arrays whose concatenation is the context after this node."""
        return [node.token_ids for node in self.path()]


class Match(NamedTuple):
    """The node from which a request continues the tree."""

    node: Node
    """The deepest node that matches the request."""
    depth: int
    """Number of the request's groups that match."""
    reasons: frozenset[Fidelity]
    """LENIENT_ECHO if a sampled message was echoed with changes and was kept as sampled."""


class Tree:
    """All conversations of one session."""

    def __init__(self, end_ids: frozenset[int], *, call_ids: bool = False) -> None:
        """Creates a tree without conversations.

        Args:
            end_ids: Ids that end an answer.
            call_ids: Whether tool-call ids distinguish messages, because the template prints them.
        """
        self._end_ids = end_ids
        self._call_ids = call_ids
        self._next_id = 1
        self._roots: dict[bytes, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.tokens = 0
        """Number of ids in all nodes."""
        self.text_bytes = 0
        """Approximate size of all message text and of the most likely ids that are kept, bytes."""
        self.leaf_bytes = 0
        """Approximate upper bound of a record with one trajectory per leaf, bytes."""
        self.turn_bytes = 0
        """Approximate upper bound of a record with one trajectory per turn, bytes."""

    def __repr__(self) -> str:
        """Describes the size of the tree."""
        return f"Tree({len(self._roots)} roots, {len(self.nodes)} nodes, {self.turns} turns)"

    @property
    def turns(self) -> int:
        """Number of sampled nodes."""
        return sum(node.sample is not None for node in self.nodes.values())

    def match(self, render_context: RenderContext, groups: list[MessageGroup]) -> Match:
        """Finds the deepest node whose path equals a prefix of the request.

        If several samples are equal, tool-call ids decide which one the request continues, even if
        the template does not print them. Ids that match none of the samples are ignored, because
        agents may make up their own. Among equally deep nodes, exact matches precede lenient ones,
        then the newest wins.
        """
        node, shared = _unbranched(self.root(render_context), groups)
        best = Match(node, shared, frozenset())
        frontier = [best]
        for depth, group in enumerate(groups[shared:], shared):
            named = _chosen(frontier, lambda match: _answers(group, match.node))  # noqa: B023
            best = best if best in named else _best(named)
            frontier = [
                Match(child, depth + 1, match.reasons | reasons)
                for match in named
                # Digesting a long text is slow: do it only if there are children to compare.
                if match.node.children
                for child, reasons in self._children_like(match.node, group)
            ]
            if not frontier:
                break
            frontier = _chosen(frontier, lambda match: _repeats(group, match.node))  # noqa: B023
            best = _best(frontier)
        return best

    def reserve_id(self) -> int:
        """Returns a unique node id, for a turn that begins."""
        self._next_id += 1
        return self._next_id - 1

    def skip_ids(self, count: int) -> None:
        """Skips ids that were possibly reserved by turns that a restart interrupted."""
        self._next_id += count

    def root_reasons(self, render_context: RenderContext) -> frozenset[Fidelity]:
        """Returns why a first message starts a new root: TOOLS_CHANGED, or no reason."""
        others = (root for key, root in self._roots.items() if key != render_context.key)
        changed = any(root.children for root in others)
        return frozenset({trajectory_pb2.FIDELITY_REASON_TOOLS_CHANGED}) if changed else frozenset()

    def add_messages(self, parent: Node, group: MessageGroup, token_ids: TokenIds) -> Node:
        """Attaches an unsampled group, or returns the equal node that another request attached.

        If the template now renders the message differently, a new node is attached.
        """
        for node in parent.by_key.get(self._key(group), ()):
            # Equal messages may be spelled differently (7 and 7.0): then each has its own tokens.
            if node.sample is None and np.array_equal(node.token_ids, token_ids):
                return node
        reasons = self.root_reasons(parent.render_context) if parent.parent is None else frozenset()
        node = Node(
            self._next_id,
            parent,
            parent.render_context,
            group,
            token_ids,
            len(token_ids),
            reasons=reasons,
        )
        return self.attach(node)

    def add_sample(
        self,
        parent: Node,
        message: Message,
        generation_prompt: TokenIds,
        sample: Sample,
        reasons: frozenset[Fidelity],
        *,
        node_id: int | None = None,
        said: Lineage | None = None,
    ) -> Node:
        """Attaches a sampled turn under its reserved id; equal samples stay separate nodes."""
        node = Node(
            self.reserve_id() if node_id is None else node_id,
            parent,
            parent.render_context,
            (message,),
            np.concatenate([generation_prompt, sample.token_ids]),
            len(generation_prompt),
            sample=sample,
            reasons=reasons,
            said=said,
        )
        return self.attach(node)

    def attach(self, node: Node) -> Node:
        """Attaches a node to its parent; also used to rebuild a tree."""
        assert node.parent is not None
        parent = node.parent
        last = int(node.token_ids[-1]) if len(node.token_ids) else None
        node.ends_turn = node.sample is None or last in self._end_ids
        node.end = parent.end + len(node.token_ids)
        node.record_bytes = parent.record_bytes + _node_bytes(node)
        if not parent.children and parent.parent is not None:
            self.leaf_bytes -= parent.record_bytes + _ROW_BYTES
        self._count_record(node, 1)
        node.token_ids.flags.writeable = False
        parent.children.append(node)
        parent.by_key.setdefault(self._key(node.messages), []).append(node)
        if node.sample is not None:
            parent.by_lenient_key.setdefault(self._lenient_key(node.messages), []).append(node)
        self.nodes[node.node_id] = node
        self.tokens += len(node.token_ids)
        self.text_bytes += _size(node)
        self._next_id = max(self._next_id, node.node_id + 1)
        return node

    def detach(self, node: Node) -> None:
        """Removes a node that could not be stored, unless it has children."""
        assert node.parent is not None
        if node.children or node.stored:
            return
        parent = node.parent
        parent.children.remove(node)
        parent.by_key[self._key(node.messages)].remove(node)
        if node.sample is not None:
            parent.by_lenient_key[self._lenient_key(node.messages)].remove(node)
        del self.nodes[node.node_id]
        self.tokens -= len(node.token_ids)
        self.text_bytes -= _size(node)
        if not parent.children and parent.parent is not None:
            self.leaf_bytes += parent.record_bytes + _ROW_BYTES
        self._count_record(node, -1)

    def reattach(self, node: Node) -> None:
        """Reattaches the detached nodes of a path, for a turn that was prepared on top of it."""
        for one in node.path():
            if one.node_id not in self.nodes:
                self.attach(one)

    def leaves(self) -> Iterator[Node]:
        """Yields the nodes without children, oldest first."""
        for node in self.nodes.values():
            if not node.children:
                yield node

    def root(self, render_context: RenderContext) -> Node:
        """Returns the root of a render context; creates it if there is none."""
        root = self._roots.get(render_context.key)
        if root is None:
            root = Node(0, None, render_context, (), np.empty(0, np.uint32), 0)
            self._roots[render_context.key] = root
        return root

    def _count_record(self, leaf: Node, sign: int) -> None:
        size = sign * (leaf.record_bytes + _ROW_BYTES)
        self.leaf_bytes += size
        if leaf.sample is not None:
            self.turn_bytes += size

    def _key(self, group: MessageGroup) -> bytes:
        return exact_key(group, call_ids=self._call_ids)

    def _lenient_key(self, group: MessageGroup) -> bytes:
        return lenient_key(group, call_ids=self._call_ids)

    def _children_like(
        self, parent: Node, group: MessageGroup
    ) -> Iterator[tuple[Node, frozenset[Fidelity]]]:
        """Yields the children that a request's group matches, with the reasons for leniency."""
        nothing: frozenset[Fidelity] = frozenset()
        exact = parent.by_key.get(self._key(group), ())
        for node in exact:
            if not contradicts_reasoning(node.messages[0], group[0]):
                yield node, nothing
        if group[0].role != "assistant" or len(exact) == len(parent.children):
            return
        lenient = frozenset({trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO})
        near = parent.by_lenient_key.get(self._lenient_key(group), ())
        for node in near:
            if node not in exact and not contradicts_reasoning(node.messages[0], group[0]):
                yield node, lenient
        if exact or near or not group[0].tool_calls:
            return
        for node in parent.children:
            sampled = node.messages[0]
            if node.sample is None or contradicts_reasoning(sampled, group[0]):
                continue
            if is_mended_echo(sampled, group[0]):
                yield node, lenient


def path_bytes(tokens: int, nodes: int) -> int:
    """Returns an approximate upper bound of a path's size in a record, bytes."""
    return tokens * _TOKEN_BYTES + nodes * _NODE_BYTES + _ROW_BYTES


def _node_bytes(node: Node) -> int:
    spans = len(node.sample.spans) if node.sample is not None else 0
    return len(node.token_ids) * _TOKEN_BYTES + _NODE_BYTES + spans * _SPAN_BYTES


def _size(node: Node) -> int:
    tops = None if node.sample is None else node.sample.tops
    return (0 if tops is None else tops.ids.nbytes + tops.logprobs.nbytes) + sum(
        len(message.content)
        + len(message.reasoning)
        + sum(len(call.arguments) for call in message.tool_calls)
        for message in node.messages
    )


def _best(matches: list[Match]) -> Match:
    return max(matches, key=lambda match: (-len(match.reasons), match.node.node_id))


def _chosen(matches: list[Match], wanted: Callable[[Match], bool]) -> list[Match]:
    """Returns the wanted matches, or all if none is wanted."""
    if len(matches) == 1:
        return matches
    return [match for match in matches if wanted(match)] or matches


def _repeats(group: MessageGroup, node: Node) -> bool:
    """Returns whether the calls of a request's message have the same ids as a node's calls."""
    ids = [call.id for call in group[0].tool_calls]
    return any(ids) and ids == [call.id for call in node.messages[0].tool_calls]


def _answers(group: MessageGroup, node: Node) -> bool:
    """Returns whether tool results refer to calls of a node."""
    named = {message.tool_call_id for message in group if message.tool_call_id}
    return (
        bool(named) and bool(node.messages) and named <= {c.id for c in node.messages[0].tool_calls}
    )


def _unbranched(root: Node, groups: list[MessageGroup]) -> tuple[Node, int]:
    """Follows a request down the tree while each node has a single, exactly matching child.

    Most requests continue one long conversation, for which comparing is faster than digesting.

    Returns:
        The last matching node and the number of groups up to it.
    """
    node, depth = root, 0
    for group in groups:
        if len(node.children) != 1 or node.children[0].messages != group:
            break
        node, depth = node.children[0], depth + 1
    return node, depth
