"""Splits a template's renders into the text that each message adds. See `continuation`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rollmesh.chat.messages import Message, MessageGroup, RenderContext, RoleName, images_of
from rollmesh.chat.rendering import AdaptedTemplate, ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.windows import (
    ASKED,
    FOLLOWED,
    MARKER,
    WINDOWS,
    Boundaries,
    Place,
    RefusedOrder,
    place,
    readable,
    result,
)
from rollmesh.chat.tokenizer import ModelTokenizer

_OPENINGS = 64
_SYSTEM = Message("system", "s")


class Cutter:
    """Splits the renders of one template, with one set of options, into each message's text.

    What probing finds about the template is set by `probe`.
    """

    def __init__(
        self,
        template: ModelTemplate,
        tokenizer: ModelTokenizer,
        options: RenderContext,
        *,
        behind_system: bool = False,
    ) -> None:
        """Finds the boundaries of messages.

        With `behind_system`, a conversation that begins with a system message is cut over windows
        that begin with one: some templates then print later messages differently.

        Raises:
            TemplateRefusedError: An answer does not end with a special token.
        """
        self._template = template
        self._options = options
        self.boundaries = self._behind_system = Boundaries(template, tokenizer, options)
        if behind_system:
            begun = AdaptedTemplate(
                template,
                lambda messages, context: (
                    messages if messages[0].role == "system" else (_SYSTEM, *messages),
                    context,
                ),
            )
            self._behind_system = Boundaries(begun, tokenizer, options)
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
        self.refused: dict[RefusedOrder, str] = {}
        """Orders of messages that cannot be continued, and why."""
        self._generation_prompts = lru_cache(_OPENINGS)(self._generation_prompt)

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
        called = False
        for group in groups:
            if group[0].role == "tool" and not called:  # results behind no call
                # Templates that check the order of roles take no notice of it in a short window.
                self._template.render([one for held in groups for one in held], context)
                break
            called = bool(group[0].tool_calls)
        texts: list[str] = []
        for at in range(start, len(groups)):
            if why := self.refusal(groups, at, context):
                raise TemplateRenderError(f"{groups[at][0].role} after {place(groups, at)}: {why}")
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
            if joined and at == 0:
                texts.append("")
            else:
                texts.append(self._text(groups, 0 if joined else at, at, context))
        return texts

    def refusal(self, groups: Sequence[MessageGroup], at: int, context: RenderContext) -> str:
        """Returns why a group cannot be continued where it stands. Empty if it can."""
        if not self.refused:
            return ""
        order = RefusedOrder(place(groups, at), groups[at][0].role)
        orders = [order]
        if context.tools_json:
            orders.append(order._replace(with_tools=True))
        if groups[0][0].role == "system":
            orders.append(order._replace(behind_system=True))
        return next((self.refused[one] for one in orders if one in self.refused), "")

    def is_joined(self, first: MessageGroup, context: RenderContext) -> bool:
        """Returns whether a first message is a system message that is printed with the user turn.

        Some templates print it separately unless it is empty.
        """
        if first[0].role != "system":
            return False
        if self.joins_system[bool(context.tools_json)]:
            return True
        try:
            self._text((first,), 0, 0, context)
        except TemplateRenderError:
            return True
        return False

    def generation_prompt(self, groups: Sequence[MessageGroup], context: RenderContext) -> str:
        """Returns the text between the last of `groups` and the answer. Tools do not change it.

        Raises:
            TemplateRenderError: The template has no answer after such a group.
        """
        last = place(groups, len(groups))
        if why := self.refused.get(RefusedOrder(last, None)):
            raise TemplateRenderError(f"an answer after {last}: {why}")
        return self._generation_prompts(last, groups[0][0].role == "system", context.now)

    def _generation_prompt(self, last: Place, behind_system: bool, now: int) -> str:
        boundaries = self._behind_system if behind_system else self.boundaries
        window, options = WINDOWS[last], replace(self._options, now=now)
        text = boundaries.template.render(window, options, generation_prompt=True)
        return boundaries.after(last, window, text, options)

    def find_joined_system(self, context: RenderContext) -> bool:
        """Returns whether a first system message is printed only with the user turn after it."""
        groups: list[MessageGroup] = [(Message("system", "s"),), (Message("user", "u"),)]
        both = self._template.printed((*groups[0], *groups[1]), context)
        if not both:
            return False
        try:
            apart = self._text(groups, 0, 0, context) + self._text(groups, 1, 1, context)
        except TemplateRenderError:
            return True
        return not both.startswith(apart)

    def _text(
        self, groups: Sequence[MessageGroup], begin: int, at: int, context: RenderContext
    ) -> str:
        """Returns the text that `groups[begin : at + 1]` add after those before them."""
        before, group, first = place(groups, begin), groups[at], groups[0]
        begins_with_system = first[0].role == "system"
        boundaries = self._behind_system if begins_with_system else self.boundaries
        window: tuple[Message, ...] = ()
        options = context
        if begin > 0:
            if not self.repeats_tools:
                options = replace(self._options, now=context.now)
            if before == "assistant":
                calls = groups[begin - 1][0].tool_calls
                said = boundaries.beside_calls if calls else MARKER
                window = ASKED, Message("assistant", said, readable(calls) if calls else ())
            else:
                window = WINDOWS[before]
            if self.moves_system and begin > 1 and group[0].role == "user" and begins_with_system:
                window = (*first, *window)
        # Templates print the last answer differently, so something follows it.
        followers: tuple[Message, ...] = ()
        if group[0].role == "assistant":
            results = enumerate(group[0].tool_calls)
            followers = tuple(result("c" if nth else FOLLOWED, call) for nth, call in results)
            followers = followers or (Message("user", FOLLOWED),)
        added = group if begin == at else (*groups[begin], *group)
        text = boundaries.template.render((*window, *added, *followers), options)
        if begin > 0:
            text = boundaries.after(before, window, text, options)
        return boundaries.without_closing(place(groups, at + 1), group, text)
