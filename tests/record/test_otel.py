"""Stored sessions as spans: written as OTLP's JSON, sent to a receiver, and read by MLflow."""

import asyncio
import base64
import json
import runpy
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.record import send_spans, spans_of, write_spans
from rollmesh.runtime.config import TracesConfig
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.telemetry import genai, tracing
from rollmesh.v1 import session_pb2
from tests.collector.records import record, tree_record, with_messages
from tests.receivers import decoded, grpc_receiver, http_receiver, trace_service_pb2
from tests.record.test_atif import STRANGE, strange, told, user


async def given(*records: session_pb2.SessionRecord) -> AsyncIterator[session_pb2.SessionRecord]:
    for one in records:
        yield one


def test_each_turn_of_a_session_is_one_span_of_its_trace() -> None:
    for one in (record("a"), tree_record("a")):
        one.run_id, one.opened_unix_ms, one.closed_unix_ms = "r", 1_000, 5_000
        root, *turns = spans_of(one)
        place = tracing.place_of_session("a")
        assert (root.place, root.parent_id, root.name) == (place, 0, "invoke_agent")
        assert (root.start_ns, root.end_ns) == (10**9, 5 * 10**9)
        assert root.attributes["rollmesh.reward"] == one.reward
        assert turns
        assert {(turn.place.trace_id, turn.parent_id) for turn in turns} == {place[:2]}
        assert len({turn.place.span_id for turn in turns}) == len(turns)
        assert turns == sorted(turns, key=lambda turn: turn.attributes[genai.NODE_ID])
        assert [turn.start_ns for turn in turns[1:]] == [turn.end_ns for turn in turns[:-1]]
        for turn in turns:
            said = turn.attributes
            assert (said["rollmesh.run.id"], said["rollmesh.sample.index"]) == ("r", 0)
            assert said["gen_ai.usage.output_tokens"] > 0
            assert said["rollmesh.time.estimated"]
            assert not {genai.INPUT_MESSAGES, genai.OUTPUT_MESSAGES} & said.keys()


def test_a_turn_has_the_messages_and_the_tools_of_its_path() -> None:
    one = told(
        record("a"),
        [{"role": "system", "content": "Work."}, user("Hi")],
        [{"role": "assistant", "content": "One."}],
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    one.contexts.add(data=json.dumps({"tools": tools}).encode())
    one.messages[1].context_index = 0
    _, turn = spans_of(one, content=True)
    said = {name: json.loads(turn.attributes[name]) for name in (genai.INPUT_MESSAGES, genai.TOOLS)}
    assert [message["role"] for message in said[genai.INPUT_MESSAGES]] == ["system", "user"]
    assert [tool["name"] for tool in said[genai.TOOLS]] == ["look"]
    (answer,) = json.loads(turn.attributes[genai.OUTPUT_MESSAGES])
    assert answer["parts"] == [{"type": "text", "content": "One."}]
    del one.messages[0]
    _, turn = spans_of(one, content=True)
    assert not {genai.INPUT_MESSAGES, genai.OUTPUT_MESSAGES} & turn.attributes.keys()


def test_a_turn_has_the_policies_of_its_own_tokens() -> None:
    one = record("a")
    path = one.trajectories[0]
    del path.version_spans[:]
    for at in range(6):
        path.version_spans.add(start=at, end=at + 1, policy_version=at, engine_id=f"e{at}")
    path.segments[1].end = 4
    path.segments.add(start=4, end=6, node_id=3, sampled=True)
    _, first, second = spans_of(one)
    assert first.attributes["rollmesh.policy.versions"] == [2, 3]
    assert second.attributes["rollmesh.policy.versions"] == [4, 5]


def test_spans_of_turns_have_the_times_of_the_record() -> None:
    one = record("a")
    one.opened_unix_ms, one.closed_unix_ms = 1_000, 5_000
    turn = one.trajectories[0].segments[1]
    turn.begun_unix_ms, turn.ended_unix_ms = 2_000, 2_500
    _, span = spans_of(one)
    assert (span.start_ns, span.end_ns) == (2 * 10**9, 25 * 10**8)
    assert span.attributes["rollmesh.time.estimated"] is None


async def test_lines_are_the_spans_that_a_receiver_gets(tmp_path: Path) -> None:
    records = with_messages(record("a")), tree_record("b"), strange()
    path = tmp_path / "spans.jsonl"
    count = await write_spans(given(*records), path, content=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3
    with http_receiver() as receiver:
        config = TracesConfig(traces_endpoint=receiver.url, traces_content=True)
        assert await send_spans(given(*records), config) == count
    async with grpc_receiver() as by_grpc:
        config = TracesConfig(
            traces_endpoint=by_grpc.url, traces_protocol="grpc", traces_content=True
        )
        sent = asyncio.to_thread(asyncio.run, send_spans(given(*records), config))
        assert await sent == count
    assert by_grpc.spans == receiver.spans
    assert [span for line in lines for span in decoded(parsed(line))] == receiver.spans
    (turn,) = [
        one
        for one in receiver.spans
        if one.name.startswith("chat") and "gen_ai.input.messages" in one.attributes
    ][:1]
    (answer,) = json.loads(turn.attributes["gen_ai.output.messages"])
    assert answer["role"] == "assistant"
    assert answer["finish_reason"] == turn.attributes["gen_ai.response.finish_reasons"][0]


def test_calls_that_no_json_has_are_text() -> None:
    _, turn = spans_of(strange(), content=True)
    (answer,) = json.loads(turn.attributes[genai.OUTPUT_MESSAGES])
    assert [one["arguments"] for one in answer["parts"]] == [*STRANGE[:-1], {"at": "\0é"}]


def parsed(line: dict[str, Any]) -> Any:
    """A message of OTLP, of JSON whose ids are hexadecimal."""
    from google.protobuf.json_format import ParseDict

    for resource in line["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return ParseDict(line, trace_service_pb2.ExportTraceServiceRequest())


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record").mkdir()
    to = str(tmp_path / "missing" / "spans.jsonl")
    argv = ["export", "--format", "otel", "--record", str(tmp_path / "record"), "--to", to]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_module("rollmesh.record.export", run_name="__main__")
    assert f"to: {to}: " in capsys.readouterr().err


async def test_a_receiver_that_refuses_ends_the_export_with_its_session() -> None:
    with http_receiver() as receiver:
        config = TracesConfig(traces_endpoint=f"{receiver.url}/elsewhere")
        with pytest.raises(RemoteError, match="did not take session a"):
            await send_spans(given(record("a")), config)
