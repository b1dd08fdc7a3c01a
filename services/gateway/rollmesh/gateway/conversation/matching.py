"""Finds the node from which a request continues its session's tree.

A request carries its complete conversation. The search goes down the tree group by group, and
agents usually continue an earlier request, so the node that the earlier request led to is kept as a
`Bookmark`: the search starts there and costs as much as the new messages.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rollmesh.chat.canonical import contradicts_reasoning, exact_key, is_mended_echo, lenient_key
from rollmesh.chat.messages import MessageGroup
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.reasons import Fidelity
from rollmesh.v1 import trajectory_pb2

_EXACT: frozenset[Fidelity] = frozenset()
_LENIENT: frozenset[Fidelity] = frozenset({trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO})


class Match(NamedTuple):
    """The node from which a request continues the tree."""

    node: Node
    """The deepest node that matches the request."""
    depth: int
    """Number of the request's groups that match."""
    reasons: frozenset[Fidelity] = _EXACT
    """LENIENT_ECHO if a sampled message was echoed with changes and was kept as sampled."""


class Bookmark(NamedTuple):
    """The node that the beginning of a conversation leads to, whatever follows it.

    It holds until a node on the way, or one that was passed over, gets another child.
    """

    match: Match
    last: MessageGroup
    """The last group of that beginning; a later request may have added tool results to it."""
    passed_over: frozenset[Node] = frozenset()
    """Nodes whose children were compared although the path does not contain them."""

    def continues_in(self, groups: Sequence[MessageGroup]) -> bool:
        """Returns whether a conversation with the same first messages still leads to the node."""
        depth = self.match.depth
        return not depth or (depth <= len(groups) and groups[depth - 1] == self.last)

    def depends_on(self, parent: Node) -> bool:
        """Returns whether another child of a node may lead the conversation elsewhere."""
        node = self.match.node.parent
        while node is not None and node is not parent and node.end >= parent.end:
            node = node.parent
        return node is parent or parent in self.passed_over


def search(
    start: Bookmark, groups: Sequence[MessageGroup], *, call_ids: bool
) -> tuple[Match, Bookmark]:
    """Finds the deepest node whose path equals a prefix of a request.

    If several samples are equal, the node that the message says it echoes is the one that the
    request continues; otherwise tool-call ids decide, even if the template does not print them. Ids
    that match none of the samples are ignored, because agents may make up their own. Among equally
    deep nodes, exact matches precede lenient ones, then the newest wins.

    A thread may search while the event loop attaches nodes; a node that is attached meanwhile may
    or may not be found.

    Args:
        start: Where to start: a bookmark that continues in the groups, or the root.
        groups: All groups of the request.
        call_ids: Whether tool-call ids distinguish messages, because the template prints them.

    Returns:
        The match, and the bookmark from which a continuation of the request can be searched.
    """
    best, bookmark, passed_over = start.match, start, start.passed_over
    frontier = [best]
    while True:
        if len(frontier) == 1:
            best = _unbranched(best, groups)
            frontier = [best]
            bookmark = Bookmark(best, groups[best.depth - 1] if best.depth else (), passed_over)
        depth = best.depth
        if depth == len(groups):
            break
        group = groups[depth]
        named = _chosen(frontier, lambda match: _answers(group, match.node))  # noqa: B023
        best = best if best in named else _best(named)
        if len(named) > 1:
            passed_over |= {match.node for match in named}
        frontier = [
            Match(child, depth + 1, match.reasons | reasons)
            for match in named
            # Digesting a long text is slow: do it only if there are children to compare.
            if match.node.children
            for child, reasons in _children_like(match.node, group, call_ids=call_ids)
        ]
        if not frontier:
            break
        frontier = _chosen(frontier, lambda match: group[0].echo_of == match.node.node_id)  # noqa: B023
        frontier = _chosen(frontier, lambda match: _repeats(group, match.node))  # noqa: B023
        best = _best(frontier)
    return best, bookmark


def _unbranched(match: Match, groups: Sequence[MessageGroup]) -> Match:
    """Follows a request while each node has a single, exactly matching child.

    Most requests continue one long conversation, for which comparing is faster than digesting.
    """
    node, depth, reasons = match
    while depth < len(groups):
        children = node.children[:2]
        if len(children) != 1 or children[0].messages != groups[depth]:
            break
        node, depth = children[0], depth + 1
    return Match(node, depth, reasons)


def _children_like(
    parent: Node, group: MessageGroup, *, call_ids: bool
) -> Iterator[tuple[Node, frozenset[Fidelity]]]:
    """Yields the children that a request's group matches, with the reasons for leniency."""
    key = exact_key(group, call_ids=call_ids)
    exact = tuple(parent.by_key.get(key, ()))
    for node in exact:
        if not contradicts_reasoning(node.messages[0], group[0]):
            yield node, _EXACT
    if group[0].role != "assistant" or len(exact) == len(parent.children):
        return
    near = tuple(parent.by_lenient_key.get(lenient_key(group, call_ids=call_ids), ()))
    # Read again: a node that was attached meanwhile is in this dictionary first.
    exact = tuple(parent.by_key.get(key, ()))
    for node in near:
        if node not in exact and not contradicts_reasoning(node.messages[0], group[0]):
            yield node, _LENIENT
    if exact or near or not group[0].tool_calls:
        return
    for node in tuple(parent.children):
        sampled = node.messages[0]
        if node.sample is None or contradicts_reasoning(sampled, group[0]):
            continue
        if is_mended_echo(sampled, group[0]):
            yield node, _LENIENT


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
