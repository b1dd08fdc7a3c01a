"""Stored sessions as spans of OpenTelemetry, with the names of live traces.

A session is one trace: `invoke_agent`, and a `chat` for each turn. Its ids follow from those of the
session and its nodes, so that a repeated export is no second trace, and the turns join the live
trace of the session's end. Turns of gateways before API revision 41 have no times: they share the
session's time evenly.
"""

import json
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator, Mapping
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh.record.tables import leaves_of, spans_in
from rollmesh.runtime.codec import context_in, messages_in
from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.telemetry import Encoder, Exporter, Place, Span, content_of, genai, tracing
from rollmesh.v1 import session_pb2, trajectory_pb2

_IDS = ("traceId", "spanId", "parentSpanId")
_LAST_MS = 2**63 // 1_000_000 - 1


def spans_of(record: session_pb2.SessionRecord, *, content: bool = False) -> list[Span]:
    """Returns the spans of a session, its root first. An abandoned seat has none."""
    if record.abandoned:
        return []
    # Each sampled node with the first trajectory that trains it, or the first of all.
    found: dict[int, tuple[trajectory_pb2.Trajectory, trajectory_pb2.TrajectorySegment]] = {}
    for trajectory in leaves_of(record):
        for one in trajectory.segments:
            if one.sampled and (one.node_id not in found or one.trained):
                found[one.node_id] = trajectory, one
    turns, said = dict(sorted(found.items(), key=itemgetter(0))), _said(record)
    place = tracing.place_of_session(record.session_id)
    begin_ns, end_ns = _ns(record.opened_unix_ms), _ns(record.closed_unix_ms)
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
            times = _ns(turn.begun_unix_ms), _ns(turn.ended_unix_ms)
        name = f"{genai.CHAT} {record.model}".rstrip()
        facts = _turn(record, trajectory, turn, said, content=content)
        spans.append(Span(name, "client", own, place.span_id, times[0], facts, times[1]))
    return spans


def _ns(unix_ms: int) -> int:
    """Returns a time as OTLP has it. Clients may send any number."""
    return min(max(unix_ms, 0), _LAST_MS) * 1_000_000


class _Said(NamedTuple):
    """The messages of a node."""

    parent_id: int
    messages: list[dict[str, Any]]
    so_far: int
    """Number of messages up to the last of the node."""
    tools: list[dict[str, Any]]


def _said(record: session_pb2.SessionRecord) -> dict[int, _Said]:
    """Returns the messages of each node whose whole path has them."""
    contexts = [context_in(record, at).get("tools", []) for at in range(len(record.contexts))]
    found = {0: _Said(0, [], 0, [])}
    for one in record.messages:  # parents first
        if (before := found.get(one.parent_node_id)) is not None and one.data:
            messages = messages_in(one)
            tools = contexts[one.context_index] if one.HasField("context_index") else []
            so_far = before.so_far + len(messages)
            found[one.node_id] = _Said(one.parent_node_id, messages, so_far, tools)
    del found[0]
    return found


def _newest(said: Mapping[int, _Said], node_id: int) -> Iterator[dict[str, Any]]:
    """Yields the messages of a path, the newest first. None if some were not recorded."""
    while node_id in said:
        yield from reversed(said[node_id].messages)
        node_id = said[node_id].parent_id


def _of_session(record: session_pb2.SessionRecord) -> dict[str, Any]:
    return genai.session(record.run_id, record.group_id, record.sample_index, record.purpose)


def _turn(
    record: session_pb2.SessionRecord,
    trajectory: trajectory_pb2.Trajectory,
    turn: trajectory_pb2.TrajectorySegment,
    said: Mapping[int, _Said],
    *,
    content: bool,
) -> dict[str, Any]:
    newest = _newest(said, turn.node_id)
    answer = next(newest, None)
    calls = bool(answer is not None and answer.get("tool_calls"))
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
        **genai.policy(spans_in(trajectory, turn)),
        **genai.training(turn.reasons, trajectory.lineage, turn.model_request_ids),
        genai.REWARD: turn.reward if turn.HasField("reward") else None,
        genai.TIME_ESTIMATED: None if turn.ended_unix_ms else True,
    }
    if content and answer is not None:
        own = said[turn.node_id]
        found |= content_of(newest, own.so_far - 1, answer, finish, own.tools)
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
    exporter, encode, count = Exporter(config), _encoder(), 0
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


def _encoder() -> Encoder:
    try:
        return Encoder("record")
    except ImportError as error:
        raise ConfigError(
            f"format: otel needs the OpenTelemetry packages ({error.name} is missing): "
            "pip install 'rollmesh[traces]'"
        ) from error
