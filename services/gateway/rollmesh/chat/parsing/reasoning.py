"""Separates the reasoning of an answer, `<think> ... </think>` at its beginning, from the rest.

Some families use other tags, often control tokens. Formats with channels (harmony, Gemma 4, Muse)
have their own parsers, which read reasoning, text and calls.
"""

from rollmesh.chat.parsing.parser import possible_start

OPEN, CLOSE = "<think>", "</think>"
TAGS = (OPEN, CLOSE)
MISTRAL_TAGS = ("[THINK]", "[/THINK]")
REASONING_TAGS = {
    "mistral": MISTRAL_TAGS,
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "think": TAGS,
}
"""What opens and closes the reasoning, by the name of the format."""


class ReasoningSplitter:
    """Splits one answer's text into reasoning and the rest.

    The generation prompt may have opened the tag already; then the answer begins inside. Blank
    text around the reasoning is dropped: templates print it themselves.
    """

    def __init__(self, *, inside: bool, tags: tuple[str, str] = TAGS) -> None:
        """Begins an empty answer.

        Args:
            inside: Whether the generation prompt has opened the tag.
            tags: What opens and closes the reasoning.
        """
        self._open, self._close = tags
        self._state = "inside" if inside else "start"
        self._held = ""
        self.reasoning = ""
        """The reasoning so far."""

    def feed(self, text: str) -> tuple[str, str]:
        """Takes text; returns what is now certain: reasoning, and rest."""
        self._held += text
        thought = ""
        if self._state == "start":
            self._begin()
        if self._state == "inside":
            thought = self._think()
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "rest"
        rest = ""
        if self._state == "rest":
            rest, self._held = self._held, ""
        return thought, rest

    def finish(self) -> tuple[str, str]:
        """Ends the text; returns what is left: reasoning, and rest."""
        if self._state == "inside":
            thought = self._held if self.reasoning else self._held.lstrip()
            thought = thought.rstrip()
            self.reasoning += thought
            return thought, ""
        return "", "" if self._state == "after" else self._held

    def _begin(self) -> None:
        lead = self._held.lstrip()
        if lead.startswith(self._open):
            self._held, self._state = lead.removeprefix(self._open), "inside"
        elif not self._open.startswith(lead):
            self._state = "rest"

    def _think(self) -> str:
        if not self.reasoning:
            self._held = self._held.lstrip()
        at = self._held.find(self._close)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(self._close) :]
            self._state = "after"
        else:
            certain = self._held[: len(self._held) - possible_start(self._held, (self._close,))]
            thought = certain.rstrip()  # whitespace before the closing tag is dropped
            self._held = self._held[len(thought) :]
        self.reasoning += thought
        return thought
