"""Splits a template's renders into the text that each message adds; see `continuation`."""

from collections.abc import Sequence

from rollmesh.chat.messages import Message, MessageGroup, RenderContext, RoleName, images_of
from rollmesh.chat.templates.boundaries import Boundaries
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.windows import WINDOWS, Place, followers, place
from rollmesh.chat.tokenizer import ModelTokenizer


class Cutter:
    """Splits the renders of one template, with one set of options, into each message's text.

    What probing finds about the template is set by `probe`.
    """

    def __init__(
        self, template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext
    ) -> None:
        """Finds the boundaries of messages.

        Raises:
            TemplateRefusedError: An answer does not end with a special token.
        """
        self._template = template
        self._options = options
        self.boundaries = Boundaries(template, tokenizer, options)
        self.repeats_tools = False
        """Whether the tools are printed again after the conversation."""
        self.moves_system = False
        """Whether the first system message is printed in the last user turn."""
        self.joins_system = {False: False, True: False}
        """Whether the first system message is printed with the user turn after it: without
        tools, with tools."""
        self.ignores_tools = False
        self.image_roles: frozenset[RoleName] = frozenset()
        """Roles whose messages may hold images."""
        self.refused: dict[tuple[Place, RoleName], str] = {}
        """Roles that cannot be continued after others, and why."""
        self.refused_with_tools: dict[tuple[Place, RoleName], str] = {}
        """Roles that cannot be continued after others if there are tools, and why."""
        self.refused_prompts: dict[Place, str] = {}
        """Places after which no answer can be sampled, and why."""
        self._generation_prompts: dict[Place, str] = {}

    def texts(
        self, groups: Sequence[MessageGroup], start: int, context: RenderContext
    ) -> list[str]:
        """Returns the text that each of `groups[start:]` adds.

        Raises:
            TemplateRenderError: The template refuses a group, or cannot be continued there.
        """
        if context.tools_json and self.ignores_tools:
            raise TemplateRenderError(
                "tools: the model's chat template does not print tools; leave them out"
            )
        texts: list[str] = []
        for at in range(start, len(groups)):
            before = place(groups, at)
            order = before, groups[at][0].role
            why = self.refused.get(order)
            if why is None and context.tools_json:
                why = self.refused_with_tools.get(order)
            if why is not None:
                raise TemplateRenderError(f"{groups[at][0].role} after {before}: {why}")
            message = groups[at][0]
            if message.role not in self.image_roles and images_of(groups[at : at + 1]):
                raise TemplateRenderError(
                    f"the model takes no images in {message.role} messages; leave them out"
                )
            if self.boundaries.says_after_results and message.tool_calls and message.content:
                raise TemplateRenderError(
                    "content: the model's chat template prints the text of a message with tool "
                    "calls after their results; leave the text out"
                )
            joined = at < 2 and self.is_joined(groups[0], context)
            if at == 0:
                texts.append("" if joined else self._first(groups[:1], context))
            elif at == 1 and joined:
                texts.append(self._first(groups[:2], context))
            else:
                texts.append(self._delta(groups, at, context))
        return texts

    def is_joined(self, first: MessageGroup, context: RenderContext) -> bool:
        """Returns whether a first message is a system message that is printed with the user turn.

        Some templates print it separately unless it is empty.
        """
        if first[0].role != "system":
            return False
        if self.joins_system[bool(context.tools_json)]:
            return True
        try:
            self._first((first,), context)
        except TemplateRenderError:
            return True
        return False

    def generation_prompt(self, last: Place) -> str:
        """Returns the text between a group and the sampled answer.

        Raises:
            TemplateRenderError: The template has no answer after such a group.
        """
        if last in self.refused_prompts:
            raise TemplateRenderError(f"an answer after {last}: {self.refused_prompts[last]}")
        if last not in self._generation_prompts:
            window = WINDOWS[last]
            text = self._template.render(window, self._options, generation_prompt=True)
            self._generation_prompts[last] = self.boundaries.after(last, window, text)
        return self._generation_prompts[last]

    def find_joined_system(self, context: RenderContext) -> bool:
        """Returns whether a first system message is printed only with the user turn after it."""
        groups: list[MessageGroup] = [(Message("system", "s"),), (Message("user", "u"),)]
        try:
            both = self._template.render((*groups[0], *groups[1]), context)
        except TemplateRenderError:
            return False
        try:
            apart = self._first(groups[:1], context) + self._delta(groups, 1, context)
        except TemplateRenderError:
            return True
        return not both.startswith(apart)

    def _first(self, groups: Sequence[MessageGroup], context: RenderContext) -> str:
        """Returns the text of groups that begin a conversation."""
        messages = tuple(message for group in groups for message in group)
        text = self._template.render((*messages, *followers(groups[-1])), context)
        return self.boundaries.without_closing(place(groups, len(groups)), groups[-1], text)

    def _delta(self, groups: Sequence[MessageGroup], at: int, context: RenderContext) -> str:
        """Returns the text that a group adds after others."""
        options = context if self.repeats_tools else self._options
        before, group = place(groups, at), groups[at]
        window = self.boundaries.window(before, groups[at - 1])
        first, role = groups[0], group[0].role
        if self.moves_system and at > 1 and role == "user" and first[0].role == "system":
            window = (*first, *window)
        text = self._template.render((*window, *group, *followers(group)), options)
        after = self.boundaries.after(before, window, text, options)
        return self.boundaries.without_closing(place(groups, at + 1), group, after)
