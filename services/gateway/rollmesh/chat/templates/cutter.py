"""Splits a template's renders into the text that each message adds. See `continuation`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from rollmesh.chat.messages import Message, MessageGroup, RenderContext, RoleName, images_of
from rollmesh.chat.rendering import AdaptedTemplate, ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.windows import (
    ASKED,
    CALL,
    FOLLOWED,
    FOLLOWERS,
    MARKER,
    WINDOWS,
    Place,
    RefusedOrder,
    TemplateRefusedError,
    answers_no_call,
    common_prefix,
    find_ends,
    followers,
    place,
    readable,
    result,
)
from rollmesh.chat.tokenizer import ModelTokenizer

# Where the text of a message begins and ends in a template's renders. See `continuation`.

_CACHED = 64


class Boundaries:
    """Cuts the renders of one template, with one set of options, at the ends of messages."""

    def __init__(
        self, template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext
    ) -> None:
        """Finds out how the messages at each place end.

        Raises:
            TemplateRefusedError: An answer does not end with a special token.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._options = options
        self._render = lru_cache(_CACHED)(template.render)
        self.ends = find_ends(template, tokenizer, options)
        self.says_after_results = False
        """Whether text beside calls is printed after their results."""
        self._beside_calls = self._find_beside_calls()
        self._leads: dict[Place, str] = {}
        self._closings: dict[Place, str] = {}
        self._ends: dict[Place, str] = {}
        for one in WINDOWS:
            self._learn(one)

    @property
    def last_end(self) -> str:
        """The text between the last answer and the user turn after it."""
        return self.ends.text or self.ends.headers["user"]

    def window(self, before: Place, previous: MessageGroup) -> tuple[Message, ...]:
        """Returns the messages to render in front of a group.

        An answer's calls are part of the window.
        """
        if before != "assistant":
            return WINDOWS[before]
        calls = readable(previous[0].tool_calls)
        return ASKED, Message("assistant", self._beside_calls if calls else MARKER, calls)

    def after(
        self,
        before: Place,
        window: tuple[Message, ...],
        text: str,
        options: RenderContext,
    ) -> str:
        """Returns the text of a render after the last message of its window.

        Raises:
            TemplateRenderError: The continuation changes how the window is printed.
        """
        if before != "assistant":
            lead = self._leads.get(before)
            _, found, after = text.partition(MARKER)
            if lead is None or not found or not after.startswith(lead):
                raise TemplateRenderError(
                    f"later messages change how a {before} message is printed"
                )
            return after[len(lead) :]
        # After an answer: the text behind the token that ends it.
        alone = self._render(window, options)
        end = self.ends.call if window[-1].tool_calls else self.ends.text
        # If content is not printed beside calls, the last end token is that of the answer.
        at = alone.rfind(end, max(alone.find(MARKER), 0))
        if at >= 0 and text.startswith(alone[: at + len(end)]):
            return text[at + len(end) :]
        if self.ends.headers:
            raise TemplateRenderError("later messages change how an answer is printed")
        _, found, after = text.partition(MARKER)
        _, ended, after = after.partition(end)
        if not found or not ended:
            raise TemplateRenderError(
                "the template prints no end of an answer before the next message"
            )
        return after

    def without_closing(self, place: Place, group: MessageGroup, text: str) -> str:
        """Returns a render up to the boundary after its last group, or after its last answer.

        An answer is followed by `followers` in the render.

        Raises:
            TemplateRenderError: The end of the group is not found.
        """
        closing = self._closings.get(place)
        if closing is None:
            raise TemplateRenderError(f"the template does not print {place} messages")
        if place == "assistant":
            end = self.ends.call if group[0].tool_calls else self.ends.text
            follower = text.rfind(FOLLOWED)
            at = max(text.rfind(one, 0, follower) for one in self.ends.headers.values() or (end,))
            if at < 0:
                raise TemplateRenderError("the template does not end an answer in the history")
            return text[: at + len(end)]
        if not text.endswith(self._ends[place]):
            raise TemplateRenderError(f"a {place} message does not end as others of its kind")
        return text[: len(text) - len(closing)]

    def _find_beside_calls(self) -> str:
        """Returns a text that the template prints before calls. Some templates print none there."""
        said = Message("assistant", MARKER, (CALL,))
        text = self._template.printed((ASKED, said, result(FOLLOWED)), self._options)
        self.says_after_results = 0 <= text.find(FOLLOWED) < text.find(MARKER)
        return MARKER if text and not self.says_after_results else ""

    def _learn(self, place: Place) -> None:
        """Finds the lead and the closing of a place, unless the template refuses it."""
        try:
            alone = self._template.render(WINDOWS[place], self._options)
        except TemplateRenderError as error:
            if place == "user":
                raise TemplateRefusedError(f"user: {error}") from error
            return
        _, found, tail = alone.partition(MARKER)
        if not found:
            if place == "user":
                raise TemplateRefusedError("the template does not print a user message unchanged")
            return
        if place == "assistant":
            at = tail.find(self.ends.text)
            self._leads[place] = self.ends.text
            self._closings[place] = tail[at + len(self.ends.text) :] if at >= 0 else tail
            return
        shared = tail
        for follower in (FOLLOWERS[place], Message("user", "c")):
            longer = self._template.printed((*WINDOWS[place], follower), self._options)
            if not longer:
                continue
            common = common_prefix(shared, longer.partition(MARKER)[2])
            # A role that is printed into the message itself cannot follow. It is refused later.
            shared = (
                common if self._first_special(common) or not self._first_special(tail) else shared
            )
        special = self._first_special(shared)
        lead = shared.partition(special)[0] + special if special else ""
        self._leads[place], self._closings[place] = lead, tail[len(lead) :]
        self._ends[place] = special + self._closings[place]

    def _first_special(self, text: str) -> str:
        """Returns the unmergeable token that ends first in a text. Empty if there is none."""
        ends = [
            (at + len(name), name)
            for name in self._tokenizer.added_texts
            if (at := text.find(name)) >= 0
        ]
        return min(ends, default=(0, ""))[1]


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
        self.boundaries = Boundaries(template, tokenizer, options)
        self._plain = template, self.boundaries
        self._behind_system = self._plain
        if behind_system:
            begun = AdaptedTemplate(template, _begun)
            self._behind_system = begun, Boundaries(begun, tokenizer, options)
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
        if any(map(answers_no_call, groups, (None, *groups))):
            # Templates that check the order of roles take no notice of it in a short window.
            self._template.render([one for group in groups for one in group], context)
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
            if at == 0:
                texts.append("" if joined else self._first(groups[:1], context))
            elif at == 1 and joined:
                texts.append(self._first(groups[:2], context))
            else:
                texts.append(self._delta(groups, at, context))
        return texts

    def refusal(self, groups: Sequence[MessageGroup], at: int, context: RenderContext) -> str:
        """Returns why a group cannot be continued where it stands. Empty if it can."""
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
            self._first((first,), context)
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
        template, boundaries = self._behind_system if behind_system else self._plain
        window, options = WINDOWS[last], replace(self._options, now=now)
        text = template.render(window, options, generation_prompt=True)
        return boundaries.after(last, window, text, options)

    def find_joined_system(self, context: RenderContext) -> bool:
        """Returns whether a first system message is printed only with the user turn after it."""
        groups: list[MessageGroup] = [(Message("system", "s"),), (Message("user", "u"),)]
        both = self._template.printed((*groups[0], *groups[1]), context)
        if not both:
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
        _, boundaries = self._behind_system if groups[0][0].role == "system" else self._plain
        return boundaries.without_closing(place(groups, len(groups)), groups[-1], text)

    def _delta(self, groups: Sequence[MessageGroup], at: int, context: RenderContext) -> str:
        """Returns the text that a group adds after others."""
        options = context if self.repeats_tools else replace(self._options, now=context.now)
        before, group = place(groups, at), groups[at]
        begins_with_system = groups[0][0].role == "system"
        template, boundaries = self._behind_system if begins_with_system else self._plain
        window = boundaries.window(before, groups[at - 1])
        if self.moves_system and at > 1 and group[0].role == "user" and begins_with_system:
            window = (*groups[0], *window)
        text = template.render((*window, *group, *followers(group)), options)
        after = boundaries.after(before, window, text, options)
        return boundaries.without_closing(place(groups, at + 1), group, after)


def _begun(
    messages: Sequence[Message], context: RenderContext
) -> tuple[Sequence[Message], RenderContext]:
    """Returns the input of a template whose conversations all begin with a system message."""
    return (messages if messages[0].role == "system" else (_SYSTEM, *messages)), context
