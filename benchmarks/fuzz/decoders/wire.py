"""Targets: messages of gRPC, where a servicer decides by the message alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from benchmarks.fuzz.decoders.target import (
    Change,
    Target,
    expect,
    framed,
    frames,
    message_of,
    one_frame,
    text_with,
)
from rollmesh.client import SessionResult
from rollmesh.collector import created
from rollmesh.engine import ModelLimits, read_generate, read_init
from rollmesh.gateway import Session, SessionSpec, Tree, read_choices
from rollmesh.mesh import AnswerCheck, Offered
from rollmesh.runtime.codec import check_enums, check_session, pack_ids, pack_logprobs
from rollmesh.runtime.rpc import check_address, target_of
from rollmesh.v1 import (
    chat_pb2,
    collector_pb2,
    engine_pb2,
    gateway_pb2,
    sampling_pb2,
    session_pb2,
)
from tests.collector.records import record, tree

_Message = TypeVar("_Message", bound=Message)
_LIMITS = ModelLimits(vocabulary_tokens=400, max_context_tokens=4096)


def _message(
    kind: type[_Message], read: Callable[[_Message], object], *seeds: _Message, name: str = ""
) -> Target:
    def run(data: bytes) -> None:
        try:
            message: Any = kind.FromString(data)
        except DecodeError:  # the interceptor refuses it
            return
        check_enums(message)
        read(message)

    made = [seed.SerializeToString() for seed in seeds]
    return Target(name or kind.DESCRIPTOR.name, run, lambda: made, message_of(kind))


def _record(message: session_pb2.SessionRecord) -> None:
    check_session(message, "sessions[0]")
    SessionResult.from_proto(message)  # a trainer reads what was stored


def _branching() -> session_pb2.SessionRecord:
    found = record("fuzz", "g")
    found.ClearField("trajectories")
    found.tree.CopyFrom(tree())
    return found


def _chat(message: gateway_pb2.ChatRequest) -> None:
    session = Session(SessionSpec("s", 0), Tree(frozenset([2])))
    read_choices(message, session, 4, stream=False)
    session.reader.read(message)  # again, as the beginning of the next request


def _chat_seed() -> gateway_pb2.ChatRequest:
    call = chat_pb2.ToolCall(id="c", name="f", arguments_json="{}")
    return gateway_pb2.ChatRequest(
        session_id="s",
        session_key="k",
        messages=[
            chat_pb2.ChatMessage(
                role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="go on")]
            ),
            chat_pb2.ChatMessage(
                role=chat_pb2.ROLE_ASSISTANT, tool_calls=[call], answer_id="chatcmpl-s-2"
            ),
            chat_pb2.ChatMessage(role=chat_pb2.ROLE_TOOL, tool_call_id="c"),
        ],
        tools_json='[{"type": "function", "function": {"name": "f"}}]',
        tool_choice=gateway_pb2.TOOL_CHOICE_NAMED,
        tool_name="f",
        json_format=gateway_pb2.JsonFormat(schema_json='{"type": "object"}', strict=True),
        sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=0.5),
        stop=["x"],
        bad_words=["y"],
    )


def _generate_seed() -> engine_pb2.StreamedGenerate:
    generate = engine_pb2.GenerateRequest(request_id="r", token_ids_u32le=b"\5\0\0\0\6\0\0\0")
    generate.sampling.max_tokens = 3
    generate.constraint.structural_tag_json = '{"type": "structural_tag", "format": {}}'
    return engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=4)


def _answer(data: bytes) -> None:
    """An engine's answer, message by message."""
    check, taken = AnswerCheck(Offered(0, 3), 2, 7, max_tokens=8, vocabulary_tokens=400), 0
    for part in frames(data):
        try:
            message = engine_pb2.TokenChunk.FromString(part)
        except DecodeError:
            return
        run = check.take(message, Offered(0, 3))
        taken += len(run.token_ids)
        expect(taken <= check.max_tokens, "more ids than were asked for")
        expect(bool(np.isfinite(run.logprobs).all()), "an impossible log-probability")
        expect(
            not len(run.token_ids) or int(run.token_ids.max()) < 400,
            "an id outside of the vocabulary",
        )


def _answer_seed() -> bytes:
    ids = np.array([5, 6, 7], np.uint32)
    first = engine_pb2.TokenChunk(
        token_ids_u32le=pack_ids(ids),
        logprobs_f32le=pack_logprobs(np.zeros(3, np.float32)),
        policy_version=2,
        prompt_crc32=7,
    )
    last = engine_pb2.TokenChunk()
    span = sampling_pb2.VersionSpan(policy_version=2, start=0, end=3)
    last.finish.reason = sampling_pb2.FINISH_REASON_STOP
    last.finish.prompt_tokens, last.finish.prompt_crc32, last.finish.stop_token_id = 2, 7, 7
    last.finish.version_spans.append(span)
    return framed([first.SerializeToString(), last.SerializeToString()])


def _address(data: bytes) -> None:
    address = data.decode("utf-8", "replace")
    check_address(address)
    target = target_of(address)
    expect(target.startswith("dns:///") and "/" not in target[7:], f"{target!r} is dialled")


def _consumer() -> collector_pb2.Consumer:
    consumer = collector_pb2.Consumer(name="c", unit=collector_pb2.DELIVERY_UNIT_GROUP)
    consumer.lease_ms, consumer.groups.deadline_ms, consumer.filter.max_turns = 1000, 5, 2
    return consumer


_ADDRESSES = ("127.0.0.1", "[::1]", ":80", "unix:", "xds:///", "a.b", "/", "%2f", ".", "-", "0x7f")
_CHUNK: Change = message_of(engine_pb2.TokenChunk)
TARGETS = (
    _message(session_pb2.SessionRecord, _record, record("fuzz", "g"), _branching()),
    _message(gateway_pb2.ChatRequest, _chat, _chat_seed()),
    _message(
        engine_pb2.StreamedGenerate, lambda one: read_generate(one, _LIMITS), _generate_seed()
    ),
    _message(
        engine_pb2.ControlEnginesRequest.InitWeightTransfer,
        lambda one: read_init(one, "e", "nccl"),
        engine_pb2.ControlEnginesRequest.InitWeightTransfer(backend="nccl", init_json='{"a": 1}'),
    ),
    _message(collector_pb2.Consumer, created, _consumer()),
    Target("answer of an engine", _answer, lambda: [_answer_seed()], one_frame(_CHUNK)),
    Target("address", _address, lambda: [b"10.0.0.7:7400", b"[::1]:80"], text_with(_ADDRESSES)),
)
