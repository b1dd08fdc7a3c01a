"""Stored sessions as spans of OpenTelemetry, with the names of live traces.

A session is one trace: `invoke_agent`, and a `chat` for each turn. Its ids follow from those of the
session and its nodes, so that a repeated export is no second trace, and the turns join the live
trace of the session's end. Turns of gateways before API revision 41 have no times: they share the
session's time evenly.
"""

import json
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollmesh.record.tables import leaves_of
from rollmesh.runtime.codec.conversations import conversation_of
from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.telemetry import genai, tracing
from rollmesh.runtime.telemetry.tracing import Place, Span
from rollmesh.v1 import session_pb2, trajectory_pb2

_IDS = ("traceId", "spanId", "parentSpanId")


def spans_of(record: session_pb2.SessionRecord, *, content: bool = False) -> list[Span]:
    """Returns the spans of a session, its root first. An abandoned seat has none.

    Args:
        record: The session.
        content: Whether spans have the messages, where the session recorded them.
    """
    if record.abandoned:
        return []
    turns = dict(sorted(_turns(record)))
    place = tracing.place_of_session(record.session_id)
    begin_ns, end_ns = record.opened_unix_ms * 1_000_000, record.closed_unix_ms * 1_000_000
    attributes = {
        **genai.operation(genai.INVOKE_AGENT, record.session_id, record.model),
        **_of_session(record),
        **genai.ended(
            record.outcome, record.reward if record.HasField("reward") else None, record.turns
        ),
    }
    spans = [Span(genai.INVOKE_AGENT, "internal", place, 0, begin_ns, attributes, end_ns)]
    step_ns = max(end_ns - begin_ns, 0) // max(len(turns), 1)
    for at, (node_id, (trajectory, turn)) in enumerate(turns.items()):
        digest = sha256(f"{record.session_id}/{node_id}".encode()).digest()
        own = Place(place.trace_id, int.from_bytes(digest[:8], "big") or 1, sampled=True)
        at_ns = begin_ns + at * step_ns
        times = at_ns, at_ns + step_ns
        if turn.ended_unix_ms:
            times = turn.begun_unix_ms * 1_000_000, turn.ended_unix_ms * 1_000_000
        name = f"{genai.CHAT} {record.model}".rstrip()
        found = _turn(record, trajectory, turn, content=content)
        spans.append(Span(name, "client", own, place.span_id, times[0], found, times[1]))
    return spans


_Turn = tuple[trajectory_pb2.Trajectory, trajectory_pb2.TrajectorySegment]


def _turns(record: session_pb2.SessionRecord) -> Iterator[tuple[int, _Turn]]:
    """Yields each sampled node with the first trajectory that trains it, or the first of all."""
    found: dict[int, _Turn] = {}
    for trajectory in leaves_of(record):
        for one in trajectory.segments:
            if one.sampled and (one.node_id not in found or one.trained):
                found[one.node_id] = trajectory, one
    yield from found.items()


def _of_session(record: session_pb2.SessionRecord) -> dict[str, Any]:
    return genai.session(record.run_id, record.group_id, record.sample_index, record.purpose)


def _turn(
    record: session_pb2.SessionRecord,
    trajectory: trajectory_pb2.Trajectory,
    turn: trajectory_pb2.TrajectorySegment,
    *,
    content: bool,
) -> dict[str, Any]:
    said = conversation_of(record, turn.node_id)
    calls = bool(said is not None and said.messages and said.messages[-1].get("tool_calls"))
    finish = genai.finish_reason(turn.finish_reason, calls=calls)
    has_tokens = turn.end > turn.start
    found = {
        **genai.operation(genai.CHAT, record.session_id, record.model),
        **_of_session(record),
        **genai.request(turn.sampling),
        **genai.response(
            record.session_id,
            turn.node_id,
            record.model,
            finish,
            prompt_tokens=turn.start if has_tokens else None,
            sampled_tokens=turn.end - turn.start if has_tokens else None,
        ),
        **genai.policy(
            [
                one
                for one in trajectory.version_spans
                if one.start < turn.end and turn.start < one.end
            ]
        ),
        **genai.training(turn.reasons, trajectory.lineage, turn.model_request_ids),
        genai.REWARD: turn.reward if turn.HasField("reward") else None,
        genai.TIME_ESTIMATED: None if turn.ended_unix_ms else True,
    }
    if content and said is not None:
        prompt, answer = said.messages[:-1], said.messages[-1]
        found |= genai.content(reversed(prompt), len(prompt), answer, finish, said.tools)
    return found


# Writing and sending.


async def write_spans(
    sessions: AsyncIterator[session_pb2.SessionRecord], to: Path, *, content: bool
) -> int:
    """Writes OTLP as JSON lines, one for each session. Returns the number of spans.

    Raises:
        ConfigError: The packages of OpenTelemetry are missing.
        OSError: The file cannot be written.
    """
    encode, count = _encoder(), 0
    with to.open("w", encoding="utf-8") as file:
        async for session in sessions:
            spans = spans_of(session, content=content)
            count += len(spans)
            if spans:
                file.write(json.dumps(as_json([encode(one) for one in spans])) + "\n")
    return count


async def send_spans(
    sessions: AsyncIterator[session_pb2.SessionRecord], config: TracesConfig
) -> int:
    """Sends the spans of each session to a receiver. Returns their number.

    Raises:
        ConfigError: A setting is wrong, or the packages of OpenTelemetry are missing.
        RemoteError: The receiver did not take the spans of a session.
    """
    exporter, encode, count = tracing.Exporter(config), _encoder(), 0
    try:
        async for session in sessions:
            spans = spans_of(session, content=config.traces_content)
            if spans and not exporter.export([encode(one) for one in spans]):
                raise RemoteError(
                    f"{config.traces_endpoint} did not take session {session.session_id}; see the "
                    "log above, and export again: spans are not doubled",
                    "UNAVAILABLE",
                )
            count += len(spans)
    finally:
        exporter.shutdown()
    return count


def as_json(spans: list[Any]) -> dict[str, Any]:
    """Returns spans of the SDK as OTLP's JSON, whose ids are hexadecimal."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    found: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                span |= {name: b64decode(span[name]).hex() for name in _IDS if name in span}
    return found


def _encoder() -> tracing.Encoder:
    try:
        return tracing.Encoder("record")
    except ImportError as error:
        raise ConfigError(
            f"format: otel needs the OpenTelemetry packages ({error.name} is missing): "
            "pip install 'rollmesh[traces]'"
        ) from error
