"""Separates the reasoning of an answer, `<think> ... </think>` at its beginning, from the rest.

Some families use other tags, often control tokens. Formats with channels (harmony, Gemma 4, Muse)
have their own parsers, which read reasoning, text and calls.
"""

from rollmesh.chat.parsing.parser import (
    Coming,
    HeldText,
    first_of,
    has_words,
    possible_start,
)

OPEN, CLOSE = "<think>", "</think>"
TAGS = (OPEN, CLOSE)
MISTRAL_TAGS = ("[THINK]", "[/THINK]")
REASONING_TAGS = {
    "mistral": MISTRAL_TAGS,
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "think": TAGS,
}
"""What opens and closes the reasoning, by the name of the format."""


class ReasoningSplitter(HeldText):
    """Splits one answer's text into reasoning and the rest.

    The generation prompt may have opened the tag already. Then the answer begins inside. Blank
    text around the reasoning is dropped: templates print it themselves.

    A call may stand in the reasoning. Where the reasoning is closed behind it, the call is part of
    it. Where the answer ends first, the call ended the reasoning, as in vLLM's parsers. So the text
    from a call's beginning on is held until one of both is known.
    """

    def __init__(
        self, *, inside: bool, tags: tuple[str, str] = TAGS, calls: tuple[str, ...] = ()
    ) -> None:
        """Begins an empty answer.

        `inside` says whether the generation prompt has opened the tag. Without `calls`, none is
        looked for.
        """
        super().__init__()
        self._open, self._close = tags
        self._calls = calls
        self._state = "inside" if inside else "start"
        self._thought: list[str] = []

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._thought)

    @property
    def ended_by_call(self) -> bool:
        """Whether the answer ended in reasoning that has the beginning of a call."""
        return self._state == "call"

    def feed(self, text: str) -> tuple[str, str]:
        """Takes text. Returns the newly certain text: reasoning, and rest."""
        if not self._come(text):
            return "", ""
        if self._state == "start":
            lead = self._held.lstrip()
            if lead.startswith(self._open):
                self._held, self._state = lead.removeprefix(self._open), "inside"
            elif not self._open.startswith(lead):
                self._state = "rest"
            elif not lead:
                self._wait = has_words
        thought = self._think() if self._state in {"inside", "call"} else ""
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "rest"
        rest = ""
        if self._state == "rest":
            rest, self._held = self._held, ""
        return thought, rest

    def finish(self) -> tuple[str, str]:
        """Ends the text. Returns the held text: reasoning, and rest."""
        self._gather()
        if self._state == "inside":
            thought = self._held if self._thought else self._held.lstrip()
            return self._thinks(thought.rstrip()), ""
        return "", "" if self._state == "after" else self._held

    def take_back(self, rest: str) -> str:
        """Takes what `finish` returned as the rest, where it has no call. Returns the reasoning."""
        return self._thinks((rest if self._thought else rest.lstrip()).rstrip())

    def _think(self) -> str:
        """Returns the newly certain reasoning, up to its end."""
        if not self._thought:
            self._held = self._held.lstrip()
        thought = ""
        if self._state == "inside":
            ends = (self._close, *self._calls)
            at, end = first_of(self._held, ends)
            if end != self._close:
                size = at if end else len(self._held) - possible_start(self._held, ends)
                # Whitespace before the closing tag is dropped.
                thought = self._thinks(self._held[:size].rstrip())
                self._held = self._held[len(thought) :]
                if not end:
                    if not self._held.strip():
                        self._wait = has_words
                    return thought
                self._state = "call"
        at = self._held.find(self._close)
        if at < 0:  # a call has begun
            self._wait = Coming([self._close], self._held)
            return thought
        more = self._held[:at].rstrip()
        self._held, self._state = self._held[at + len(self._close) :], "after"
        return thought + self._thinks(more if self._thought else more.lstrip())

    def _thinks(self, thought: str) -> str:
        if thought:
            self._thought.append(thought)
        return thought
