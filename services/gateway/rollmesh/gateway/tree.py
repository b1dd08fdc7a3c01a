"""The conversation tree of one session: plain state, no I/O.

A node is one message group (a message, or a run of tool results) and holds the ids that it adds.
Invariants:

* The concatenated ids of the nodes from a root to a node are exactly the context after that node.
* The ids of a sampled node are the ids that the engine received after its parent
  (`scaffold_tokens` of them) followed by the sampled ids. Nothing is ever tokenised again.
* Paths are shared, never copied: two conversations with a common prefix share its nodes.
* `nodes` lists parents before children. Ids need not be in that order: a turn's id is reserved
  when the turn begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rollmesh.chat import (
    ChangedEcho,
    Message,
    MessageGroup,
    Placeholder,
    RenderContext,
    contradicts_reasoning,
    exact_key,
    lenient_key,
)
from rollmesh.chat.templates import Seen
from rollmesh.mesh import Tops
from rollmesh.runtime.codec import EXPERTS, SUPPORT, Logprobs, TokenIds, joined, rows_between
from rollmesh.v1 import sampling_pb2, session_pb2, trajectory_pb2
from rollmesh.v1.sampling_pb2 import TokenColumn

# Type aliases for the enums of the contract, under the names that this package uses.
#
# The values are plain integers, as in `rollmesh.v1`.

Fidelity: TypeAlias = trajectory_pb2.FidelityReason.ValueType
Lineage: TypeAlias = trajectory_pb2.Lineage.ValueType
Spent: TypeAlias = session_pb2.BudgetKind.ValueType
Finish: TypeAlias = sampling_pb2.FinishReason.ValueType


_IMPORTED = trajectory_pb2.FIDELITY_REASON_IMPORTED


class Edge(NamedTuple):
    """How two model requests belong together, as the agent declares it: see `LineageEdge`."""

    source: str
    target: str
    kind: str


class Told(NamedTuple):
    """The facts that a server elsewhere gives about a sample without token ids."""

    completion_tokens: int
    """Number of its tokens."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    """Its tokens with their log-probabilities, as in `logprobs.content` of OpenAI's API."""


# The nodes of a conversation tree: one message group each, with the ids that it adds.


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens that the engine sampled for one turn."""

    token_ids: TokenIds
    """Sampled ids, uint32 [S]."""
    logprobs: Logprobs
    """Their log-probabilities, float32 [S]."""
    spans: tuple[sampling_pb2.VersionSpan, ...]
    """Their policy versions, engines and numerics, by index into `token_ids`, which they cover."""
    finish: Finish
    prompt_tokens: int
    """Number of ids in the engine's prompt."""
    cached_tokens: int
    """Number of prompt ids whose KV entries were reused."""
    prompt_crc32: int
    """CRC-32 of the prompt ids as the engine received them."""
    tops: Tops | None = None
    """The most likely ids at each position, if the request wanted them."""
    sampling: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    """Its sampling parameters, as the engine received them. They may be shared and never change."""
    numerics: tuple[sampling_pb2.Numerics, ...] = ()
    """The numerics to which its spans refer. They may be shared and never change."""
    columns: tuple[TokenColumn, ...] = ()
    """The columns of its prompt and its ids, until nodes have them."""
    request_ids: list[str] = field(default_factory=list)
    """Ids that the agent gave its requests. The turn shares the list, to which retries add."""
    told: Told | None = None
    """Of a sample without ids."""
    begun_unix_ms: int = 0
    """When its request came. 0 if that is unknown."""
    ended_unix_ms: int = 0
    """When its last token came."""

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) if self.told is None else self.told.completion_tokens


