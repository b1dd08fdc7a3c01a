"""Determines the lineage of each branch of a session's tree, by rules over the complete tree.

The *main* conversation is chosen first, at close, when all conversations are known. Each rule
keeps the conversations that satisfy it, if any do. The first rule that leaves exactly one decides:

| the main conversation |
|---|
| has a turn whose request says MAIN |
| does not begin with a turn whose request says another lineage |
| has tools |
| continues: a second turn follows the first |
| is not a probe, and does not quote the first user message of another one, as title calls do |
| is the oldest |

Where the main conversation forks, its children are compared in the same way: says MAIN, does not
begin with another lineage, answers the calls of the previous turn, continues, is the oldest. So a
title or memory call is not mistaken for the main work because it came first. Branches that leave
the main conversation, and other conversations, are classified by these rules; the first match
decides:

| rule | lineage |
|---|---|
| its request says a lineage other than MAIN | that lineage |
| it is the main path of the main conversation | MAIN |
| it leaves the main path with another sample of a turn | SIBLING |
| it leaves the main path with another message, after a sampled turn | BRANCH |
| one turn of at most one token, cut by its limit: a probe | AUXILIARY |
| one turn without tools, with another system message, while the main one has tools | AUXILIARY |
| main's tools and system message, after main's last turn, which is not its first | COMPACTION |
| another system message, or other tools | SUB_AGENT |
| anything else | BRANCH if messages are shared, else ROOT |

An uncertain case is never AUXILIARY, because AUXILIARY turns are not trained.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollmesh.chat.messages import MessageGroup
from rollmesh.gateway.conversation.branches import Branches
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.reasons import Lineage
from rollmesh.v1 import sampling_pb2, trajectory_pb2

_TURNS_BEFORE_COMPACTION = 2
_QUOTED_CHARS = 65_536
_LEAST_QUOTED_CHARS = 8


def lineages(tree: Branches, nodes: Iterable[Node]) -> dict[int, Lineage]:
    """Returns the lineage of the branches that end in `nodes`, by node id."""
    ways = _Ways(tree)
    found = ways.all_of(tree)
    return {node.node_id: ways.lineage(found[node.node_id]) for node in nodes}


class _Way(NamedTuple):
    """The properties of a path that decide its lineage."""

    start: Node
    """Its first node."""
    said: Lineage | None
    """The lineage given by the last request on it that gives one."""
    first: Node | None
    """Its first node off the main path; None if it stays on the main path."""
    last: Node | None
    """The last node at which it departs from the preferred continuation of its conversation."""
    shared: bool
    """Whether it has a turn on the main path."""
    begun: Node | None
    """Its first turn that is not on the main path."""


class _Ways:
    """The main path of a tree and the paths that leave it."""

    def __init__(self, tree: Branches) -> None:
        """Counts the turns below each node; parents precede their children in `nodes`."""
        self._turns: dict[int, int] = {}
        self._says_main: set[int] = set()
        for node in reversed(tree.nodes.values()):
            below = max((self._turns[child.node_id] for child in node.children), default=0)
            self._turns[node.node_id] = below + (node.sample is not None)
            says = any(child.node_id in self._says_main for child in node.children)
            if says or node.said == trajectory_pb2.LINEAGE_MAIN:
                self._says_main.add(node.node_id)
        starts = [node for node in tree.nodes.values() if _is_start(node)]
        self._chosen: dict[int, Node] = {}
        self._main = self._main_of(starts) if starts else None
        self._known: dict[tuple[int, int], Lineage] = {}
        self._trunk: list[Node] = []
        reached = self._main
        while reached is not None:
            self._trunk.append(reached)
            reached = self._next(reached) if reached.children else None

    def all_of(self, tree: Branches) -> dict[int, _Way]:
        """Returns the paths of all nodes, by the id of the last node."""
        found: dict[int, _Way] = {}
        for node in tree.nodes.values():
            assert node.parent is not None
            before = found.get(node.parent.node_id) or _Way(node, None, None, None, False, None)  # noqa: FBT003
            start, said, first, last, shared, begun = before
            if node.said is not None:
                said = node.said
            if not self._is_first(node):
                first, last = first or node, node
            if node.sample is not None and first is None:
                shared = True
            elif node.sample is not None:
                begun = begun or node
            found[node.node_id] = _Way(start, said, first, last, shared, begun)
        return found

    def lineage(self, way: _Way) -> Lineage:
        """Returns the lineage of the branch that a path ends in."""
        main = self._main
        assert main is not None
        if way.said is not None and way.said != trajectory_pb2.LINEAGE_MAIN:
            return way.said
        if way.first is None or way.last is None:
            return trajectory_pb2.LINEAGE_MAIN
        if way.start is main and (way.shared or way.first.sample is not None):
            return (
                trajectory_pb2.LINEAGE_BRANCH
                if way.last.sample is None
                else trajectory_pb2.LINEAGE_SIBLING
            )
        key = way.start.node_id, 0 if way.begun is None else way.begun.node_id
        if key not in self._known:
            self._known[key] = self._beside(way.start, way.begun, main)
        return self._known[key]

    def _main_of(self, starts: list[Node]) -> Node:
        asked = [(start, _first_asked(start)) for start in starts]

        def rank(start: Node) -> tuple[bool, ...]:
            own = _first_asked(start)
            quotes = any(_quotes(own, other) for one, other in asked if one is not start)
            first = _first_turn(start)
            return (
                *self._said(start),
                bool(start.render_context.tools_json),
                self._turns[start.node_id] > 1,
                not quotes and not (first is not None and _is_probe(first)),
            )

        return max(starts, key=rank)

    def _next(self, node: Node) -> Node:
        """Returns the child with which a path preferably continues."""
        if len(node.children) == 1:
            return node.children[0]
        chosen = self._chosen.get(id(node))
        if chosen is None:

            def rank(child: Node) -> tuple[bool, ...]:
                answers = child.messages[0].role == "tool"
                return (*self._said(child), answers, self._turns[child.node_id] > 1)

            chosen = self._chosen[id(node)] = max(node.children, key=rank)
        return chosen

    def _said(self, node: Node) -> tuple[bool, bool]:
        """Returns whether a request below says MAIN, and whether the first says nothing else."""
        first = _first_turn(node)
        other = first is not None and first.said not in {None, trajectory_pb2.LINEAGE_MAIN}
        return node.node_id in self._says_main, not other

    def _is_first(self, node: Node) -> bool:
        """Returns whether a node is its parent's preferred child, or the start of main."""
        if _is_start(node):
            return node is self._main
        return node.parent is not None and self._next(node.parent) is node

    def _beside(self, start: Node, first: Node | None, main: Node) -> Lineage:
        """Returns the lineage of a conversation that shares no sampled turn with the main one.

        Args:
            start: Its first node.
            first: Its first turn, if it has one.
            main: The first node of the main conversation.
        """
        one_turn = first is not None and self._turns[first.node_id] == 1
        same_system = _system(start) == _system(main)
        same_context = start.render_context.key == main.render_context.key
        if one_turn and first is not None and _is_probe(first):
            return trajectory_pb2.LINEAGE_AUXILIARY
        toolless = bool(main.render_context.tools_json) and not start.render_context.tools_json
        if one_turn and toolless and not same_system:
            return trajectory_pb2.LINEAGE_AUXILIARY
        if same_context and same_system and first is not None and _follows(first, self._trunk):
            return trajectory_pb2.LINEAGE_COMPACTION
        if not same_system or (not same_context and bool(start.render_context.tools_json)):
            return trajectory_pb2.LINEAGE_SUB_AGENT
        return trajectory_pb2.LINEAGE_BRANCH if start is main else trajectory_pb2.LINEAGE_ROOT


