"""The nodes of one session: what an export reads of a tree.

Nothing here searches: a closed session, which is only exported, is rebuilt as `Branches`. The
`Tree` of an open session adds what finds nodes for requests.
"""

from collections.abc import Iterator

import numpy as np

from rollmesh.chat.messages import RenderContext
from rollmesh.gateway.conversation.nodes import Node


class Branches:
    """All conversations of one session; `nodes` lists parents before children."""

    def __init__(self) -> None:
        """Starts without conversations."""
        self._roots: dict[bytes, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.turns = 0
        """Number of sampled nodes."""
        self.tokens = 0
        """Number of ids in all nodes."""

    def __repr__(self) -> str:
        """Describes the size of the tree."""
        return f"Tree({len(self._roots)} roots, {len(self.nodes)} nodes, {self.turns} turns)"

    def attach(self, node: Node) -> Node:
        """Attaches a node to its parent."""
        parent = self._adopt(node)
        tokens = len(node.token_ids)
        node.end = parent.end + tokens
        node.token_ids.flags.writeable = False
        parent.children.append(node)
        self.nodes[node.node_id] = node
        self.turns += node.sample is not None
        self.tokens += tokens
        return node

    def leaves(self) -> Iterator[Node]:
        """Yields the nodes without children, oldest first."""
        for node in self.nodes.values():
            if not node.children:
                yield node

    def root(self, render_context: RenderContext) -> Node:
        """Returns the root of a render context; creates it if there is none."""
        return self._roots.get(render_context.key) or self._registered(new_root(render_context))

    def _adopt(self, node: Node) -> Node:
        """Returns the parent of a node; a root is the tree's own."""
        assert node.parent is not None
        if node.parent.parent is None:
            node.parent = self._registered(node.parent)
        return node.parent

    def _registered(self, root: Node) -> Node:
        """Returns the tree's root of a render context; registers the given one if there is none."""
        return self._roots.setdefault(root.render_context.key, root)


def new_root(render_context: RenderContext) -> Node:
    """Returns a root that no tree has yet."""
    return Node(0, None, render_context, (), np.empty(0, np.uint32), 0)
