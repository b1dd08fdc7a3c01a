"""Where the text of a message begins and ends in a template's renders; see `continuation`."""

from functools import lru_cache

from rollmesh.chat.messages import Message, MessageGroup, RenderContext
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
    readable,
    result,
)
from rollmesh.chat.tokenizer import ModelTokenizer

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
        for place in WINDOWS:
            self._learn(place)

    @property
    def last_end(self) -> str:
        """The text between the last answer and the user turn after it."""
        return self.ends.text or self.ends.headers["user"]

    def window(self, before: Place, previous: MessageGroup) -> tuple[Message, ...]:
        """Returns the messages to render in front of a group.

        Args:
            before: What the group stands after.
            previous: The group in front of it; an answer's calls are part of the window.
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
        options: RenderContext | None = None,
    ) -> str:
        """Returns what a render prints after the last message of its window.

        Args:
            before: Place after the window.
            window: The messages in front.
            text: Render of the window and what follows it.
            options: What it was rendered with; None: the template's options alone.

        Raises:
            TemplateRenderError: What follows changes how the window is printed.
        """
        if before == "assistant":
            return self._after_answer(window, text, options or self._options)
        lead = self._leads.get(before)
        _, found, after = text.partition(MARKER)
        if lead is None or not found or not after.startswith(lead):
            raise TemplateRenderError(f"later messages change how a {before} message is printed")
        return after[len(lead) :]

    def without_closing(self, place: Place, group: MessageGroup, text: str) -> str:
        """Returns a render up to the boundary after its last group, or after its last answer.

        Args:
            place: Place after the group.
            group: The group; an answer is followed by `followers` in the render.
            text: The render.

        Raises:
            TemplateRenderError: The end of the group is not found.
        """
        closing = self._closings.get(place)
        if closing is None:
            raise TemplateRenderError(f"the template does not print {place} messages")
        if place == "assistant":
            end, follower = self._end_of(group[0]), text.rfind(FOLLOWED)
            at = max(text.rfind(one, 0, follower) for one in self.ends.headers.values() or (end,))
            if at < 0:
                raise TemplateRenderError("the template does not end an answer in the history")
            return text[: at + len(end)]
        if not text.endswith(self._ends[place]):
            raise TemplateRenderError(f"a {place} message does not end as others of its kind")
        return text[: len(text) - len(closing)]

    def _after_answer(self, window: tuple[Message, ...], text: str, options: RenderContext) -> str:
        """Returns the text after the token that ends the window's answer."""
        alone, end = self._render(window, options), self._end_of(window[-1])
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
            try:
                longer = self._template.render((*WINDOWS[place], follower), self._options)
            except TemplateRenderError:
                continue
            common = _common_prefix(shared, longer.partition(MARKER)[2])
            # A role that is printed into the message itself cannot follow; it is refused later.
            shared = (
                common if self._first_special(common) or not self._first_special(tail) else shared
            )
        special = self._first_special(shared)
        lead = shared.partition(special)[0] + special if special else ""
        self._leads[place], self._closings[place] = lead, tail[len(lead) :]
        self._ends[place] = special + self._closings[place]

    def _first_special(self, text: str) -> str:
        """Returns the unmergeable token that ends first in a text; empty if there is none."""
        ends = [
            (at + len(name), name)
            for name in self._tokenizer.added_texts
            if (at := text.find(name)) >= 0
        ]
        return min(ends, default=(0, ""))[1]


def _common_prefix(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]