@dataclass(slots=True, eq=False)
class Node:
    """One message group of a conversation. A root has no group and adds no ids."""

    node_id: int
    parent: "Node | None"
    render_context: RenderContext
    messages: MessageGroup
    token_ids: TokenIds
    """The ids that the node adds, uint32 [N]."""
    scaffold_tokens: int
    """Number of leading ids that were not sampled, which is all of them if `sample` is None."""
    images: tuple[Placeholder, ...] = ()
    """Where its images are in its ids, in order."""
    sample: Sample | None = None
    reasons: frozenset[Fidelity] = frozenset()
    said: Lineage | None = None
    """The lineage that the request gives the turn, or None if it gives none."""
    stored: bool = False
    """Whether the journal has it."""
    columns: bytes = b""
    """Its columns, see `columns_between`, until the journal has them."""
    column_bytes: int = 0
    """Size of its columns."""
    was_sampled: bool = False
    """Whether a model sampled it: in a turn, or in the session that this one starts from. The tree
    sets this and the next four."""
    ends_turn: bool = True
    """False for an answer that was cut. The next node closes it."""
    end: int = 0
    """Length of the context up to and including this node."""
    own_bytes: int = 0
    """Approximate upper bound of its own size in a record, bytes."""
    record_bytes: int = 0
    """Approximate upper bound of the path's size in a record, up to this node, bytes."""
    as_printed: bool | None = None
    """Whether the template renders the path up to here, the end of this node aside, as it was
    sampled. None if not checked yet."""
    seen: Seen | None = None
    """State of the template's render up to this node, which is lost on restart."""
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
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


# Columns of nodes: the sampling support of their tokens, and routed experts.
#
# A node has the experts of the token before it and of all its tokens but the last, on which no
# model was run yet. So a turn brings all rows of the nodes that it adds, no node changes later, and
# each child of a node has the row of the node's last token.


def columns_between(columns: Sequence[TokenColumn], start: int, end: int) -> bytes:
    """Returns the columns of a node whose ids are `start` to `end` of its context.

    Returns:
        Serialised `TokenColumns`. Index i of the support is the node's token i, and index i of the
        experts is the token before it.
    """
    found = sampling_pb2.TokenColumns()
    for kind, shift in ((SUPPORT, 0), (EXPERTS, 1)):
        of_kind = [one for one in columns if one.kind == kind]
        parts = rows_between(of_kind, max(start - shift, 0), end - shift)
        for one in joined(parts):
            added = found.columns.add()
            added.CopyFrom(one)
            added.start += shift - start
    return found.SerializeToString()


def new_root(render_context: RenderContext) -> Node:
    """Returns a root that no tree has yet."""
    return Node(0, None, render_context, (), np.empty(0, np.uint32), 0)


# Finds the node from which a request continues its session's tree.
#
# A request carries its complete conversation. The search goes down the tree group by group, and
# agents usually continue an earlier request, so the node that the earlier request led to is kept as
# a `Bookmark`: the search starts there and costs as much as the new messages.

_EXACT: frozenset[Fidelity] = frozenset()
_LENIENT: frozenset[Fidelity] = frozenset({trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO})

_SAME, _BLANKS, _CHANGED = range(3)
"""How far an echo is from a message. From `_CHANGED` on, each change of a sample is one more."""


class Match(NamedTuple):
    """The node from which a request continues the tree."""

    node: Node
    """The deepest node that matches the request."""
    depth: int
    """Number of the request's groups that match."""
    reasons: frozenset[Fidelity] = _EXACT
    """LENIENT_ECHO if a sampled message was echoed with changes and was kept as sampled."""
    instead: "Match | None" = None
    """The match to take unless a later sample tells that it is this one: an echo on the way to it
    may be of several samples, or is more probably of another one."""

    @property
    def told(self) -> "Match":
        """The match without doubts if it is a sample: only its own path leads to it."""
        return self._replace(instead=None) if self.node.was_sampled else self

    def followed(self, child: Node, reasons: frozenset[Fidelity]) -> "Match":
        """Returns the match one group on, with the same doubts."""
        return Match(child, self.depth + 1, self.reasons | reasons, self.instead)


