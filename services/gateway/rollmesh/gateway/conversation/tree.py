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

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from rollmesh.chat.canonical import exact_key, lenient_key
from rollmesh.chat.images.placing import Placeholder
from rollmesh.chat.messages import Message, MessageGroup, RenderContext
from rollmesh.gateway.conversation.branches import Branches, new_root
from rollmesh.gateway.conversation.matching import Bookmark, Match, search
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.reasons import Fidelity, Lineage
from rollmesh.runtime.codec.arrays import TokenIds
from rollmesh.v1 import trajectory_pb2

_BOOKMARKS = 8  # conversations of a session that are remembered

_TOKEN_BYTES, _NODE_BYTES, _SPAN_BYTES, _ROW_BYTES, _IMAGE_BYTES = 9, 192, 160, 512, 96
"""Record bytes per token, at most per node and per version span, per trajectory, and per image
shown, without the image's own bytes."""


class Tree(Branches):
    """All conversations of one open session."""

    def __init__(self, end_ids: frozenset[int], *, call_ids: bool = False) -> None:
        """Creates a tree without conversations.

        Args:
            end_ids: Ids that end an answer.
            call_ids: Whether tool-call ids distinguish messages, because the template prints them.
        """
        super().__init__()
        self._end_ids = end_ids
        self._call_ids = call_ids
        self._next_id = 1
        self._bookmarks: dict[tuple[bytes, bytes], Bookmark] = {}
        """By render context and digest of the conversation; the most recent ones."""
        self.changes = 0
        """Number of nodes attached and detached so far."""
        self.text_bytes = 0
        """Approximate size of all message text and of the most likely ids that are kept, bytes."""
        self.leaf_bytes = 0
        """Approximate upper bound of a record with one trajectory per leaf, bytes."""
        self.turn_bytes = 0
        """Approximate upper bound of a record with one trajectory per turn, bytes."""

    def start(
        self, render_context: RenderContext, groups: Sequence[MessageGroup], earlier: bytes = b""
    ) -> Bookmark:
        """Returns where the search for a request starts: where an earlier one led, or the root.

        Args:
            render_context: The request's tools and template options.
            groups: All groups of the request.
            earlier: Digest of an earlier conversation that the request begins with; may be empty.
        """
        bookmark = self._bookmarks.get((render_context.key, earlier))
        if bookmark is not None and bookmark.continues_in(groups):
            return bookmark
        root = self._roots.get(render_context.key)
        return Bookmark(Match(new_root(render_context) if root is None else root, 0), ())

    def search(self, start: Bookmark, groups: Sequence[MessageGroup]) -> tuple[Match, Bookmark]:
        """Searches from a bookmark; returns the match and the bookmark that `keep` takes."""
        return search(start, groups, call_ids=self._call_ids)

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

    def root_reasons(self, render_context: RenderContext) -> frozenset[Fidelity]:
        """Returns why a first message starts a new root: TOOLS_CHANGED, or no reason."""
        others = (root for key, root in self._roots.items() if key != render_context.key)
        changed = any(root.children for root in others)
        return frozenset({trajectory_pb2.FIDELITY_REASON_TOOLS_CHANGED}) if changed else frozenset()

    def add_messages(
        self,
        parent: Node,
        group: MessageGroup,
        token_ids: TokenIds,
        images: tuple[Placeholder, ...] = (),
    ) -> Node:
        """Attaches an unsampled group, or returns the equal node that another request attached.

        If the template now renders the message differently, a new node is attached.
        """
        key = self._key(group)
        for node in parent.by_key.get(key, ()):
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
            images,
            reasons=reasons,
        )
        return self._attach(node, key)

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
        return self._attach(node, self._key(node.messages))

    def _attach(self, node: Node, key: bytes) -> Node:
        """Attaches a node, given the key of its messages."""
        parent = self._adopt(node)
        self._drop_bookmarks(lambda bookmark: bookmark.depends_on(parent))
        last = int(node.token_ids[-1]) if len(node.token_ids) else None
        node.ends_turn = node.sample is None or last in self._end_ids
        node.record_bytes = parent.record_bytes + _node_bytes(node)
        if not parent.children and parent.parent is not None:
            self.leaf_bytes -= parent.record_bytes + _ROW_BYTES
        self._count_record(node, 1)
        super().attach(node)
        parent.by_key.setdefault(key, []).append(node)
        if node.sample is not None:
            parent.by_lenient_key.setdefault(self._lenient_key(node.messages), []).append(node)
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
        self._drop_bookmarks(lambda bookmark: bookmark.match.node is node)
        self.turns -= node.sample is not None
        self.tokens -= len(node.token_ids)
        self.text_bytes -= _size(node)
        if not parent.children:
            if parent.parent is None:
                del self._roots[parent.render_context.key]
                self.text_bytes -= _context_size(parent.render_context)
            else:
                self.leaf_bytes += parent.record_bytes + _ROW_BYTES
        self._count_record(node, -1)

    def reattach(self, node: Node) -> Node:
        """Reattaches the detached nodes of a path, for a turn that was prepared on top of it.

        Returns:
            The node, or the tree's own root if it is a root.
        """
        if node.parent is None:
            return self.root(node.render_context)
        detached = list(itertools.takewhile(lambda one: one.node_id not in self.nodes, node.up()))
        for one in reversed(detached):
            self.attach(one)
        return node

    def _registered(self, root: Node) -> Node:
        """Returns the tree's root of a render context; registers the given one if there is none."""
        if root.render_context.key not in self._roots:
            self.text_bytes += _context_size(root.render_context)
        return super()._registered(root)

    def _drop_bookmarks(self, stale: Callable[[Bookmark], bool]) -> None:
        self.changes += 1
        if self._bookmarks:
            self._bookmarks = {key: one for key, one in self._bookmarks.items() if not stale(one)}

    def _count_record(self, leaf: Node, sign: int) -> None:
        size = sign * (leaf.record_bytes + _ROW_BYTES)
        self.leaf_bytes += size
        if leaf.sample is not None:
            self.turn_bytes += size

    def _key(self, group: MessageGroup) -> bytes:
        return exact_key(group, call_ids=self._call_ids)

    def _lenient_key(self, group: MessageGroup) -> bytes:
        return lenient_key(group, call_ids=self._call_ids)


def _context_size(context: RenderContext) -> int:
    return len(context.tools_json) + len(context.options_json)


def path_bytes(tokens: int, nodes: int) -> int:
    """Returns an approximate upper bound of a path's size in a record, bytes."""
    return tokens * _TOKEN_BYTES + nodes * _NODE_BYTES + _ROW_BYTES


def _node_bytes(node: Node) -> int:
    spans = len(node.sample.spans) if node.sample is not None else 0
    size = len(node.token_ids) * _TOKEN_BYTES + _NODE_BYTES + spans * _SPAN_BYTES
    return size + len(node.images) * _IMAGE_BYTES


def _size(node: Node) -> int:
    tops = None if node.sample is None else node.sample.tops
    return (0 if tops is None else tops.ids.nbytes + tops.logprobs.nbytes) + sum(
        len(message.content)
        + len(message.reasoning)
        + sum(len(call.arguments) for call in message.tool_calls)
        + len(message.images) * _IMAGE_BYTES
        for message in node.messages
    )
