"""Every parser takes time in proportion to an answer, whatever the answer begins and never ends.

An answer is fed in small pieces at two sizes. Four times the text may take twelve times the CPU
time of this thread: work that grows with the square takes sixteen times, so a ratio above it means
that each piece looked at all text before it.
"""

import re
from collections.abc import Callable
from time import thread_time

import pytest

from rollmesh.chat.parsing import (
    CHANNELS,
    FORMATS,
    HARMONY,
    TAGS,
    ReasoningSplitter,
    read_call,
)
from tests.chat.parsing.test_formats import parse
from tests.chat.parsing.writers import WRITERS

_PIECE = 4
_SMALL, _GROWTH, _MOST_RATIO = 4_000, 4, 12
_QUICK_S = 0.05
"""CPU time of the larger answer below which its ratio says nothing: most take so little."""
ARGUMENTS = {"s": "two words", "o": {"a": [1]}}
HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 4}<|call|>'
)
FILLERS = ("a", " ", '"', "\\", "{", "}", "(", "<", ";", "to=", " a")
ANSWERS = {
    **{name: (one.format, one.write([("f", ARGUMENTS)])) for name, one in WRITERS.items()},
    HARMONY: (HARMONY, HARMONY_ANSWER),
}


def openings(answer: str) -> list[str]:
    """The beginnings of an answer, one for each of its words and marks up to its second call."""
    ends = [found.end() for found in re.finditer(r"\w+|[^\w\s]+|\s+", answer)]
    return [answer[:end] for end in (0, *ends)]


def grown(opening: str, filler: str, size: int) -> str:
    return opening + (filler * (size // len(filler) + 1))[:size]


def pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def is_linear(read: Callable[[str], object], opening: str, filler: str) -> bool:
    """Whether four times the text takes less than twelve times the CPU time. It has five tries."""

    def spent(size: int) -> float:
        begun = thread_time()
        read(grown(opening, filler, size))
        return thread_time() - begun

    for _ in range(5):
        large = spent(_GROWTH * _SMALL)
        if large < _QUICK_S or large < _MOST_RATIO * spent(_SMALL):
            return True
    return False


def fillers(name: str, opening: str) -> tuple[str, ...]:
    format_, _ = ANSWERS[name]
    marks = FORMATS[format_].delimiters if format_ in FORMATS else CHANNELS[format_]
    return (*FILLERS, *marks, *((opening,) if opening else ()))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_a_parser_is_linear_in_every_opening_of_its_format(name: str) -> None:
    format_, answer = ANSWERS[name]
    slow = [
        (opening, filler)
        for opening in openings(answer)
        for filler in fillers(name, opening)
        if not is_linear(lambda text: parse(format_, pieces(text)), opening, filler)
    ]
    assert slow == []


@pytest.mark.parametrize(
    ("name", "opening", "filler"),
    [
        ("mistral", "[TOOL_CALLS]", "a"),
        ("mistral", "[TOOL_CALLS]f", " "),
        ("hermes", '<tool_call>\n{"name": "', "a"),
        ("llama3_json", '{"name": "', "a"),
        ("llama3_json", "", ";"),
        ("deepseek_v3", "<\uff5ctool\u2581call\u2581begin\uff5c>", "a"),
        ("kimi_k2", "<|tool_call_begin|>", "a"),
        ("qwen3_coder", "<tool_call>\n<function=f>", " "),
        ("glm45", "<tool_call>f<arg_key>n</arg_key>", "<tool_call><arg_value>"),
        ("pythonic", "[", "a"),
        ("lfm2", "<|tool_call_start|>[f(", "a"),
        ("gemma4", "<|tool_call>call:f{", "a"),
        ("muse_glimmer", " to=f<|message|>", '<atem:invoke name="f">'),
        ("muse_glimmer", " to=f<|message|>", " a"),
        ("solar_open", "<|tool_calls|>", "<|tool_call:begin|>"),
        ("solar_open", "<|tool_calls|><|tool_call:begin|>", "a"),
        ("solar_open", "", "<|begin|>assistant"),
        (HARMONY, "", "a"),
    ],
)
def test_an_answer_of_unclosed_openings_is_read_in_linear_time(
    name: str, opening: str, filler: str
) -> None:
    assert is_linear(lambda text: parse(name, pieces(text)), opening, filler)


@pytest.mark.parametrize("opening", ["", "<think>", "<think>a", "<think>a<tool_call>"])
@pytest.mark.parametrize("filler", ["a", " ", "\n", "<", "<think>", "<tool_call>", " a"])
def test_reasoning_is_parted_in_linear_time(opening: str, filler: str) -> None:
    def read(text: str) -> None:
        splitter = ReasoningSplitter(inside=False, tags=TAGS, calls=("<tool_call>",))
        for piece in pieces(text):
            splitter.feed(piece)
        splitter.finish()

    assert is_linear(read, opening, filler)


def test_a_long_number_that_is_none_is_refused_in_linear_time() -> None:
    assert is_linear(lambda text: read_call(f"f(a={text}x)"), "", "1")
