"""What every measured system is given: the words, the sessions' texts and the one reply."""

import random

TURNS = 16
USER_BYTES = 3500
REPLY_WORDS = 40
_SYLLABLES = [first + last for first in "bdklmnrst" for last in "aeiou"]


def vocabulary(count: int = 6000) -> list[str]:
    """Returns made-up words of two to four syllables, always the same ones."""
    rng = random.Random(7)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4))) for _ in range(count)]


def user_text(rng: random.Random, words: list[str]) -> str:
    """Returns the new text of one turn, about `USER_BYTES` bytes of ASCII."""
    text = " ".join(rng.choices(words, k=USER_BYTES // 5))
    return text[:USER_BYTES]


def reply_text(words: list[str]) -> str:
    """Returns what both engines answer to everything."""
    return " ".join(random.Random(11).choices(words, k=REPLY_WORDS))
