"""Targets: what the gateway reads of sampled text. How it is cut into pieces changes nothing."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.fuzz.decoders.target import Target, expect, framed, frames, one_frame, text_with
from rollmesh.chat import (
    ParserEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    make_context,
    read_json,
)
from rollmesh.chat.parsing import (
    CHANNELS,
    FORMATS,
    AnswerFormat,
    ReasoningSplitter,
    StopStrings,
    tool_schemas,
)

_MOST_TEXT = 400
_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "integer"},
                        "b": {"type": "string"},
                        "c": {"type": "object"},
                        "d": {"type": ["array", "null"]},
                    },
                },
            },
        }
        for name in ("f", "get_weather")
    ]
).encode()
_CALLS = (
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name":"get_weather","parameters":{"b":"x"}}',
    "f(a=1, b='x', c={'k': [1]})",
    "<parameter=a>1</parameter>",
    "<function=f>",
    "</function>",
    "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "functions.f:0",
    'call:f{a:1,b:<|"|>x<|"|>}',
)
_PARTS = (
    *_CALLS,
    *("\\u00e4", "\\ud83d", '"', "{", "}", "[", "]", ",", ":", "'''", "-1e5", "None", "\n", " "),
)
_CONTEXT = make_context(_TOOLS, b"{}")


def _parser(name: str) -> Target:
    answers = AnswerFormat(name, reasoning=False)

    def parsed(pieces: Iterable[str]) -> list[tuple[str, str, str]]:
        parser = answers.parser(_CONTEXT)
        if parser is None:
            raise AssertionError("no parser")
        events = [event for piece in pieces for event in parser.feed(piece)]
        return _joined([*events, *parser.finish()])

    def read(data: bytes) -> None:
        text = data.decode("utf-8", "replace")[:_MOST_TEXT]
        whole, cut = parsed([text]), parsed(_pieces(text))
        expect(whole == cut, f"whole {whole!r:.300}, in pieces {cut!r:.300}")

    starts = [delimiter for delimiter in answers.delimiters if delimiter]
    seeds = ["".join((*starts[:1], call, *starts[1:2])).encode() for call in _CALLS]
    return Target(f"parser {name}", read, lambda: seeds, text_with((*starts, *_PARTS)))


def _stops(data: bytes) -> None:
    """The text, then the stop strings."""
    text, *stops = [part.decode("utf-8", "replace") for part in frames(data)] or [""]
    stops = [stop[:16] for stop in stops if stop][:4]
    text = text[:_MOST_TEXT]
    for kept in (False, True):
        whole, cut = _stopped([text], stops, kept=kept), _stopped(_pieces(text), stops, kept=kept)
        expect(whole == cut, f"whole {whole!r:.300}, in pieces {cut!r:.300}")
        expect(text.startswith(whole[0]), "other text")


def _stopped(pieces: Iterable[str], stops: Sequence[str], *, kept: bool) -> tuple[str, str]:
    finder = StopStrings(stops, kept=kept)
    found = list[str]()
    for piece in pieces:
        text, is_stopped = finder.feed(piece)
        found.append(text)
        if is_stopped:
            return "".join(found), finder.found
    return "".join((*found, finder.finish())), ""


def _reasoning(data: bytes) -> None:
    text = data.decode("utf-8", "replace")[:_MOST_TEXT]
    for inside in (False, True):
        whole, cut = _split([text], inside=inside), _split(_pieces(text), inside=inside)
        expect(whole == cut, f"whole {whole!r:.300}, in pieces {cut!r:.300}")


def _split(pieces: Iterable[str], *, inside: bool) -> tuple[str, str, str]:
    splitter = ReasoningSplitter(
        inside=inside, tags=AnswerFormat("hermes", reasoning=True).reasoning_tags
    )
    found = [splitter.feed(piece) for piece in pieces]
    found.append(splitter.finish())
    thought, rest = ("".join(part) for part in zip(*found, strict=True))
    return thought, rest, splitter.reasoning


def _tools(data: bytes) -> None:
    """Tools and options, as the gateway reads them: a ValueError is an invalid field there."""
    tools, options = (*frames(data), b"", b"")[:2]
    read_json((tools or b"[]").decode("utf-8", "replace"))
    read_json((options or b"{}").decode("utf-8", "replace"))
    context = make_context(tools, options)
    if context.tools_json:
        tool_schemas(context.tools_json)


def _pieces(text: str) -> Iterator[str]:
    """Yields a text in pieces of sizes that follow from the text."""
    at, state = 0, zlib.crc32(text.encode("utf-8", "surrogatepass")) | 1
    while at < len(text):
        state = state * 1_103_515_245 + 12_345 & 0x7FFFFFFF
        size = (1, 1, 2, 3, 7)[(state >> 16) % 5]
        yield text[at : at + size]
        at += size


def _joined(events: list[ParserEvent]) -> list[tuple[str, str, str]]:
    """Returns events as they read when neighbours of one kind are joined."""
    joined: list[tuple[str, str, str]] = []
    for event in events:
        match event:
            case ToolCallEvent(name=name, arguments=arguments):
                if name or not joined or joined[-1][0] != "call":
                    joined.append(("call", name, arguments))
                else:
                    joined[-1] = ("call", joined[-1][1], joined[-1][2] + arguments)
            case TextEvent(text) | ReasoningEvent(text):
                kind = type(event).__name__
                if joined and joined[-1][0] == kind:
                    joined[-1] = (kind, "", joined[-1][2] + text)
                else:
                    joined.append((kind, "", text))
    return joined


_STOP_PARTS = ("a", "b", "ab", "ba", "aba", "abab", "\n", "\n\n", "###", "x")
_TAGS = ("<think>", "</think>", "<", "/", "think", ">", "\n", "a", "<think>\n", "</think>\n\n")
TARGETS = (
    *(_parser(name) for name in (*FORMATS, *CHANNELS)),
    Target(
        "stop strings",
        _stops,
        lambda: [framed([b"say abab and go", b"abc", b"b a"]), framed([b"x\n\n###", b"\n", b"##"])],
        one_frame(text_with(_STOP_PARTS)),
    ),
    Target(
        "reasoning",
        _reasoning,
        lambda: [b"<think>\nhm\n</think>\n\n4", b"hm</think>4"],
        text_with(_TAGS),
    ),
    Target(
        "tools and options",
        _tools,
        lambda: [framed([_TOOLS, b'{"enable_thinking": true}'])],
        one_frame(text_with(('"type"', '"name"', "null", "{}", "[]", "1e999", "NaN", *_PARTS))),
        errors=(ValueError,),
    ),
)
