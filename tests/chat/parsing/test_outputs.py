"""What must hold for every answer that models write or spoil."""

import json
import random

import pytest

from rollmesh.chat import make_context
from rollmesh.chat.parsing import CHANNELS, FORMATS, HARMONY
from tests.chat.parsing.outputs import outputs
from tests.chat.parsing.test_against_vllm import ours
from tests.chat.parsing.test_formats import joined, parse
from tests.chat.parsing.writers import WRITERS


def test_every_format_has_a_writer() -> None:
    named = FORMATS.keys() | CHANNELS.keys() - {HARMONY}
    assert {writer.format for writer in WRITERS.values()} == named


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_whole_answers_give_the_calls_that_were_meant(writer: str) -> None:
    for output in outputs(writer, 20):
        reading = ours(WRITERS[writer].format, output.text)
        in_prose = output.kind == "lead" and writer in {"llama3_json", "pythonic"}
        if output.meant is not None and not in_prose:
            assert reading.calls == output.meant, output.text
            assert not reading.malformed, output.text


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_answers_are_the_same_however_they_are_cut(writer: str) -> None:
    rng = random.Random(writer)
    name = WRITERS[writer].format
    for output in outputs(writer, 6):
        text, at = output.text, rng.randrange(len(output.text) + 1)
        whole, events = parse(name, [text])
        expected = (whole.content, whole.calls, whole.malformed)
        assert joined(events) == expected[:2], text
        for parts in ([text[:at], text[at:]], list(text)):
            parser, events = parse(name, parts)
            assert (parser.content, parser.calls, parser.malformed) == expected, parts
            assert joined(events) == expected[:2], parts


@pytest.mark.parametrize("writer", sorted(WRITERS))
@pytest.mark.parametrize("name", ["ns/look_up", "server:tool", "a.b/c-d:e", "f" * 256])
def test_a_name_of_slashes_and_colons_is_read_in_every_format(writer: str, name: str) -> None:
    format_ = WRITERS[writer].format
    tools = [{"type": "function", "function": {"name": name}}]
    text = WRITERS[writer].write([(name, {"n": "x"})])
    for parts in ([text], list(text)):
        parser, _ = parse(format_, parts, make_context(json.dumps(tools).encode(), b""))
        assert [one for one, _ in parser.calls] == [name]
        assert not parser.malformed
