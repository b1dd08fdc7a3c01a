"""How each branch of a session's tree came to be, by rules over the whole tree.

The *main* conversation is found first, at the close, when all of them are known. Each rule keeps
those for which it holds, if it holds for any; the first one that leaves one decides:

| the main conversation |
|---|
| has a turn that its request calls MAIN |
| is not begun by a turn that its request calls otherwise |
| has tools |
| goes on: a second turn follows the first |
| is no probe, and does not quote what the user first said in another one, as title calls do |
| is the oldest |

Where it divides, the same is asked of each way: calls MAIN, is not called otherwise, answers the
calls of the turn before, goes on, is the oldest. So a title or memory call is not taken for the
work because it came first. What leaves the main conversation, or stands beside it, is told apart
by these rules; the first that holds decides:

| rule | lineage |
|---|---|
| its request says what it is, and not MAIN | that |
| it is the main path of the main conversation | MAIN |
| it leaves that with another sample of a turn | SIBLING |
| it leaves that with another message, behind a sampled turn | BRANCH |
| one turn of at most one token, cut by its limit: a probe | AUXILIARY |
| one turn without tools, under another system message, where the main has tools | AUXILIARY |
| the main's tools and system message, behind its last turn, which is not its first | COMPACTION |
| another system message, or other tools | SUB_AGENT |
| anything else | BRANCH where messages are shared, else ROOT |

What is not sure is never AUXILIARY: that is not trained.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollmesh.chat.messages import MessageGroup
from rollmesh.gateway.conversation.reasons import Lineage
from rollmesh.gateway.conversation.tree import Node, Tree
from rollmesh.v1 import types_pb2

_TURNS_BEFORE_COMPACTION = 2
_QUOTED_CHARS = 65_536
_LEAST_QUOTED_CHARS = 8


def lineages(tree: Tree, nodes: Iterable[Node]) -> dict[int, Lineage]:
    """Returns the lineage of the branches that end in `nodes`, by node id."""
    ways = _Ways(tree)
    found = ways.all_of(tree)
    return {node.node_id: ways.lineage(found[node.node_id]) for node in nodes}


class _Way(NamedTuple):
    """A path, as far as its lineage depends on it."""

    head: Node
    """Its first node."""
    said: Lineage | None
    """What the last request on it that says so calls itself."""
    first: Node | None
    """Where it leaves the main path; None where it does not."""
    last: Node | None
    """Where it leaves, last of all, the way that its conversation goes on."""
    shared: bool
    """Whether it took a turn on the main path."""
    begun: Node | None
    """Its first turn that is not on the main path."""


class _Ways:
    """The main path of a tree, and what leaves it."""

    def __init__(self, tree: Tree) -> None:
        """Counts what lies below each node; parents come before their children in `nodes`."""
        self._turns: dict[int, int] = {}
        self._says_main: set[int] = set()
        for node in reversed(tree.nodes.values()):
            below = max((self._turns[child.node_id] for child in node.children), default=0)
            self._turns[node.node_id] = below + (node.sample is not None)
            says = any(child.node_id in self._says_main for child in node.children)
            if says or node.said == types_pb2.LINEAGE_MAIN:
                self._says_main.add(node.node_id)
        heads = [node for node in tree.nodes.values() if _is_head(node)]
        self._chosen: dict[int, Node] = {}
        self._main = self._main_of(heads) if heads else None
        self._known: dict[tuple[int, int], Lineage] = {}
        self._trunk: list[Node] = []
        reached = self._main
        while reached is not None:
            self._trunk.append(reached)
            reached = self._next(reached) if reached.children else None

    def all_of(self, tree: Tree) -> dict[int, _Way]:
        """Returns the paths of all nodes, by the ids of their last ones."""
        found: dict[int, _Way] = {}
        for node in tree.nodes.values():
            assert node.parent is not None
            before = found.get(node.parent.node_id, _Way(node, None, None, None, False, None))  # noqa: FBT003
            said = before.said if node.said is None else node.said
            way = before._replace(said=said)
            if not self._is_first(node):
                way = way._replace(first=way.first or node, last=node)
            if node.sample is not None and way.first is None:
                way = way._replace(shared=True)
            elif node.sample is not None and way.begun is None:
                way = way._replace(begun=node)
            found[node.node_id] = way
        return found

    def lineage(self, way: _Way) -> Lineage:
        """Returns the lineage of the branch that ends with a path."""
        main = self._main
        assert main is not None
        if way.said is not None and way.said != types_pb2.LINEAGE_MAIN:
            return way.said
        if way.first is None or way.last is None:
            return types_pb2.LINEAGE_MAIN
        if way.head is main and (way.shared or way.first.sample is not None):
            return (
                types_pb2.LINEAGE_BRANCH if way.last.sample is None else types_pb2.LINEAGE_SIBLING
            )
        key = way.head.node_id, 0 if way.begun is None else way.begun.node_id
        if key not in self._known:
            self._known[key] = self._beside(way.head, way.begun, main)
        return self._known[key]

    def _main_of(self, heads: list[Node]) -> Node:
        asked = [(head, _first_asked(head)) for head in heads]

        def rank(head: Node) -> tuple[bool, ...]:
            own = _first_asked(head)
            quotes = any(_quotes(own, other) for one, other in asked if one is not head)
            first = _first_turn(head)
            return (
                *self._said(head),
                bool(head.render_context.tools_json),
                self._turns[head.node_id] > 1,
                not quotes and not (first is not None and _is_probe(first)),
            )

        return max(heads, key=rank)

    def _next(self, node: Node) -> Node:
        """Returns the child with which a path goes on."""
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
        """Says whether a request below calls its turn MAIN, and whether the first is not other."""
        first = _first_turn(node)
        other = first is not None and first.said not in {None, types_pb2.LINEAGE_MAIN}
        return node.node_id in self._says_main, not other

    def _is_first(self, node: Node) -> bool:
        """Says whether a node goes on where its parent does; a head: whether it is main."""
        if _is_head(node):
            return node is self._main
        return node.parent is not None and self._next(node.parent) is node

    def _beside(self, head: Node, first: Node | None, main: Node) -> Lineage:
        """Returns the lineage of a conversation that shares no sampled turn with the main one.

        Args:
            head: Its first node.
            first: Its first turn, where it has taken one.
            main: The first node of the main conversation.
        """
        one_turn = first is not None and self._turns[first.node_id] == 1
        same_system = _system(head) == _system(main)
        same_context = head.render_context.key == main.render_context.key
        if one_turn and first is not None and _is_probe(first):
            return types_pb2.LINEAGE_AUXILIARY
        toolless = bool(main.render_context.tools_json) and not head.render_context.tools_json
        if one_turn and toolless and not same_system:
            return types_pb2.LINEAGE_AUXILIARY
        if same_context and same_system and first is not None and _follows(first, self._trunk):
            return types_pb2.LINEAGE_COMPACTION
        if not same_system or (not same_context and bool(head.render_context.tools_json)):
            return types_pb2.LINEAGE_SUB_AGENT
        return types_pb2.LINEAGE_BRANCH if head is main else types_pb2.LINEAGE_ROOT


def _is_probe(node: Node) -> bool:
    sample = node.sample
    return (
        sample is not None
        and len(sample.token_ids) <= 1
        and sample.finish == types_pb2.FINISH_REASON_LENGTH
    )


def _is_head(node: Node) -> bool:
    return node.parent is not None and node.parent.parent is None


def _first_turn(node: Node) -> Node | None:
    """Returns the oldest turn at or below a node, along the oldest way."""
    found: Node | None = node
    while found is not None and found.sample is None:
        found = found.children[0] if found.children else None
    return found


def _first_asked(head: Node) -> str:
    """Returns what the user first says in a conversation."""
    node: Node | None = head
    while node is not None and node.messages[0].role == "system":
        node = node.children[0] if node.children else None
    return node.messages[0].content[:_QUOTED_CHARS] if node is not None else ""


def _quotes(text: str, other: str) -> bool:
    return len(other) >= _LEAST_QUOTED_CHARS and len(text) > len(other) and other in text


def _system(head: Node) -> MessageGroup:
    return head.messages if head.messages[0].role == "system" else ()


def _follows(first: Node, trunk: Sequence[Node]) -> bool:
    """Says whether a conversation began when the main one had taken turns and took no more."""
    turns = [node.node_id for node in trunk if node.sample is not None]
    before = [node_id for node_id in turns if node_id < first.node_id]
    return len(before) >= _TURNS_BEFORE_COMPACTION and len(before) == len(turns)
