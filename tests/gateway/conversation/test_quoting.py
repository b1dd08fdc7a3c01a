"""Which texts contain another one: as comparing each with each would say."""

import random
from bisect import bisect_right
from collections.abc import Sequence

import pytest

from rollmesh.gateway import lineage as module
from rollmesh.gateway.lineage import LEAST_CHARS, MOST_PLACES, quoting

ALPHABETS = ("a", "ab", "abc ", "abcdefgh \n\ud800\u00e9\U0001f600")


def each_with_each(texts: Sequence[str]) -> list[bool]:
    return [
        any(len(text) > len(other) >= LEAST_CHARS and other in text for other in texts)
        for text in texts
    ]


def some_texts(dice: random.Random) -> list[str]:
    alphabet = dice.choice(ALPHABETS)
    sizes = (0, 3, 7, 8, 9, 15, 16, 17, 30, 70)
    texts = ["".join(dice.choices(alphabet, k=dice.choice(sizes))) for _ in range(8)]
    for _ in range(dice.randrange(6)):
        text = dice.choice(texts)
        at = dice.randrange(len(text) + 1)
        part = text[at : at + dice.randrange(4, 40)]
        texts.append(dice.choice(["", part, "x"]) + part + dice.choice(["", "y", "aab"]))
    return texts


@pytest.mark.parametrize("chars_at_once", [1, 40, 1 << 18])
def test_quotations_equal_a_comparison_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, chars_at_once: int
) -> None:
    monkeypatch.setattr(module, "CHARS_AT_ONCE", chars_at_once)
    quotations = 0
    for seed in range(400):
        texts = some_texts(random.Random(seed))
        expected = each_with_each(texts)
        assert quoting(texts) == expected, (seed, texts)
        quotations += sum(expected)
    assert quotations > 400


@pytest.mark.parametrize("length", [8, 15, 16, 17, 1000, 65_535, 65_536, 70_000])
def test_a_quotation_of_any_length_is_found_anywhere(length: int) -> None:
    text = "".join(random.Random(length).choices("abcd ", k=length))
    for around in ("{}.", ".{}", "<session>{}</session>"):
        expected = len(around.format(text)) <= 65_536 or around == "{}."
        assert quoting([text, around.format(text)])[1] == (expected and length < 65_536)


def test_nothing_is_quoted_where_there_is_nothing() -> None:
    assert quoting([]) == []
    assert quoting(["", "short", "short, longer"]) == [False, False, False]
    assert quoting(["the same text", "the same text"]) == [False, False]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param([f"{at:03} " + "word " * 4000 for at in range(500)], id="other beginnings"),
        pytest.param(["word " * 4000 + f"{at:03}" for at in range(500)], id="other ends"),
        pytest.param(["a" * (20_000 - at) + f"b{at}" for at in range(500)], id="one letter"),
        pytest.param([f"Task {at}: go on." for at in range(20_000)], id="many"),
    ],
)
def test_few_places_are_looked_up_in_texts_that_are_nearly_equal(
    monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    looked_up = 0

    def counted(quoted: Sequence[str], text: str) -> int:
        nonlocal looked_up
        looked_up += 1
        return bisect_right(quoted, text)

    monkeypatch.setattr(module, "bisect_right", counted)
    assert not any(quoting(texts))
    assert looked_up <= MOST_PLACES * len(texts)
