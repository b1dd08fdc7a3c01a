"""Splits a template's renders into the text that each message adds. See `continuation`.

Short conversations are rendered to find where to cut, and a marker stands for one message in them.
They show where the text of a message begins and ends, how a template ends answers, and where its
model must stop.

Most templates print one special token after every answer, and their models stop at it. Some differ:

* Harmony writes an answer as several messages. `<|end|>` ends each of them, and the last one too
  once it is history. A model ends the answer itself with `<|return|>`, or with `<|call|>`.
* Gemma 4 ends a call with the token that begins its result, as the model samples it.
* GLM's answers have no end token: the header of the next turn ends them.
* Kimi K3 closes the parts of an answer, and the answer itself by a token of another kind.
* Solar Open ends the last part of an answer as the others in the history, and in no sample.
* Some templates print a line break before the end token, which a model may or may not sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from rollmesh.chat.json_values import is_deeper, read_json
from rollmesh.chat.messages import (
    Message,
    MessageGroup,
    RenderContext,
    RoleName,
    ToolCall,
)
from rollmesh.chat.rendering import (
    AdaptedTemplate,
    ModelTemplate,
    TemplateRenderError,
    common_prefix,
)
from rollmesh.chat.tokenizer import ModelTokenizer

# Short conversations that are rendered to find where to cut.

Place: TypeAlias = Literal["start", "first system", "system", "user", "assistant", "tool"]
"""The kind of group before it: templates treat the first system message differently."""
MARKER, FOLLOWED = "mark7zq", "next7zq"
_CACHED = 64
_MOST_RENDERED_DEPTH = 24  # templates that print values by macros need some frames for each level
# Nine letters and digits: the strictest template wants ids of that form.
CALL = ToolCall("call7probe"[:9], "look_up", '{"key": "value", "limit": 2}')
ASKED = Message("user", "a")
CALLED = Message("assistant", "", (CALL,))
ANY_TOOLS = (
    b'[{"type": "function", "function": {"name": "any7zq", "description": "Any.",'
    b' "parameters": {"type": "object", "properties": {}}}}]'
)
"""Of templates that render no conversation without tools."""
WINDOWS: dict[Place, tuple[Message, ...]] = {
    "first system": (Message("system", MARKER),),
    "system": (ASKED, Message("assistant", "b"), Message("system", MARKER)),
    "user": (Message("user", MARKER),),
    "assistant": (ASKED, Message("assistant", MARKER)),
    "tool": (ASKED, CALLED, Message("tool", MARKER, tool_call_id=CALL.id, name=CALL.name)),
}
FOLLOWERS: dict[Place, Message] = {
    "first system": Message("user", "c"),
    "system": Message("user", "c"),
    "user": Message("assistant", "c"),
    "assistant": Message("user", "c"),
    "tool": Message("assistant", "c"),
}


class RefusedOrder(NamedTuple):
    """An order of messages that a template cannot continue."""

    place: Place
    """What stands before."""
    role: RoleName | None
    """The message that cannot follow. None if no answer can be sampled there."""
    with_tools: bool = False
    """Whether the order is refused only if there are tools."""
    behind_system: bool = False
    """Whether the order is refused only if a system message begins the conversation."""

    def __str__(self) -> str:
        """Returns the order, such as "assistant, system with tools"."""
        tools = " with tools" if self.with_tools else ""
        system = " behind a system message" if self.behind_system else ""
        return f"{self.place}, {self.role or 'answer'}{tools}{system}"


def place(groups: Sequence[MessageGroup], at: int) -> Place:
    """Returns the kind of group before an index."""
    if at == 0:
        return "start"
    role = groups[at - 1][0].role
    return "first system" if at == 1 and role == "system" else role


def result(content: str, call: ToolCall = CALL) -> Message:
    """Returns a result of a call."""
    return Message("tool", content, tool_call_id=call.id, name=call.name)


def readable(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """Returns calls that any template prints. The text after them does not depend on arguments.

    Sampled arguments may be no object that a template can read, or may be nested so deeply that it
    fails on them. The tokens of the session stay as sampled.
    """
    shown: list[ToolCall] = []
    for call in calls:
        text = call.arguments
        try:
            value = read_json(text) if text.strip() else {}
        except ValueError:
            value = None
        is_plain = isinstance(value, dict) and not is_deeper(text, _MOST_RENDERED_DEPTH)
        shown.append(call if is_plain else replace(call, arguments="{}"))
    return tuple(shown)


class TemplateRefusedError(Exception):
    """The template cannot be continued exactly. The message says why."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The special tokens that end answers, as the template prints them."""

    text: str
    """Ends an answer in the history. Empty if answers have no end token."""
    call: str
    """Ends an answer with calls. Usually the same as `text`."""
    stops: tuple[str, ...]
    """Tokens at which the model must stop."""
    headers: dict[RoleName, str] = field(default_factory=dict)
    """By role: the token that begins the turn after an answer, if nothing else ends the answer."""


