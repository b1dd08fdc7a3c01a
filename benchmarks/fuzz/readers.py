"""What reads a stranger's bytes, fed in this process: thousands of inputs a second.

A reader may refuse an input by a typed error, and nothing else. Parsers of answers are also fed
the same text in other pieces, and must find the same.
"""

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.fuzz import values
from benchmarks.fuzz.bodies import SEEDS, Bodies
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.messages import Messages
from rollmesh.chat.canonical import make_context
from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent
from rollmesh.chat.parsing.formats import CHANNELS, FORMATS, AnswerFormat
from rollmesh.client.sessions.trajectories import SessionResult
from rollmesh.engine.backend import ModelLimits
from rollmesh.engine.requests.generate import read_generate
from rollmesh.runtime.codec.enums import check_enums
from rollmesh.runtime.codec.session_records import check_session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.anthropic_messages.protocol import CountTokens, Messages as AnthropicMessages
from rollmesh.sidecar.openai_chat.protocol import ChatCompletions
from rollmesh.sidecar.openai_responses.protocol import Responses
from rollmesh.sidecar.turns.heads import Head
from rollmesh.sidecar.turns.protocol import Protocol
from rollmesh.v1 import engine_pb2, session_pb2, trajectory_pb2
from tests.collector.records import record

_SLOW_S = 5.0
_MOST_TEXT = 400
_HEAD = Head("r", "s", "k", {}, trajectory_pb2.LINEAGE_UNSPECIFIED)
_PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/messages": AnthropicMessages(),
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/responses": Responses(),
}
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
_PARTS = (
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name":"get_weather","parameters":{"b":"x"}}',
    "f(a=1, b='x', c={'k': [1]})",
    "<parameter=a>1</parameter>",
    "<function=f>",
    "</function>",
    "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "functions.f:0",
    'call:f{a:1,b:<|"|>x<|"|>}',
    "\\u00e4",
    "\\ud83d",
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "'''",
    "-1e5",
    "None",
    "\n",
    " ",
)
_LIMITS = ModelLimits(vocabulary_tokens=400, max_context_tokens=4096)


class Readers:
    """Feeds readers, one input after the other."""

    def __init__(self, seed: int, findings: Findings) -> None:
        """Takes the seed of all choices, and where findings go."""
        self._rng = random.Random(f"{seed} readers")
        self._bodies = Bodies(self._rng, ["policy", "resp_s-2", "rmk-s-k"])
        self._messages = Messages(self._rng, ["fuzz", "g"], frozenset())
        self._findings = findings
        self._context = make_context(_TOOLS, b"{}")
        self._names = (*FORMATS, *CHANNELS)

    def once(self) -> None:
        """Feeds one reader with one input."""
        self._rng.choice((self._body, self._answer, self._record, self._generation))()

    def _feed(self, where: str, data: bytes, read: Callable[[], object]) -> None:
        self._findings.sent()
        began = time.process_time()
        try:
            read()
        except RollmeshError:
            pass
        except Exception as error:  # noqa: BLE001 - any other error is a finding
            self._findings.found("untyped_errors", where, f"{type(error).__name__}: {error}", data)
        if time.process_time() - began > _SLOW_S:
            self._findings.found("hangs", where, "takes seconds", data)

    def _body(self) -> None:
        route = self._rng.choice([one for one in SEEDS if one in _PROTOCOLS])
        self.read(route, self._bodies.made(route))

    def read(self, route: str, data: bytes) -> None:
        """Feeds the protocol of a route with a body."""
        self._feed(route, data, lambda: _HEAD.mark(_PROTOCOLS[route].read(data, _HEAD).chat))

    def _answer(self) -> None:
        rng, name = self._rng, self._rng.choice(self._names)
        answers = AnswerFormat(name, reasoning=rng.random() < 0.3)
        parts = (*answers.delimiters, *_PARTS)
        text = "".join(
            rng.choice(parts) if rng.random() < 0.9 else values.changed_text(rng, rng.choice(parts))
            for _ in range(rng.randrange(1, 14))
        )[:_MOST_TEXT]

        def read() -> None:
            whole = _joined(self._parsed(answers, [text]))
            cut = _joined(self._parsed(answers, _pieces(rng, text)))
            if whole != cut:
                raise AssertionError(f"whole {whole!r:.300}, in pieces {cut!r:.300}")

        self._feed(f"parser {name}", text.encode("utf-8", "surrogatepass"), read)

    def _parsed(self, answers: AnswerFormat, pieces: list[str]) -> list[ParserEvent]:
        parser = answers.parser(self._context)
        if parser is None:
            raise AssertionError("no parser")
        events = [event for piece in pieces for event in parser.feed(piece)]
        return [*events, *parser.finish()]

    def _record(self) -> None:
        seed = record("fuzz", self._rng.choice(("", "g")))
        message = self._messages.changed(seed)
        data = message.SerializeToString()
        if self._rng.random() < 0.2:
            data = values.changed_bytes(self._rng, data, data)

        def read() -> None:
            try:
                found = session_pb2.SessionRecord.FromString(data)
            except Exception:  # noqa: BLE001 - protobuf's own; the interceptor refuses it
                return
            check_enums(found)
            check_session(found, "sessions[0]")
            SessionResult.from_proto(found)  # a trainer reads what was stored

        self._feed("SessionRecord", data, read)

    def _generation(self) -> None:
        generate = engine_pb2.GenerateRequest(request_id="r", token_ids_u32le=b"\5\0\0\0\6\0\0\0")
        seed = engine_pb2.StreamGenerateRequest(generate=generate, max_chunk_tokens=4)
        message: Any = self._messages.changed(seed)

        def read() -> None:
            check_enums(message)
            read_generate(message, _LIMITS)

        self._feed("StreamGenerateRequest", message.SerializeToString(), read)


def _pieces(rng: random.Random, text: str) -> list[str]:
    pieces, at = list[str](), 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 7))
        pieces.append(text[at : at + size])
        at += size
    return pieces


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
