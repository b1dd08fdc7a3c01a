"""What an engine is given for a turn: what the tree holds, and what a request adds to it."""

from dataclasses import dataclass

import numpy as np

from rollmesh.chat.messages import MessageGroup, RenderContext
from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.path import Seen
from rollmesh.chat.templates.special_text import SpecialText
from rollmesh.gateway.conversation.tree import Match, Node, Tree
from rollmesh.runtime.codec.arrays import TokenIds
from rollmesh.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as tokens, the model's turn opened."""

    match: Match
    """Where it leaves the tree, and what is to be said of that."""
    new_groups: list[tuple[MessageGroup, TokenIds]]
    """Units the tree does not hold, each with the ids it adds."""
    generation_prompt: TokenIds
    """What stands between the last group and the sampled ids."""
    seen: Seen | None
    """What the last group is to remember of the template's render."""

    def ids(self) -> TokenIds:
        """Returns all of it; uint32 [N]."""
        added = (ids for _, ids in self.new_groups)
        return np.concatenate([*self.match.node.context(), *added, self.generation_prompt])


def new_tree(continuation: Continuation) -> Tree:
    """Returns an empty tree, with what counts where the template prints conversations."""
    return Tree(continuation.closing_ids, call_ids=continuation.prints_call_ids)


def build_prompt(
    continuation: Continuation,
    special_text: SpecialText,
    match: Match,
    groups: list[MessageGroup],
    render_context: RenderContext,
    *,
    rewrite: bool,
) -> Prompt:
    """Returns the prompt of a turn; costs what it adds, where the template is append-only.

    Where the template would print otherwise by now what the tree holds, the prompt says so. It
    keeps what the tree holds all the same, or leaves it there for what the template prints.

    Args:
        continuation: Continues conversations by the model's template.
        special_text: Says how the template is to see what comes from outside.
        match: Where the request meets the tree.
        groups: The whole request.
        render_context: What is rendered beside it.
        rewrite: Leave the tree for what the template prints.

    Raises:
        TemplateRenderError: The template refuses a group.
        TemplateRefusedError: It cannot be continued exactly under the render_context's options.
        InvalidMessagesError: It spells a special token, and such text is refused.
    """
    path, new = match.node.path(), groups[match.depth :]
    shown, shown_context, spelled = special_text.apply(groups, match.depth, render_context)
    if spelled:
        match = match._replace(reasons=match.reasons | {types_pb2.FIDELITY_REASON_SPECIAL_TEXT})
    fresh = continuation.token_ids(shown, match.depth, shown_context)
    generation_prompt = continuation.generation_prompt(groups, render_context)
    if fresh:
        fresh[0] = continuation.after(match.node, fresh[0])
    else:
        generation_prompt = continuation.after(match.node, generation_prompt)
    show = special_text.show
    at, seen = continuation.compare(path, new, shown_context, [*fresh, generation_prompt], show)
    if at is not None:
        match = match._replace(reasons=match.reasons | {types_pb2.FIDELITY_REASON_TEMPLATE_REWRITE})
        printed = continuation.reprint(path[:at], groups, shown_context, show) if rewrite else None
        if printed is not None:
            fresh, generation_prompt = printed
            match = Match(_parent(match.node, path, at), at, match.reasons)
    # What closes an answer that was cut belongs to the group behind it: there must be one.
    new_groups = list(zip(groups[match.depth :], fresh, strict=True))
    return Prompt(match, new_groups, generation_prompt, seen if fresh else None)


def _parent(node: Node, path: list[Node], at: int) -> Node:
    parent = path[at].parent if at < len(path) else node
    assert parent is not None
    return parent
