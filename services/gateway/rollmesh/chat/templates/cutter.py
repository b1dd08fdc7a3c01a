"""Splits a template's renders into the text that each message adds; see `continuation`."""

from collections.abc import Sequence

from rollmesh.chat.canonical import spelling_key
from rollmesh.chat.messages import Message, MessageGroup, RenderContext, RoleName
from rollmesh.chat.templates.ends import TemplateRefusedError, find_ends
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.windows import (
    ASKED,
    CALL,
    FOLLOWED,
    FOLLOWERS,
    MARKER,
    WINDOWS,
    Place,
    followers,
    place,
    readable,
    result,
)
from rollmesh.chat.tokenizer import ModelTokenizer

_CACHED = 64


class Cutter:
    """Splits the renders of one template, with one set of options, into each message's text."""

    def __init__(
        self, template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext
    ) -> None:
        """Finds out how the messages of each role end.

        Raises:
            TemplateRefusedError: An answer does not end with a special token.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._options = options
        self.repeats_tools = False
        """Whether the tools are printed again after the conversation."""
        self.moves_system = False
        """Whether the first system message is printed in the last user turn."""
        self.joins_system = {False: False, True: False}
        """Whether the first system message is printed with the user turn after it: without
        tools, with tools."""
        self.ignores_tools = False
        self.refused: dict[tuple[Place, RoleName], str] = {}
        """Roles that cannot be continued after others, and why."""
        self.refused_with_tools: dict[tuple[Place, RoleName], str] = {}
        """Roles that cannot be continued after others if there are tools, and why."""
        self.refused_prompts: dict[Place, str] = {}
        """Places after which no answer can be sampled, and why."""
        self.says_after_results = False
        """Whether text beside calls is printed after their results."""
        self.ends = find_ends(template, tokenizer, options)
        self._leads: dict[Place, str] = {}
        self._closings: dict[Place, str] = {}
        self._generation_prompts: dict[Place, str] = {}
        self._ends: dict[Place, str] = {}
        self._beside_calls = self._find_beside_calls()
        self._renders: dict[bytes, str] = {}
        for where in WINDOWS:
            self._learn(where)

    def texts(
        self, groups: Sequence[MessageGroup], start: int, context: RenderContext
    ) -> list[str]:
        """Returns the text that each of `groups[start:]` adds.

        Raises:
            TemplateRenderError: The template refuses a group, or cannot be continued there.
        """
        if context.tools_json and self.ignores_tools:
            raise TemplateRenderError("tools: the model's chat template does not print tools")
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
            if self.says_after_results and message.tool_calls and message.content:
                raise TemplateRenderError(
                    "content: the model's chat template prints text beside calls after their "
                    "results; leave it out"
                )
            joined = at < 2 and self.is_joined(groups[0], context)
            if at == 0:
                texts.append("" if joined else self._head(groups[:1], context))
            elif at == 1 and joined:
                texts.append(self._head(groups[:2], context))
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
            self._head((first,), context)
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
            text = self._template.render(WINDOWS[last], self._options, generation_prompt=True)
            if last == "assistant":
                self._generation_prompts[last] = self._after_answer(WINDOWS[last], text)
            else:
                self._generation_prompts[last] = self._after_marker(last, text)
        return self._generation_prompts[last]

    def find_joined_system(self, context: RenderContext) -> bool:
        """Returns whether a first system message is printed only with the user turn after it."""
        groups: list[MessageGroup] = [(Message("system", "s"),), (Message("user", "u"),)]
        try:
            both = self._template.render((*groups[0], *groups[1]), context)
        except TemplateRenderError:
            return False
        try:
            apart = self._head(groups[:1], context) + self._delta(groups, 1, context)
        except TemplateRenderError:
            return True
        return not both.startswith(apart)

    @property
    def last_end(self) -> str:
        """The text between the last answer and the user turn after it."""
        return self.ends.text or self.ends.headers["user"]

    def _find_beside_calls(self) -> str:
        """Returns a text that the template prints before calls; some templates print none there."""
        said = Message("assistant", MARKER, (CALL,))
        try:
            text = self._template.render((ASKED, said, result(FOLLOWED)), self._options)
        except TemplateRenderError:
            return ""
        self.says_after_results = 0 <= text.find(FOLLOWED) < text.find(MARKER)
        return "" if self.says_after_results else MARKER

    def _end_of(self, answer: Message) -> str:
        return self.ends.call if answer.tool_calls else self.ends.text

    def _learn(self, where: Place) -> None:
        """Finds the lead and the closing of a position, unless the template refuses it."""
        try:
            alone = self._template.render(WINDOWS[where], self._options)
        except TemplateRenderError as error:
            if where == "user":
                raise TemplateRefusedError(f"user: {error}") from error
            return
        _, found, tail = alone.partition(MARKER)
        if not found:
            if where == "user":
                raise TemplateRefusedError("the template does not print a user message as it is")
            return
        if where == "assistant":
            at = tail.find(self.ends.text)
            self._leads[where] = self.ends.text
            self._closings[where] = tail[at + len(self.ends.text) :] if at >= 0 else tail
            return
        shared = tail
        for follower in (FOLLOWERS[where], Message("user", "c")):
            try:
                longer = self._template.render((*WINDOWS[where], follower), self._options)
            except TemplateRenderError:
                continue
            common = _common_prefix(shared, longer.partition(MARKER)[2])
            # A role that is printed into the message itself cannot follow; it is refused later.
            shared = (
                common if self._first_special(common) or not self._first_special(tail) else shared
            )
        special = self._first_special(shared)
        lead = shared.partition(special)[0] + special if special else ""
        self._leads[where], self._closings[where] = lead, tail[len(lead) :]
        self._ends[where] = special + self._closings[where]

    def _head(self, groups: Sequence[MessageGroup], context: RenderContext) -> str:
        messages = tuple(message for group in groups for message in group)
        text = self._template.render((*messages, *followers(groups[-1])), context)
        return self._without_closing(place(groups, len(groups)), groups[-1], text)

    def _delta(self, groups: Sequence[MessageGroup], at: int, context: RenderContext) -> str:
        options = context if self.repeats_tools else self._options
        before, previous, group = place(groups, at), groups[at - 1], groups[at]
        window = WINDOWS[before] if before != "start" else ()
        if before == "assistant":
            calls = readable(previous[0].tool_calls)
            window = (ASKED, Message("assistant", self._beside_calls if calls else MARKER, calls))
        if (
            self.moves_system
            and at > 1
            and group[0].role == "user"
            and groups[0][0].role == "system"
        ):
            window = (*groups[0], *window)
        text = self._template.render((*window, *group, *followers(group)), options)
        if before == "assistant":
            after = self._after_answer(window, text, options)
        else:
            after = self._after_marker(before, text)
        return self._without_closing(place(groups, at + 1), group, after)

    def _after_marker(self, before: Place, text: str) -> str:
        lead = self._leads.get(before)
        _, found, after = text.partition(MARKER)
        if lead is None or not found or not after.startswith(lead):
            raise TemplateRenderError(f"what follows a {before} message changes how it is printed")
        return after[len(lead) :]

    def _after_answer(
        self, window: tuple[Message, ...], text: str, options: RenderContext | None = None
    ) -> str:
        """Returns the text after the token that ends the window's answer."""
        alone, end = self._render_cached(window, options or self._options), self._end_of(window[-1])
        # If content is not printed beside calls, the last end token is that of the answer.
        at = alone.rfind(end, max(alone.find(MARKER), 0))
        if at >= 0 and text.startswith(alone[: at + len(end)]):
            return text[at + len(end) :]
        if self.ends.headers:
            raise TemplateRenderError("what follows an answer changes how it is printed")
        _, found, after = text.partition(MARKER)
        _, ended, after = after.partition(end)
        if not found or not ended:
            raise TemplateRenderError(
                "the end of an answer is not found before the text that follows it"
            )
        return after

    def _render_cached(self, window: tuple[Message, ...], options: RenderContext) -> str:
        key = options.key + spelling_key(window)
        text = self._renders.get(key)
        if text is None:
            text = self._template.render(window, options)
            if len(self._renders) >= _CACHED:
                self._renders.clear()  # a single step: several threads tokenize
            self._renders[key] = text
        return text

    def _without_closing(self, where: Place, group: MessageGroup, text: str) -> str:
        closing = self._closings.get(where)
        if closing is None:
            raise TemplateRenderError(f"the template does not print {where} messages")
        if where == "assistant":
            end, follower = self._end_of(group[0]), text.rfind(FOLLOWED)
            at = max(text.rfind(one, 0, follower) for one in self.ends.headers.values() or (end,))
            if at < 0:
                raise TemplateRenderError("an answer in the history does not end")
            return text[: at + len(end)]
        if not text.endswith(self._ends[where]):
            raise TemplateRenderError(f"a {where} message does not end as others of its kind")
        return text[: len(text) - len(closing)]

    def _first_special(self, text: str) -> str:
        """Returns the unmergeable token that ends first in a text; empty if there is none."""
        ends = [
            (at + len(name), name)
            for name in self._tokenizer.added_texts
            if (at := text.find(name)) >= 0
        ]
        return min(ends, default=(0, ""))[1]


def _common_prefix(one: str, other: str) -> str:
    size = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        size += 1
    return one[:size]
