"""How each branch of a session's tree came to be, by rules over the whole tree.

The *main* conversation is the oldest one that has tools, or the oldest one where none has. What
leaves it, or stands beside it, is told apart by these rules; the first that holds decides:

| rule | lineage |
|---|---|
| it is the first path of the main conversation | MAIN |
| it leaves that with another sample of a turn | SIBLING |
| it leaves that with another message, behind a sampled turn | BRANCH |
| one turn of at most one token, cut by its limit: a probe | AUXILIARY |
| one turn without tools, under another system message, where the main has tools | AUXILIARY |
| the main's tools and system message, behind its last turn, which is not its first | COMPACTION |
| another system message, or other tools | SUB_AGENT |
| anything else | BRANCH where messages are shared, else ROOT |
"""

from collections.abc import Iterable, Iterator

from rollmesh.gateway.fidelity import Finish, Lineage
from rollmesh.gateway.messages import Unit
from rollmesh.gateway.tree import Node, Tree

_TURNS_BEFORE_COMPACTION = 2


def lineages(tree: Tree, nodes: Iterable[Node]) -> dict[int, Lineage]:
    """Returns the lineage of the branches that end in `nodes`, by node id."""
    heads = [node for node in tree.nodes.values() if _is_head(node)]
    main = next((head for head in heads if head.frame.tools_json), heads[0] if heads else None)
    if main is None:
        return {}
    return {node.node_id: _lineage(node.path(), main) for node in nodes}


def _lineage(path: list[Node], main: Node) -> Lineage:
    turnings = [at for at, node in enumerate(path) if not _is_first(node, main)]
    if not turnings:
        return Lineage.MAIN
    first, last = path[turnings[0]], path[turnings[-1]]
    shared = any(node.sample is not None for node in path[: turnings[0]])
    if path[0] is main and (shared or first.sample is not None):
        return Lineage.BRANCH if last.sample is None else Lineage.SIBLING
    return _beside(path, path[turnings[0] :], main)


def _beside(path: list[Node], below: list[Node], main: Node) -> Lineage:
    """Returns the lineage of a conversation that shares no sampled turn with the main one.

    Args:
        path: Its nodes.
        below: Those of them that it does not share.
        main: The first node of the main conversation.
    """
    first = next((node for node in below if node.sample is not None), None)
    one_turn = first is not None and not _goes_on(first)
    same_system = _system(path[0]) == _system(main)
    same_frame = path[0].frame.key == main.frame.key
    if one_turn and first is not None and _is_probe(first):
        return Lineage.AUXILIARY
    toolless = bool(main.frame.tools_json) and not path[0].frame.tools_json
    if one_turn and toolless and not same_system:
        return Lineage.AUXILIARY
    if same_frame and same_system and first is not None and _follows(first, main):
        return Lineage.COMPACTION
    if not same_system or (not same_frame and bool(path[0].frame.tools_json)):
        return Lineage.SUB_AGENT
    return Lineage.BRANCH if path[0] is main else Lineage.ROOT


def _is_probe(node: Node) -> bool:
    sample = node.sample
    return sample is not None and len(sample.token_ids) <= 1 and sample.finish is Finish.LENGTH


def _is_head(node: Node) -> bool:
    return node.parent is not None and node.parent.parent is None


def _is_first(node: Node, main: Node) -> bool:
    """Says whether a node goes on where its parent first went on; a head: whether it is main."""
    if _is_head(node):
        return node is main
    return node.parent is not None and node.parent.children[0] is node


def _goes_on(node: Node) -> bool:
    """Says whether a sampled turn follows."""
    below = list(node.children)
    while below:
        child = below.pop()
        if child.sample is not None:
            return True
        below += child.children
    return False


def _system(head: Node) -> Unit:
    return head.unit if head.unit[0].role == "system" else ()


def _follows(first: Node, main: Node) -> bool:
    """Says whether a conversation began when the main one had taken turns and took no more."""
    turns = [node.node_id for node in _first_path(main) if node.sample is not None]
    before = [node_id for node_id in turns if node_id < first.node_id]
    return len(before) >= _TURNS_BEFORE_COMPACTION and len(before) == len(turns)


def _first_path(head: Node) -> Iterator[Node]:
    node: Node | None = head
    while node is not None:
        yield node
        node = node.children[0] if node.children else None