class Bookmark(NamedTuple):
    """The node that the beginning of a conversation leads to, whatever follows it.

    It holds until a node on the way, or a node that was passed over, gets another child.
    """

    match: Match
    last: MessageGroup
    """The last group of that beginning. A later request may have added tool results to it."""
    passed_over: frozenset[Node] = frozenset()
    """Nodes whose children were compared although the path does not contain them."""

    def depends_on(self, parent: Node) -> bool:
        """Returns whether another child of a node may lead the conversation elsewhere."""
        node = self.match.node.parent
        while node is not None and node is not parent and node.end >= parent.end:
            node = node.parent
        return node is parent or parent in self.passed_over


class _Group:
    """A group of a request. Values that are compared with many nodes are computed once."""

    def __init__(self, messages: MessageGroup, *, call_ids: bool) -> None:
        """Takes the messages, and whether tool-call ids distinguish them."""
        self.messages = messages
        self._call_ids = call_ids
        self.call_ids = [call.id for call in messages[0].tool_calls]

    @cached_property
    def exact_key(self) -> bytes:
        return exact_key(self.messages, call_ids=self._call_ids)

    @cached_property
    def lenient_key(self) -> bytes:
        return lenient_key(self.messages, call_ids=self._call_ids)

    @cached_property
    def changed(self) -> ChangedEcho:
        return ChangedEcho(self.messages[0])

    @cached_property
    def _answered_ids(self) -> set[str]:
        """The tool calls that its tool results refer to."""
        return {message.tool_call_id for message in self.messages if message.tool_call_id}

    def answers(self, node: Node) -> bool:
        """Returns whether tool results refer to calls of a node."""
        calls = node.messages[0].tool_calls if node.messages else ()
        named = self._answered_ids
        return 0 < len(named) <= len(calls) and named <= {call.id for call in calls}

    def repeats(self, node: Node) -> bool:
        """Returns whether its calls have the same ids as a node's calls."""
        calls = node.messages[0].tool_calls
        return (
            any(self.call_ids)
            and len(calls) == len(self.call_ids)
            and self.call_ids == [call.id for call in calls]
        )

    def is_like(self, node: Node) -> frozenset[Fidelity] | None:
        """Returns why a node with equal messages is a lenient match, or None if they differ."""
        if contradicts_reasoning(node.messages[0], self.messages[0]):
            return None
        if exact_key(node.messages, call_ids=self._call_ids) == self.exact_key:
            return _EXACT
        if not node.was_sampled or self.messages[0].role != "assistant":
            return None
        if lenient_key(node.messages, call_ids=self._call_ids) == self.lenient_key:
            return _LENIENT
        return None if self.changed.changes(node.messages[0]) is None else _LENIENT


def _doubted(distances: dict[Match, int], before: Match) -> list[Match]:
    """Returns matches of an echo. A match that may not be its sample has another one instead."""
    matches = [*distances]
    if len({match.node.parent for match in matches}) == 1:
        matches = [match.told for match in matches]
    if len(matches) < 2 or max(distances.values()) < _CHANGED:
        return matches
    least = max(min(distances.values()), _BLANKS)
    far = [distance > least for distance in distances.values()]
    nearest = [match for match, is_far in zip(matches, far, strict=True) if not is_far]
    said = {match.node.messages for match in nearest}
    if len({lenient_key(messages, call_ids=False) for messages in said}) > 1:
        return [match._replace(instead=before.instead or before) for match in matches]
    sure = _best(nearest)
    sure = sure.instead or sure
    return [
        match._replace(instead=sure) if is_far else match
        for match, is_far in zip(matches, far, strict=True)
    ]


def _echoed(matches: list[Match], group: _Group, nodes: Mapping[int, Node]) -> list[Match]:
    """Returns the match of the node that a message says it echoes, if it is like that node."""
    node = nodes.get(group.messages[0].echo_of)
    if node is None:
        return []
    parents = [match for match in matches if match.node is node.parent]
    reasons = group.is_like(node) if parents else None
    if reasons is None:
        return []
    return [Match(node, match.depth + 1, match.reasons | reasons) for match in parents]