class Boundaries:
    """Where the messages of one template, with one set of options, begin and end in its renders."""

    def __init__(
        self, template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext
    ) -> None:
        """Finds out how the messages at each place end.

        Raises:
            TemplateRefusedError: An answer does not end with a special token, or the model stops at
                one that occurs inside answers.
        """
        self.template = template
        self._tokenizer = tokenizer
        self._options = options
        self._render = lru_cache(_CACHED)(template.render)
        self.ends = self._find_ends()
        said = Message("assistant", MARKER, (CALL,))
        text = self._printed(ASKED, said, result(FOLLOWED))
        self.says_after_results = 0 <= text.find(FOLLOWED) < text.find(MARKER)
        """Whether text beside calls is printed after their results."""
        self.beside_calls = MARKER if text and not self.says_after_results else ""
        """A text that the template prints before calls. Some templates print none there."""
        self._leads: dict[Place, str] = {}
        self._closings: dict[Place, str] = {}
        self._ends: dict[Place, str] = {}
        for one in WINDOWS:
            self._learn(one)

    @property
    def last_end(self) -> str:
        """The text between the last answer and the user turn after it."""
        return self.ends.text or self.ends.headers["user"]

    def after(
        self, before: Place, window: tuple[Message, ...], text: str, options: RenderContext
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

        An answer is followed by `FOLLOWED` in the render.

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

    def _learn(self, place: Place) -> None:
        """Finds the lead and the closing of a place, unless the template refuses it."""
        try:
            alone = self.template.render(WINDOWS[place], self._options)
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
            longer = self._printed(*WINDOWS[place], follower)
            if not longer:
                continue
            common = common_prefix(shared, longer.partition(MARKER)[2])
            # A role that is printed into the message itself cannot follow. It is refused later.
            if self._first_special(common) or not self._first_special(tail):
                shared = common
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

    def _leading_special(self, text: str) -> str | None:
        fitting = [name for name in self._tokenizer.special_texts if text.startswith(name)]
        return max(fitting, key=len, default=None)

    def _printed(self, *messages: Message) -> str:
        return self.template.printed(messages, self._options)

    def _find_ends(self) -> Ends:
        window = (*WINDOWS["assistant"], FOLLOWERS["assistant"])
        try:
            text = self.template.render(window, self._options)
        except TemplateRenderError as error:
            remedy = ""
            if self.template.printed(window, replace(self._options, tools_json=ANY_TOOLS)):
                remedy = (
                    "; the template renders conversations with tools only: put it into "
                    "additional_chat_templates/tool_use.jinja, beside one for all others"
                )
            raise TemplateRefusedError(f"user, assistant, user: {error}{remedy}") from error
        _, found, tail = text.partition(MARKER)
        if not found:
            raise TemplateRefusedError("the template does not print an answer unchanged")
        window = WINDOWS["assistant"]
        alone = self.template.render(window, self._options).partition(MARKER)[2]
        if not alone and self._leading_special(tail) is not None:
            headers = self._find_headers()
            stops = tuple(one for role, one in headers.items() if role != "assistant")
            return Ends("", "", stops, headers)
        end, last = (self._leading_special(text.lstrip()) for text in (tail, alone))
        if end is not None and last is None and end not in self._printed(ASKED):
            last = end  # the template does not end the last answer
        if end is None or last is None:
            raise TemplateRefusedError(
                f"an answer has no end token of its own: it is followed by {tail[:20]!r}"
            )
        names, shown = self._tokenizer.special_texts, self._tokenizer.shown
        stop_ids = self._tokenizer.stop_ids
        known = {name for name in names if self._tokenizer.special_id(name) in stop_ids}
        inside = self._find_inside()
        lasts = [last if end in inside else end]
        if end == last and end in inside:
            # The history ends answers as their parts. Another token may follow that of the part.
            both = common_prefix(tail, alone)
            printed = [name for name in names if name in both and name not in inside]
            lasts = sorted(name for name in known if name not in inside)
            if printed:
                end = min(printed, key=both.find)
                lasts = [end]
            elif not lasts:
                raise TemplateRefusedError(
                    f"the template ends an answer with {shown(end)}, which it also prints inside "
                    "answers, so the end of an answer is not known; name the tokens at which the "
                    "model stops as eos_token_id in generation_config.json"
                )
        call = self._find_call_end(end, known)
        stops = tuple(dict.fromkeys((*lasts, call)))
        for stop in sorted({*stops, *known}):
            if stop in inside:
                remedy = "; remove it from eos_token_id in generation_config.json"
                raise TemplateRefusedError(
                    f"the model stops at {shown(stop)}, which the template prints inside answers, "
                    f"so the text after it would never be sampled{remedy if stop in known else ''}"
                )
        return Ends(end, call, stops)

    def _find_inside(self) -> str:
        """Returns the template's text between the parts of one answer: never its end."""
        call = replace(CALL, arguments=f'{{"key": "{FOLLOWED}"}}')
        between = ""
        for messages in (
            (Message("assistant", MARKER, (call,)), result("c")),
            (Message("assistant", FOLLOWED, reasoning=MARKER),),
        ):
            after = self._printed(ASKED, *messages).partition(MARKER)[2]
            inner, found, _ = after.partition(FOLLOWED)
            between += inner if found else ""
        return between

    def _find_call_end(self, end: str, known: set[str]) -> str:
        """Returns the end of an answer with calls.

        Where it differs from the end of other answers, it is one of `known`, at which the model
        stops, or else the last one that the template prints after a call without a result.
        """
        call = replace(CALL, arguments=f'{{"key": "{MARKER}"}}')
        window = (ASKED, replace(CALLED, tool_calls=(call,)))
        text = self._printed(*window, result(FOLLOWED))
        between, printed, _ = text.partition(MARKER)[2].partition(FOLLOWED)
        if not printed or end in between:
            return end
        if stops := [name for name in known if name in between]:
            return min(stops, key=between.find)
        alone = self._printed(*window)
        names = [name for name in self._tokenizer.special_texts if alone.endswith(name)]
        return max(names, key=len, default=end) if text.startswith(alone) else end

    def _find_headers(self) -> dict[RoleName, str]:
        """Returns what begins the turns after answers, which may be sampled as their end."""
        headers: dict[RoleName, str] = {}
        said, called = WINDOWS["assistant"], (ASKED, CALLED)
        windows: dict[RoleName, tuple[Message, ...]] = {
            "user": said,
            "system": said,
            "tool": called,
            "assistant": said,
        }
        for role, window in windows.items():
            alone = self._printed(*window)
            if role == "assistant":
                longer = self.template.printed(window, self._options, generation_prompt=True)
            else:
                then = Message(role, "c", tool_call_id=CALL.id, name=CALL.name)
                longer = self._printed(*window, then)
            begun = bool(alone) and longer.startswith(alone)
            header = self._leading_special(longer[len(alone) :]) if begun else None
            if header is not None:
                headers[role] = header
        return headers


# The cuts.

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
            if self.refused and (why := self.refusal(groups, at, context)):
                raise TemplateRenderError(f"{groups[at][0].role} after {place(groups, at)}: {why}")
            for message in groups[at]:
                if message.images and message.role not in self.image_roles:
                    raise TemplateRenderError(
                        f"the model takes no images in {message.role} messages; leave them out"
                    )
            message = groups[at][0]
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
