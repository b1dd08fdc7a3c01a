"""Incremental decoding of sampled ids, and stop strings."""

from collections.abc import Iterable, Sequence

from rollmesh.chat.tokenizer import ModelTokenizer


class IncrementalDecoder:
    """Decodes ids one by one; a character that spans several ids is held until complete.

    Invariant: the texts returned so far, joined, are a prefix of the text of all ids.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        shown: Sequence[str] = (),
        *,
        hidden: Iterable[int] = (),
        special: bool = False,
    ) -> None:
        """Begins an empty text.

        Args:
            tokenizer: The model's tokenizer.
            shown: Special tokens that are always part of the text.
            hidden: Other ids that are not part of it.
            special: Whether all special tokens are part of it.
        """
        left_out = frozenset(hidden) | (frozenset() if special else tokenizer.special_ids)
        self._hidden = left_out - {tokenizer.special_id(text) for text in shown}
        self._stream = tokenizer.stream()

    def feed(self, token_id: int) -> str:
        """Takes one id; returns the text that is now certain, often empty."""
        return "" if token_id in self._hidden else self._stream.feed(token_id)

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """Takes ids; returns the text that is now certain."""
        return self._stream.feed_all([id_ for id_ in token_ids if id_ not in self._hidden])

    def finish(self) -> str:
        """Returns what is left: bytes that never became a character, as U+FFFD."""
        return self._stream.finish()


class StopStrings:
    """Finds the first stop string in a growing text and holds back what may begin one."""

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        """Looks for any of `stops`, none of them empty; the text may keep the one that is found."""
        self._stops = tuple(stops)
        self._kept = kept
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = ""
        """The stop string that ended the text; empty while none did."""

    @property
    def wanted(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes text; returns the text that is certain and whether a stop string was completed.

        The one that is complete first ends the text, in whatever pieces it comes; of those that end
        at the same place, the longest.
        """
        if not self._stops:
            return text, False
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self._held = ""
            end, at = min(found)
            self.found = held[at:end]
            return held[: end if self._kept else at], True
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """Returns the text that was held back: no stop string came."""
        return self._held

    def _possible_start(self, text: str) -> int:
        """Returns how many of the last characters may begin a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