def _children_like(parent: Node, group: _Group) -> Iterator[tuple[Node, int]]:
    """Yields the children that a request's group matches, with how far it is from them."""
    message = group.messages[0]
    exact = tuple(parent.by_key.get(group.exact_key, ()))
    for node in exact:
        if not contradicts_reasoning(node.messages[0], message):
            yield node, _SAME
    if message.role != "assistant" or len(exact) == len(parent.children):
        return
    near = tuple(parent.by_lenient_key.get(group.lenient_key, ()))
    # Read again: a node that was attached meanwhile is in this dictionary first.
    exact = tuple(parent.by_key.get(group.exact_key, ()))
    found = set(exact)
    for node in near:
        if node not in found and not contradicts_reasoning(node.messages[0], message):
            yield node, _BLANKS
    found.update(near)
    # Ids tell one sample from another that is like the echo, which may lack the text beside calls.
    if found and (not any(group.call_ids) or any(group.repeats(node) for node in found)):
        return
    for node in tuple(parent.children):
        sampled = node.messages[0]
        if not node.was_sampled or node in found or contradicts_reasoning(sampled, message):
            continue
        changes = group.changed.changes(sampled)
        if changes is not None:
            yield node, _CHANGED + changes


def _best(matches: list[Match]) -> Match:
    def rank(match: Match) -> tuple[bool, int, int]:
        return match.instead is None, -len(match.reasons), match.node.node_id

    return max(matches, key=rank)


def _chosen(matches: list[Match], wanted: Callable[[Match], bool]) -> list[Match]:
    """Returns the wanted matches, or all if none is wanted."""
    if len(matches) == 1:
        return matches
    return [match for match in matches if wanted(match)] or matches


_BOOKMARKS = 8  # conversations of a session that are remembered

_TOLD_BYTES = 64  # of a token's text and log-probability, about
_TOKEN_BYTES, _NODE_BYTES, _SPAN_BYTES, _ROW_BYTES, _IMAGE_BYTES = 9, 192, 160, 512, 96
"""Record bytes per token, at most per node and per version span, per trajectory, and per image
shown, without the image's own bytes."""


