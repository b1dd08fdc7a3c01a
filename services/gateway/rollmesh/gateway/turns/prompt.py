"""Builds the prompt of a turn: the ids that the tree holds, and those that a request adds."""

from dataclasses import dataclass

import numpy as np

from rollmesh.chat.images.placing import Placeholder
from rollmesh.chat.messages import MessageGroup, RenderContext
from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.path import Seen
from rollmesh.chat.templates.special_text import SpecialText
from rollmesh.gateway.conversation.matching import Match
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.runtime.codec.arrays import TokenIds
from rollmesh.v1 import trajectory_pb2


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as tokens, ending with the opened turn of the model."""

    match: Match
    """The node from which it continues the tree, with its fidelity reasons."""
    new_groups: list[tuple[MessageGroup, TokenIds]]
    """Message groups that the tree does not hold, each with the ids it adds."""
    new_images: list[tuple[Placeholder, ...]]
    """Where the images of each of these groups are in its ids."""
    generation_prompt: TokenIds
    """Ids between the last group and the sampled ids."""
    seen: Seen | None
    """State of the template's render to store with the last group."""

    def placeholders(self) -> list[Placeholder]:
        """Returns where the images are in the complete prompt, in order."""
        found, start = self.match.node.placeholders(), self.match.node.end
        for (_, ids), images in zip(self.new_groups, self.new_images, strict=True):
            found += (one._replace(offset=one.offset + start) for one in images)
            start += len(ids)
        return found

    def ids(self) -> TokenIds:
        """Returns the complete prompt, uint32 [N]."""
        added = (ids for _, ids in self.new_groups)
        return np.concatenate([*self.match.node.context(), *added, self.generation_prompt])


def new_tree(continuation: Continuation) -> Tree:
    """Returns an empty tree, configured for how the template renders conversations."""
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
    """Returns the prompt of a turn; if the template is append-only, only the new text costs time.

    If the template would now render the tree's messages differently, the prompt carries
    TEMPLATE_REWRITE. It keeps the tree's ids anyway, or with `rewrite` leaves the tree at the first
    difference and uses the ids of the new render.

    Args:
        continuation: Continues conversations with the model's template.
        special_text: Decides how the template sees text from outside.
        match: The node from which the request continues the tree.
        groups: All message groups of the request.
        render_context: Tools and template options that are rendered with the groups.
        rewrite: Whether to leave the tree for the template's new render.

    Raises:
        TemplateRenderError: The template refuses a group.
        TemplateRefusedError: It cannot be continued exactly under the render_context's options.
        InvalidMessagesError: The text spells a special token, and such text is refused.
        PlacementError: The template does not show the images of a group, or text spells one.
        ImageRefusedError: The model cannot take an image of that size.
    """
    path, new = match.node.path(), groups[match.depth :]
    shown, shown_context, spelled = special_text.apply(groups, match.depth, render_context)
    if spelled:
        match = match._replace(
            reasons=match.reasons | {trajectory_pb2.FIDELITY_REASON_SPECIAL_TEXT}
        )
    fresh = continuation.token_ids(shown, match.depth, shown_context)
    generation_prompt = continuation.generation_prompt(groups, render_context)
    if fresh:
        fresh[0] = continuation.after(match.node, fresh[0])
    else:
        generation_prompt = continuation.after(match.node, generation_prompt)
    show = special_text.show
    at, seen = continuation.compare(path, new, shown_context, [*fresh, generation_prompt], show)
    if at is not None:
        match = match._replace(
            reasons=match.reasons | {trajectory_pb2.FIDELITY_REASON_TEMPLATE_REWRITE}
        )
        printed = continuation.reprint(path[:at], groups, shown_context, show) if rewrite else None
        if printed is not None:
            fresh, generation_prompt = printed
            match = Match(_parent(match.node, path, at), at, match.reasons)
    # The ids that close a cut answer belong to the next group, so there must be one.
    new_groups = list(zip(groups[match.depth :], fresh, strict=True))
    new_images = [continuation.places(group, ids) for group, ids in new_groups]
    return Prompt(match, new_groups, new_images, generation_prompt, seen if fresh else None)


def _parent(node: Node, path: list[Node], at: int) -> Node:
    parent = path[at].parent if at < len(path) else node
    assert parent is not None
    return parent
