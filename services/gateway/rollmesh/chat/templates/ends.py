"""How a template ends answers, and where its model must stop.

Most templates print one special token after every answer, and their models stop at it. Some differ:

* Harmony writes an answer as several messages. `<|end|>` ends each of them, and the last one too
  once it is history; a model ends the answer itself with `<|return|>`, or with `<|call|>`.
* Gemma 4 ends a call with the token that begins its result, as the model samples it.
* GLM's answers have no end token: the header of the next turn ends them.
"""

from dataclasses import dataclass, field

from rollmesh.chat.messages import Message, RenderContext, RoleName, ToolCall
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.windows import (
    ASKED,
    CALL,
    CALLED,
    FOLLOWED,
    FOLLOWERS,
    MARKER,
    WINDOWS,
    result,
)
from rollmesh.chat.tokenizer import ModelTokenizer


class TemplateRefusedError(Exception):
    """The template cannot be continued exactly; the message says why."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The special tokens that end answers, as the template prints them."""

    text: str
    """Ends an answer in the history; empty if answers have no end token."""
    call: str
    """Ends an answer with calls; usually the same as `text`."""
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
            raise TemplateRefusedError(f"user, assistant, user: {error}") from error
        _, found, tail = text.partition(MARKER)
        if not found:
            raise TemplateRefusedError("the template does not print an answer unchanged")
        end = self._leading_special(tail)
        alone = self._render(WINDOWS["assistant"]).partition(MARKER)[2]
        if end is not None and not alone:
            headers = self._headers()
            return Ends(
                "", "", tuple(h for role, h in headers.items() if role != "assistant"), headers
            )
        last = self._leading_special(alone)
        if end is None or last is None:
            raise TemplateRefusedError(
                f"an answer has no end token of its own: it is followed by {tail[:20]!r}"
            )
        call = self._call_end(end)
        inside = self._inside()
        stops = (last if end in inside else end, call)
        self._check(stops, inside)
        return Ends(end, call, tuple(dict.fromkeys(stops)))

    def _check(self, stops: tuple[str, ...], inside: str) -> None:
        """Checks that no token at which the model stops is printed inside answers."""
        known = {
            name
            for name in self._tokenizer.special_texts
            if self._tokenizer.special_id(name) in self._tokenizer.stop_ids
        }
        for stop in sorted({*stops, *known}):
            if stop in inside:
                raise TemplateRefusedError(
                    f"the model stops at {self._tokenizer.shown(stop)}, which the template prints "
                    "inside answers, so the text after it would never be sampled; remove it "
                    "from eos_token_id in generation_config.json"
                )

    def _inside(self) -> str:
        """Returns what the template prints between the parts of one answer: never its end."""
        call = ToolCall(CALL.id, CALL.name, f'{{"key": "{FOLLOWED}"}}')
        answers = (
            (Message("assistant", MARKER, (call,)), result("c")),
            (Message("assistant", FOLLOWED, reasoning=MARKER),),
        )
        between: list[str] = []
        for messages in answers:
            try:
                text = self._render((ASKED, *messages))
            except TemplateRenderError:
                continue
            _, _, after = text.partition(MARKER)
            inner, found, _ = after.partition(FOLLOWED)
            between.append(inner if found else "")
        return "".join(between)

    def _call_end(self, end: str) -> str:
        """Returns what ends an answer with calls.

        Where it is not what ends any answer, it is a token at which the model is known to stop, or
        else the last one that the template prints after a call which no result follows yet.
        """
        call = ToolCall(CALL.id, CALL.name, f'{{"key": "{MARKER}"}}')
        window = (ASKED, Message("assistant", "", (call,)))
        try:
            text = self._render((*window, result(FOLLOWED)))
        except TemplateRenderError:
            return end
        between, printed, _ = text.partition(MARKER)[2].partition(FOLLOWED)
        if not printed or end in between:
            return end
        stops = {
            name
            for name in self._tokenizer.special_texts
            if name in between and self._tokenizer.special_id(name) in self._tokenizer.stop_ids
        }
        if stops:
            return min(stops, key=between.find)
        try:
            alone = self._render(window)
        except TemplateRenderError:
            return end
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
        try:
            alone = self._render(window)
            longer = self._template.render(
                messages, self._options, generation_prompt=generation_prompt
            )
        except TemplateRenderError:
            return None
        return self._leading_special(longer[len(alone) :]) if longer.startswith(alone) else None

    def _leading_special(self, text: str) -> str | None:
        fitting = [name for name in self._tokenizer.special_texts if text.startswith(name)]
        return max(fitting, key=len, default=None)

    def _render(self, messages: tuple[Message, ...]) -> str:
        return self._template.render(messages, self._options)