class Tree:
    """All conversations of one session, in which `nodes` lists parents before children."""

    def __init__(self, end_ids: frozenset[int], *, call_ids: bool = False) -> None:
        """Creates a tree without conversations.

        Args:
            end_ids: Ids that end an answer.
            call_ids: Whether tool-call ids distinguish messages, because the template prints them.
        """
        self._end_ids = end_ids
        self._call_ids = call_ids
        self._roots: dict[bytes, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.turns = 0
        """Number of sampled nodes."""
        self.tokens = 0
        """Number of ids in all nodes."""
        self.sampled_tokens = 0
        """Number of sampled ids in all nodes."""
        self._next_id = 1
        self._bookmarks: dict[tuple[bytes, bytes], Bookmark] = {}
        """The most recent bookmarks, by render context and digest of the conversation."""
        self.changes = 0
        """Number of nodes attached and detached so far."""
        self.widest = 0
        """Largest number of children that a node has had."""
        self.text_bytes = 0
        """Approximate size of all message text and of the most likely ids that are kept, bytes."""
        self.leaf_bytes = 0
        """Approximate upper bound of a record with one trajectory per leaf, bytes."""
        self.turn_bytes = 0
        """Approximate upper bound of a record with one trajectory per turn, bytes."""
        self.tree_bytes = _ROW_BYTES
        """Approximate upper bound of a record with the tree itself, bytes."""
        self.edges: dict[Edge, None] = {}
        """The edges that the agent declared, in order."""
        self.spent: set[Spent] = set()
        """The budgets that stopped a request."""

    def __repr__(self) -> str:
        return f"Tree({len(self._roots)} roots, {len(self.nodes)} nodes, {self.turns} turns)"

    def leaves(self) -> Iterator[Node]:
        """Yields the nodes without children, oldest first."""
        for node in self.nodes.values():
            if not node.children:
                yield node

    def root(self, render_context: RenderContext) -> Node:
        """Returns the root of a render context. Creates it if there is none."""
        return self._registered(new_root(render_context))

    def start(
        self, render_context: RenderContext, groups: Sequence[MessageGroup], earlier: bytes = b""
    ) -> Bookmark:
        """Returns where the search for a request starts: where an earlier one led, or the root.

        Args:
            render_context: The request's tools and template options.
            groups: All groups of the request.
            earlier: Digest of an earlier conversation that the request begins with. May be empty.
        """
        bookmark = self._bookmarks.get((render_context.key, earlier))
        if bookmark is not None:
            depth = bookmark.match.depth
            if not depth or (depth <= len(groups) and groups[depth - 1] == bookmark.last):
                return bookmark
        root = self._roots.get(render_context.key)
        return Bookmark(Match(new_root(render_context) if root is None else root, 0), ())

    def search(self, start: Bookmark, groups: Sequence[MessageGroup]) -> tuple[Match, Bookmark]:
        """Finds the deepest node whose path equals a prefix of a request.

        If several samples are equal, the node that the message says it echoes is the one that the
        request continues. Otherwise tool-call ids decide, even if the template does not print them.
        Ids that match none of the samples are ignored, because agents may make up their own. Among
        equally deep nodes, exact matches precede lenient ones, then the newest wins.

        Ids that the model writes may be equal in several samples. An echo that lost its text or had
        its arguments mended then continues the sample with the fewest changes. If that leaves
        samples that differ, it continues none: it is the agent's own message, unless a later
        message echoes a sample that follows one of them.

        A thread may search while the event loop attaches nodes. A node that is attached meanwhile
        may or may not be found.

        Args:
            start: Where to start: a bookmark that continues in the groups, or the root.
            groups: All groups of the request.

        Returns:
            The match, and the bookmark from which a continuation of the request can be searched.
        """
        best, bookmark, passed_over = start.match, start, start.passed_over
        frontier = [best]
        while True:
            if len(frontier) == 1:
                # Most requests continue one long conversation, in which each node has a single
                # child, and comparing is faster than digesting.
                node, depth, reasons, instead = best
                while depth < len(groups):
                    children = node.children[:2]
                    if len(children) != 1 or children[0].messages != groups[depth]:
                        break
                    (node,) = children
                    depth += 1
                    if node.was_sampled:  # only its own path leads to it
                        instead = None
                best = Match(node, depth, reasons, instead)
                frontier = [best]
                if instead is None:
                    bookmark = Bookmark(
                        best, groups[best.depth - 1] if best.depth else (), passed_over
                    )
            depth = best.depth
            if depth == len(groups) or (len(frontier) == 1 and not best.node.children):
                break
            group = _Group(groups[depth], call_ids=self._call_ids)
            named = _chosen(frontier, lambda match: group.answers(match.node))  # noqa: B023
            best = best if best in named else _best(named)
            if len(named) > 1:
                passed_over |= {match.node for match in named}
            frontier = _echoed(named, group, self.nodes)
            if not frontier:
                near = {
                    match.followed(child, _LENIENT if distance else _EXACT): distance
                    for match in named
                    # Digesting a long text is slow: do it only if there are children to compare.
                    if match.node.children
                    for child, distance in _children_like(match.node, group)
                }
                repeated = _chosen([*near], lambda match: group.repeats(match.node))  # noqa: B023
                frontier = _doubted({match: near[match] for match in repeated}, best)
            if not frontier:
                break
            best = _best(frontier)
        return best.instead or best, bookmark

    def keep(self, render_context: RenderContext, digest: bytes, bookmark: Bookmark) -> None:
        """Keeps where a conversation led, for the requests that continue it.

        Args:
            render_context: Its tools and template options.
            digest: Digest of the conversation.
            bookmark: Result of a search since whose start `changes` is the same.
        """
        if bookmark.match.depth:
            self._bookmarks.pop((render_context.key, digest), None)
            self._bookmarks[render_context.key, digest] = bookmark
            if len(self._bookmarks) > _BOOKMARKS:
                del self._bookmarks[next(iter(self._bookmarks))]

    def reserve_id(self) -> int:
        """Returns a unique node id, for a turn that begins."""
        self._next_id += 1
        return self._next_id - 1

    def skip_ids(self, count: int) -> None:
        """Skips ids that were possibly reserved by turns that a restart interrupted."""
        self._next_id += count

    def add_messages(
        self,
        parent: Node,
        group: MessageGroup,
        token_ids: TokenIds,
        images: tuple[Placeholder, ...] = (),
        columns: Sequence[TokenColumn] = (),
    ) -> Node:
        """Attaches an unsampled group, or returns the equal node that another request attached.

        If the template now renders the message differently, a new node is attached.
        """
        key = exact_key(group, call_ids=self._call_ids)
        for node in parent.by_key.get(key, ()):
            # Equal messages may be spelled differently (7 and 7.0): then each has its own tokens.
            if node.sample is None and np.array_equal(node.token_ids, token_ids):
                return node
        node = Node(
            self._next_id,
            parent,
            parent.render_context,
            group,
            token_ids,
            len(token_ids),
            images,
            reasons=self._context_reasons(parent) if group[0].role == "assistant" else frozenset(),
        )
        if columns:
            node.columns = columns_between(columns, parent.end, parent.end + len(token_ids))
        return self.attach(node, key)

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
        """Attaches a sampled turn under its reserved id. Equal samples stay separate nodes."""
        node = Node(
            self.reserve_id() if node_id is None else node_id,
            parent,
            parent.render_context,
            (message,),
            np.concatenate([generation_prompt, sample.token_ids]),
            len(generation_prompt),
            sample=sample,
            reasons=reasons | self._context_reasons(parent),
            said=said,
        )
        if sample.columns:
            end = parent.end + len(node.token_ids)
            node.columns = columns_between(sample.columns, parent.end, end)
            node.sample = replace(sample, columns=())
        return self.attach(node)

    def attach(self, node: Node, key: bytes = b"") -> Node:
        """Attaches a node to its parent. Also used to rebuild a tree.

        Args:
            node: The node. If its parent is a root, that becomes the tree's own one.
            key: Key of its messages, if that is known.
        """
        assert node.parent is not None
        key = key or exact_key(node.messages, call_ids=self._call_ids)
        if node.parent.parent is None:
            node.parent = self._registered(node.parent)
        parent, tokens = node.parent, len(node.token_ids)
        self.changes += 1
        for name, bookmark in [*self._bookmarks.items()]:
            if bookmark.depends_on(parent):
                del self._bookmarks[name]
        last = int(node.token_ids[-1]) if tokens else None
        node.was_sampled = node.sample is not None or _IMPORTED in node.reasons
        node.ends_turn = not node.was_sampled or last in self._end_ids
        node.column_bytes = node.column_bytes or len(node.columns)
        node.end = parent.end + tokens
        node.token_ids.flags.writeable = False
        self._count(node, 1)
        parent.children.append(node)
        self.nodes[node.node_id] = node
        self.widest = max(self.widest, len(parent.children))
        parent.by_key.setdefault(key, []).append(node)
        if node.was_sampled:
            lenient = lenient_key(node.messages, call_ids=self._call_ids)
            parent.by_lenient_key.setdefault(lenient, []).append(node)
        self._next_id = max(self._next_id, node.node_id + 1)
        return node

    def detach(self, node: Node) -> None:
        """Removes a node that could not be stored, unless it has children."""
        assert node.parent is not None
        if node.children or node.stored:
            return
        parent = node.parent
        parent.children.remove(node)
        parent.by_key[exact_key(node.messages, call_ids=self._call_ids)].remove(node)
        if node.was_sampled:
            lenient = lenient_key(node.messages, call_ids=self._call_ids)
            parent.by_lenient_key[lenient].remove(node)
        del self.nodes[node.node_id]
        self.changes += 1
        for name, bookmark in [*self._bookmarks.items()]:
            if bookmark.match.node is node:
                del self._bookmarks[name]
        self._count(node, -1)
        if not parent.children and parent.parent is None:
            del self._roots[parent.render_context.key]
            self.text_bytes -= _context_size(parent.render_context)

    def reattach(self, node: Node) -> Node:
        """Reattaches the detached nodes of a path, for a turn that was prepared on top of it.

        Returns:
            The node, or the tree's own root if it is a root.
        """
        if node.parent is None:
            return self.root(node.render_context)
        detached: list[Node] = []
        one = node
        while one.parent is not None and one.node_id not in self.nodes:
            detached.append(one)
            one = one.parent
        for one in reversed(detached):
            self.attach(one)
        return node

    def _registered(self, root: Node) -> Node:
        """Returns the tree's root of a render context. Registers the given one if there is none."""
        if root.render_context.key not in self._roots:
            self.text_bytes += _context_size(root.render_context)
        return self._roots.setdefault(root.render_context.key, root)

    def _context_reasons(self, parent: Node) -> frozenset[Fidelity]:
        """Returns TOOLS_CHANGED if the first answer after a node is not the conversation's first.

        The conversation began with the same messages under other tools or template options.
        """
        if parent.parent is None or self._roots.keys() <= {parent.render_context.key}:
            return frozenset()
        if any(node.messages[0].role == "assistant" for node in parent.up()):
            return frozenset()
        opening = [exact_key(node.messages, call_ids=self._call_ids) for node in parent.path()]
        first: dict[int, Node] = {}
        """The roots of all conversations with that opening, by the ids of their first answers."""
        for root in self._roots.values():
            ends = [root]
            for key in opening:
                ends = [child for node in ends for child in node.by_key.get(key, ())]
            for child in (child for node in ends for child in node.children):
                if child.messages[0].role == "assistant":
                    first[child.node_id] = root
                    break
        changed = first and first[min(first)].render_context.key != parent.render_context.key
        return frozenset({trajectory_pb2.FIDELITY_REASON_TOOLS_CHANGED}) if changed else frozenset()

    def _count(self, node: Node, sign: int) -> None:
        """Adds the sizes of a node without children to all counts, or subtracts them.

        The parent does not have it as a child at that moment.
        """
        parent, sample = node.parent, node.sample
        assert parent is not None
        own = len(node.token_ids) * _TOKEN_BYTES + _NODE_BYTES + len(node.images) * _IMAGE_BYTES
        own += node.column_bytes
        text = 0
        if sample is not None:
            text = sample.sampling.ByteSize()
            own += len(sample.spans) * _SPAN_BYTES + text + sum(map(len, sample.request_ids))
            tops = sample.tops
            text += 0 if tops is None else tops.ids.nbytes + tops.logprobs.nbytes
            text += _TOLD_BYTES * len(sample.told.logprobs) if sample.told else 0
            self.turns += sign
            self.sampled_tokens += sign * sample.completion_tokens
        for message in node.messages:
            text += len(message.content) + len(message.reasoning)
            text += len(message.images) * _IMAGE_BYTES
            for call in message.tool_calls:
                text += len(call.arguments)
        if sign > 0:  # request ids that come later do not count
            node.own_bytes, node.record_bytes = own, parent.record_bytes + own
        row = sign * (node.record_bytes + _ROW_BYTES)
        self.tokens += sign * len(node.token_ids)
        self.text_bytes += sign * text
        self.tree_bytes += sign * node.own_bytes
        self.turn_bytes += row if sample is not None else 0
        self.leaf_bytes += row
        if not parent.children and parent.parent is not None:
            self.leaf_bytes -= sign * (parent.record_bytes + _ROW_BYTES)


def _context_size(context: RenderContext) -> int:
    return len(context.tools_json) + len(context.options_json)


def path_bytes(tokens: int, nodes: int) -> int:
    """Returns an approximate upper bound of a path's size in a record, bytes."""
    return tokens * _TOKEN_BYTES + nodes * _NODE_BYTES + _ROW_BYTES
