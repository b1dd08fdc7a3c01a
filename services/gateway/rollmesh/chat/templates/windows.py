"""Short conversations that are rendered to find where to cut. A marker stands for one message.

How a template ends answers, and where its model must stop.

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
from typing import Literal, NamedTuple, TypeAlias

from rollmesh.chat.json_values import is_deeper, is_object
from rollmesh.chat.messages import Message, MessageGroup, RenderContext, RoleName, ToolCall
from rollmesh.chat.rendering import ModelTemplate, TemplateRenderError
from rollmesh.chat.tokenizer import ModelTokenizer

Place: TypeAlias = Literal["start", "first system", "system", "user", "assistant", "tool"]
"""The kind of group before it: templates treat the first system message differently."""
MARKER, FOLLOWED = "mark7zq", "next7zq"
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


def answers_no_call(group: MessageGroup, previous: MessageGroup | None) -> bool:
    """Returns whether a group is tool results that stand behind no call."""
    return group[0].role == "tool" and not (previous and previous[0].tool_calls)


def result(content: str, call: ToolCall = CALL) -> Message:
    """Returns a result of a call."""
    return Message("tool", content, tool_call_id=call.id, name=call.name)


def followers(group: MessageGroup) -> tuple[Message, ...]:
    """Returns messages to follow an answer: templates print the last answer differently."""
    message = group[0]
    if message.role != "assistant":
        return ()
    if not message.tool_calls:
        return (Message("user", FOLLOWED),)
    return tuple(
        result("c" if at else FOLLOWED, call) for at, call in enumerate(message.tool_calls)
    )


def readable(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """Returns calls that any template prints. The text after them does not depend on arguments.

    Sampled arguments may not be an object, or may be nested so deeply that a template fails on
    them. The tokens of the session stay as sampled.
    """
    return tuple(
        call if _is_plain(call.arguments) else replace(call, arguments="{}") for call in calls
    )


def _is_plain(arguments: str) -> bool:
    if not arguments.strip():
        return True
    return not is_deeper(arguments, _MOST_RENDERED_DEPTH) and is_object(arguments)


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


def find_ends(template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext) -> Ends:
    """Finds out how a template ends answers.

    Raises:
        TemplateRefusedError: An answer does not end with a special token, or the model stops at one
            that occurs inside answers.
    """
    return _Finder(template, tokenizer, options).find()


class _Finder:
    def __init__(
        self, template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._options = options

    def find(self) -> Ends:
        window = (*WINDOWS["assistant"], FOLLOWERS["assistant"])
        try:
            text = self._render(window)
        except TemplateRenderError as error:
            remedy = self._remedy(window)
            raise TemplateRefusedError(f"user, assistant, user: {error}{remedy}") from error
        _, found, tail = text.partition(MARKER)
        if not found:
            raise TemplateRefusedError("the template does not print an answer unchanged")
        alone = self._render(WINDOWS["assistant"]).partition(MARKER)[2]
        if not alone and self._leading_special(tail) is not None:
            headers = self._headers()
            return Ends(
                "", "", tuple(h for role, h in headers.items() if role != "assistant"), headers
            )
        end, last = (self._leading_special(text.lstrip()) for text in (tail, alone))
        if end is not None and last is None and end not in self._render((ASKED,)):
            last = end  # the template does not end the last answer
        if end is None or last is None:
            raise TemplateRefusedError(
                f"an answer has no end token of its own: it is followed by {tail[:20]!r}"
            )
        inside = self._inside()
        lasts = [last if end in inside else end]
        if end == last and end in inside:
            printed = self._end_outside(common_prefix(tail, alone), inside)
            lasts = [printed] if printed else self._known_stops(end, inside)
            end = printed or end
        call = self._call_end(end)
        stops = (*lasts, call)
        self._check(stops, inside)
        return Ends(end, call, tuple(dict.fromkeys(stops)))

    def _remedy(self, window: tuple[Message, ...]) -> str:
        """Returns the remedy for a template that does not render a window. Empty if unknown."""
        if not self._template.printed(window, replace(self._options, tools_json=ANY_TOOLS)):
            return ""
        return (
            "; the template renders conversations with tools only: put it into "
            "additional_chat_templates/tool_use.jinja, beside one for all others"
        )

    def _end_outside(self, tail: str, inside: str) -> str:
        """Returns the first special token of an answer's end that is not printed inside answers.

        It is empty if there is none.
        """
        names = (name for name in self._tokenizer.special_texts if name in tail)
        return min((name for name in names if name not in inside), key=tail.find, default="")

    def _known_stops(self, end: str, inside: str) -> list[str]:
        """Returns where the model is known to stop, if the history ends answers as their parts."""
        stops = sorted(name for name in self._stops() if name not in inside)
        if not stops:
            raise TemplateRefusedError(
                f"the template ends an answer with {self._tokenizer.shown(end)}, which it also "
                "prints inside answers, so the end of an answer is not known; name the tokens at "
                "which the model stops as eos_token_id in generation_config.json"
            )
        return stops

    def _stops(self) -> set[str]:
        return {
            name
            for name in self._tokenizer.special_texts
            if self._tokenizer.special_id(name) in self._tokenizer.stop_ids
        }

    def _check(self, stops: tuple[str, ...], inside: str) -> None:
        """Checks that no token at which the model stops is printed inside answers."""
        known = self._stops()
        for stop in sorted({*stops, *known}):
            if stop in inside:
                remedy = "; remove it from eos_token_id in generation_config.json"
                raise TemplateRefusedError(
                    f"the model stops at {self._tokenizer.shown(stop)}, which the template prints "
                    "inside answers, so the text after it would never be sampled"
                    f"{remedy if stop in known else ''}"
                )

    def _inside(self) -> str:
        """Returns the template's text between the parts of one answer: never its end."""
        call = ToolCall(CALL.id, CALL.name, f'{{"key": "{FOLLOWED}"}}')
        answers = (
            (Message("assistant", MARKER, (call,)), result("c")),
            (Message("assistant", FOLLOWED, reasoning=MARKER),),
        )
        between: list[str] = []
        for messages in answers:
            _, _, after = self._printed((ASKED, *messages)).partition(MARKER)
            inner, found, _ = after.partition(FOLLOWED)
            between.append(inner if found else "")
        return "".join(between)

    def _call_end(self, end: str) -> str:
        """Returns the end of an answer with calls.

        Where it differs from the end of other answers, it is a token at which the model stops, or
        else the last one that the template prints after a call which no result follows yet.
        """
        call = ToolCall(CALL.id, CALL.name, f'{{"key": "{MARKER}"}}')
        window = (ASKED, Message("assistant", "", (call,)))
        text = self._printed((*window, result(FOLLOWED)))
        between, printed, _ = text.partition(MARKER)[2].partition(FOLLOWED)
        if not printed or end in between:
            return end
        stops = {name for name in self._stops() if name in between}
        if stops:
            return min(stops, key=between.find)
        alone = self._printed(window)
        names = [name for name in self._tokenizer.special_texts if alone.endswith(name)]
        last = max(names, key=len, default=end)
        return last if text.startswith(alone) else end

    def _headers(self) -> dict[RoleName, str]:
        """Returns what begins the turns after answers, which may be sampled as their end."""
        headers: dict[RoleName, str] = {}
        said, called = WINDOWS["assistant"], (ASKED, CALLED)
        windows: dict[RoleName, tuple[Message, ...]] = {
            "user": said,
            "system": said,
            "tool": called,
        }
        for role, window in windows.items():
            then = Message(role, "c", tool_call_id=CALL.id, name=CALL.name)
            header = self._header(window, (*window, then), generation_prompt=False)
            if header is not None:
                headers[role] = header
        header = self._header(said, said, generation_prompt=True)
        if header is not None:
            headers["assistant"] = header
        return headers

    def _header(
        self,
        window: tuple[Message, ...],
        messages: tuple[Message, ...],
        *,
        generation_prompt: bool,
    ) -> str | None:
        alone = self._printed(window)
        longer = self._template.printed(
            messages, self._options, generation_prompt=generation_prompt
        )
        begun = bool(alone) and longer.startswith(alone)
        return self._leading_special(longer[len(alone) :]) if begun else None

    def _printed(self, messages: tuple[Message, ...]) -> str:
        return self._template.printed(messages, self._options)

    def _leading_special(self, text: str) -> str | None:
        fitting = [name for name in self._tokenizer.special_texts if text.startswith(name)]
        return max(fitting, key=len, default=None)

    def _render(self, messages: tuple[Message, ...]) -> str:
        return self._template.render(messages, self._options)


def common_prefix(one: str, other: str) -> str:
    """Returns the text with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
