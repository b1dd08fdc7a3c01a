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

from rollmesh.gateway.fidelity import Finish, Lineage
from rollmesh.gateway.messages import Unit
from rollmesh.gateway.tree import Node, Tree

_TURNS_BEFORE_COMPACTION = 2
_QUOTED_CHARS = 65_536
_LEAST_QUOTED_CHARS = 8


def lineages(tree: Tree, nodes: Iterable[Node]) -> dict[int, Lineage]:
    """Returns the lineage of the branches that end in `nodes`, by node id."""
    ways = _Ways(tree)
    heads = [node for node in tree.nodes.values() if _is_head(node)]
    if not heads:
        return {}
    return {node.node_id: ways.lineage(node.path()) for node in nodes}


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
            if says or node.said is Lineage.MAIN:
                self._says_main.add(node.node_id)
        heads = [node for node in tree.nodes.values() if _is_head(node)]
        self._chosen: dict[int, Node] = {}
        self._main = self._main_of(heads) if heads else None
        self._trunk: list[Node] = []
        reached = self._main
        while reached is not None:
            self._trunk.append(reached)
            reached = self._next(reached) if reached.children else None

    def lineage(self, path: list[Node]) -> Lineage:
        """Returns the lineage of the branch that ends with a path."""
        main = self._main
        assert main is not None
        said = next((node.said for node in reversed(path) if node.said is not None), None)
        if said not in {None, Lineage.MAIN}:
            assert said is not None
            return said
        turnings = [at for at, node in enumerate(path) if not self._is_first(node)]
        if not turnings:
            return Lineage.MAIN
        first, last = path[turnings[0]], path[turnings[-1]]
        shared = any(node.sample is not None for node in path[: turnings[0]])
        if path[0] is main and (shared or first.sample is not None):
            return Lineage.BRANCH if last.sample is None else Lineage.SIBLING
        return self._beside(path, path[turnings[0] :], main)

    def _main_of(self, heads: list[Node]) -> Node:
        asked = [(head, _first_asked(head)) for head in heads]

        def rank(head: Node) -> tuple[bool, ...]:
            own = _first_asked(head)
            quotes = any(_quotes(own, other) for one, other in asked if one is not head)
            first = _first_turn(head)
            return (
                *self._said(head),
                bool(head.frame.tools_json),
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
                answers = child.unit[0].role == "tool"
                return (*self._said(child), answers, self._turns[child.node_id] > 1)

            chosen = self._chosen[id(node)] = max(node.children, key=rank)
        return chosen

    def _said(self, node: Node) -> tuple[bool, bool]:
        """Says whether a request below calls its turn MAIN, and whether the first is not other."""
        first = _first_turn(node)
        other = first is not None and first.said not in {None, Lineage.MAIN}
        return node.node_id in self._says_main, not other

    def _is_first(self, node: Node) -> bool:
        """Says whether a node goes on where its parent does; a head: whether it is main."""
        if _is_head(node):
            return node is self._main
        return node.parent is not None and self._next(node.parent) is node

    def _beside(self, path: list[Node], below: list[Node], main: Node) -> Lineage:
        """Returns the lineage of a conversation that shares no sampled turn with the main one.

        Args:
            path: Its nodes.
            below: Those of them that it does not share.
            main: The first node of the main conversation.
        """
        first = next((node for node in below if node.sample is not None), None)
        one_turn = first is not None and self._turns[first.node_id] == 1
        same_system = _system(path[0]) == _system(main)
        same_frame = path[0].frame.key == main.frame.key
        if one_turn and first is not None and _is_probe(first):
            return Lineage.AUXILIARY
        toolless = bool(main.frame.tools_json) and not path[0].frame.tools_json
        if one_turn and toolless and not same_system:
            return Lineage.AUXILIARY
        if same_frame and same_system and first is not None and _follows(first, self._trunk):
            return Lineage.COMPACTION
        if not same_system or (not same_frame and bool(path[0].frame.tools_json)):
            return Lineage.SUB_AGENT
        return Lineage.BRANCH if path[0] is main else Lineage.ROOT


def _is_probe(node: Node) -> bool:
    sample = node.sample
    return sample is not None and len(sample.token_ids) <= 1 and sample.finish is Finish.LENGTH


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
    while node is not None and node.unit[0].role == "system":
        node = node.children[0] if node.children else None
    return node.unit[0].content[:_QUOTED_CHARS] if node is not None else ""


def _quotes(text: str, other: str) -> bool:
    return len(other) >= _LEAST_QUOTED_CHARS and len(text) > len(other) and other in text


def _system(head: Node) -> Unit:
    return head.unit if head.unit[0].role == "system" else ()


def _follows(first: Node, trunk: Sequence[Node]) -> bool:
    """Says whether a conversation began when the main one had taken turns and took no more."""
    turns = [node.node_id for node in trunk if node.sample is not None]
    before = [node_id for node_id in turns if node_id < first.node_id]
    return len(before) >= _TURNS_BEFORE_COMPACTION and len(before) == len(turns)