def _is_probe(node: Node) -> bool:
    sample = node.sample
    return (
        sample is not None
        and len(sample.token_ids) <= 1
        and sample.finish == sampling_pb2.FINISH_REASON_LENGTH
    )


def _is_start(node: Node) -> bool:
    return node.parent is not None and node.parent.parent is None


def _first_turn(node: Node) -> Node | None:
    """Returns the first turn at or below a node, following the oldest child."""
    found: Node | None = node
    while found is not None and found.sample is None:
        found = found.children[0] if found.children else None
    return found


def _first_asked(start: Node) -> str:
    """Returns the first user message of a conversation."""
    node: Node | None = start
    while node is not None and node.messages[0].role == "system":
        node = node.children[0] if node.children else None
    return node.messages[0].content[:_QUOTED_CHARS] if node is not None else ""


def _quotes(text: str, other: str) -> bool:
    return len(other) >= _LEAST_QUOTED_CHARS and len(text) > len(other) and other in text


def _system(start: Node) -> MessageGroup:
    return start.messages if start.messages[0].role == "system" else ()


def _follows(first: Node, trunk: Sequence[Node]) -> bool:
    """Returns whether a conversation began after the last of the main one's two or more turns."""
    turns = [node.node_id for node in trunk if node.sample is not None]
    before = [node_id for node_id in turns if node_id < first.node_id]
    return len(before) >= _TURNS_BEFORE_COMPACTION and len(before) == len(turns)
