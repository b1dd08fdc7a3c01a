"""Generations survive their engines: wherever one is cut, the answer is the undisturbed one."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.chat import Tokenizer
from rollmesh.client import Subscription, Trajectory, reason_names
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import read_stream, typed_errors
from rollmesh.v1 import gateway_pb2, sampling_pb2
from tests.gateway.live import Cut, LiveMesh
from tests.meshes import write_script
from tests.messages import chat_in, close_of, said
from tests.waiting import until

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
RULES = [
    ("plain", "Ten naïve words ✓ and then some more of them."),
    ("call", f"Let me see. {CALL}"),
]
TOOLS = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
HOW = ("dies", "ends", "aborts")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, tokenizer: Tokenizer
) -> AsyncIterator[LiveMesh]:
    folder = tmp_path_factory.mktemp("live")
    write_script(folder / "script.json", tokenizer, RULES)
    async with LiveMesh(folder, tokenizer_dir, script=folder / "script.json") as mesh:
        yield mesh


@dataclass
class Seen:
    """What an agent gets of one turn."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: int = 0
    spans: tuple[sampling_pb2.VersionSpan, ...] = field(default=(), compare=False)


async def ask(
    mesh: LiveMesh, text: str, cuts: Sequence[Cut] = (), *, stream: bool, **fields: Any
) -> tuple[Seen, Trajectory]:
    """One turn in a session of its own whose engines fail at the cuts, one after the other."""
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    request = chat_in(
        opened,
        said(text),
        returns=gateway_pb2.ReturnOptions(token_ids=True, logprobs=True),
        **fields,
    )
    mesh.cuts[:] = cuts
    try:
        seen = await (streamed(mesh, request) if stream else whole(mesh, request))
        tree = mesh.gateway.session(opened.session_id).tree
        (seen.spans,) = [one.sample.spans for one in tree.nodes.values() if one.sample]
    finally:
        mesh.cuts.clear()
        await mesh.stub.CloseSession(close_of(opened))
    async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
        delivery = await anext(deliveries)
        await deliveries.acknowledge(delivery)
    (result,) = delivery.sessions
    assert result.session_id == opened.session_id
    (trajectory,) = result.trajectories
    return seen, trajectory


async def whole(mesh: LiveMesh, request: gateway_pb2.ChatRequest) -> Seen:
    with typed_errors():
        (answer,) = (await mesh.stub.Chat(request, timeout=60)).answers
    seen = Seen(finish=answer.finish_reason)
    for part in answer.message.content:
        seen.text += part.text
    seen.calls = [(one.name, one.arguments_json) for one in answer.message.tool_calls]
    take_tokens(seen, answer.tokens)
    return seen


async def streamed(mesh: LiveMesh, request: gateway_pb2.ChatRequest) -> Seen:
    seen = Seen()
    call = mesh.stub.StreamChat(gateway_pb2.StreamChatRequest(chat=request), timeout=60)
    async for response in read_stream(call):
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                seen.text += delta.content
                for one in delta.tool_calls:
                    while len(seen.calls) <= one.index:
                        seen.calls.append(("", ""))
                    name, arguments = seen.calls[one.index]
                    seen.calls[one.index] = name + one.name, arguments + one.arguments_json
                take_tokens(seen, delta.tokens)
            case "done":
                seen.finish = response.done.finish_reason
            case _:
                pass
    return seen


def take_tokens(seen: Seen, tokens: gateway_pb2.SampledTokens) -> None:
    seen.token_ids += np.frombuffer(tokens.token_ids_u32le, "<u4").tolist()
    seen.logprobs += np.frombuffer(tokens.logprobs_f32le, "<f4").tolist()


def same_tokens(one: Trajectory, other: Trajectory) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("token_ids", "logprobs", "loss_mask")
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        pytest.param("plain", {}, id="text"),
        pytest.param("plain", {"stop": ["some more"]}, id="a stop string"),
        pytest.param(
            "plain", {"sampling": sampling_pb2.SamplingParams(max_tokens=7)}, id="a length"
        ),
        pytest.param("call", {"tools_json": TOOLS}, id="a tool call"),
    ],
)
async def test_an_answer_is_the_same_wherever_its_engine_is_lost(
    mesh: LiveMesh, text: str, fields: dict[str, Any], *, stream: bool
) -> None:
    seen, trajectory = await ask(mesh, text, stream=stream, **fields)
    assert trajectory.reasons in (("EXACT",), ("STOP_STRING",), ("LENGTH_CUT",))
    sampled = len(seen.token_ids)
    assert sampled > 5
    for at, how in zip(range(sampled + 1), itertools.cycle(HOW), strict=False):
        again, other = await ask(mesh, text, [Cut(at, how)], stream=stream, **fields)
        assert again == seen
        assert same_tokens(trajectory, other)
        assert set(trajectory.reasons) <= {*other.reasons, "EXACT"}
        check_spans(again, other)


async def test_many_engines_may_be_lost_in_one_turn(mesh: LiveMesh) -> None:
    seen, trajectory = await ask(mesh, "plain", stream=True)
    cuts = [Cut(at, how) for at, how in zip(range(2, 40, 2), itertools.cycle(HOW), strict=False)]
    again, other = await ask(mesh, "plain", cuts, stream=True)
    assert again == seen
    assert same_tokens(trajectory, other)
    assert other.reasons == ("MIGRATED",)
    assert len(again.spans) > 5
    assert not mesh.cuts
    check_spans(again, other)


def check_spans(seen: Seen, trajectory: Trajectory) -> None:
    """Every sampled token has an engine, and a migration is said."""
    covered = [at for span in seen.spans for at in range(span.start, span.end)]
    assert covered == list(range(int(trajectory.loss_mask.sum())))
    assert all(span.engine_id for span in seen.spans)
    assert (len(seen.spans) > 1) <= ("MIGRATED" in trajectory.reasons)


SEEDED = sampling_pb2.SamplingParams(seed=3)


async def test_what_cannot_be_continued_begins_anew_while_nothing_was_sent(mesh: LiveMesh) -> None:
    seen, trajectory = await ask(mesh, "plain", sampling=SEEDED, stream=False)
    for how in HOW:
        again, other = await ask(mesh, "plain", [Cut(5, how)], sampling=SEEDED, stream=False)
        assert again == seen
        assert same_tokens(trajectory, other)
        assert other.reasons == ("RESTARTED",)


async def test_a_generation_keeps_that_it_was_restarted_when_it_is_continued_later(
    mesh: LiveMesh,
) -> None:
    cuts = [Cut(5, "dies"), Cut(0, "dies"), Cut(3, "aborts")]
    _, trajectory = await ask(mesh, "plain", cuts, sampling=SEEDED, stream=False)
    assert trajectory.reasons == ("RESTARTED",)


async def seeded_request(mesh: LiveMesh) -> gateway_pb2.ChatRequest:
    """A request in a session of its own that another engine cannot continue."""
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    return chat_in(
        opened,
        said("plain"),
        sampling=SEEDED,
    )


async def reasons_of(mesh: LiveMesh, request: gateway_pb2.ChatRequest) -> tuple[str, ...]:
    with typed_errors():
        (answer,) = (await mesh.stub.Chat(request, timeout=60)).answers
    return reason_names(answer.reasons)


async def disconnect_after_a_token(mesh: LiveMesh, request: gateway_pb2.ChatRequest) -> None:
    call = mesh.stub.StreamChat(gateway_pb2.StreamChatRequest(chat=request), timeout=60)
    async for response in read_stream(call):
        if response.WhichOneof("event") == "delta":
            break
    call.cancel()
    await until(lambda: not mesh.gateway.session(request.session_id).in_flight)


@pytest.mark.parametrize("how", HOW)
async def test_the_turn_that_repeats_a_failed_request_says_that_tokens_were_discarded(
    mesh: LiveMesh, how: str
) -> None:
    request = await seeded_request(mesh)
    mesh.cuts[:] = [Cut(5, how)]
    with pytest.raises(RollmeshError, match="nothing was committed"):
        await streamed(mesh, request)
    assert await reasons_of(mesh, request) == ("RESTARTED",)
    assert await reasons_of(mesh, request) == ()  # another sample of the prompt


async def test_each_of_two_equal_requests_that_fail_marks_one_retry(mesh: LiveMesh) -> None:
    request = await seeded_request(mesh)
    mesh.cuts[:] = [Cut(5, "dies"), Cut(5, "ends")]
    lost = await asyncio.gather(
        streamed(mesh, request), streamed(mesh, request), return_exceptions=True
    )
    assert [getattr(one, "reason", "") for one in lost] == ["ENGINE_LOST"] * 2
    seen = [await reasons_of(mesh, request) for _ in range(3)]
    assert seen == [("RESTARTED",), ("RESTARTED",), ()]


async def test_an_equal_request_that_was_running_takes_no_mark(mesh: LiveMesh) -> None:
    request, beside = await seeded_request(mesh), Cut(0, "waits")
    before = len(mesh.generations)
    mesh.cuts[:] = [beside]
    running = asyncio.ensure_future(reasons_of(mesh, request))
    await until(lambda: len(mesh.generations) > before)
    mesh.cuts[:] = [Cut(5, "dies")]
    with pytest.raises(RollmeshError):
        await streamed(mesh, request)
    beside.gate.set()
    assert await running == ()
    assert await reasons_of(mesh, request) == ("RESTARTED",)


async def test_a_turn_whose_client_leaves_after_a_token_marks_its_retry(mesh: LiveMesh) -> None:
    request = await seeded_request(mesh)
    mesh.cuts[:] = [Cut(1, "waits")]
    await disconnect_after_a_token(mesh, request)
    assert await reasons_of(mesh, request) == ("RESTARTED",)


async def test_a_retry_that_fails_before_its_first_token_keeps_the_mark(mesh: LiveMesh) -> None:
    request = await seeded_request(mesh)
    mesh.cuts[:] = [Cut(5, "dies")]
    with pytest.raises(RollmeshError):
        await streamed(mesh, request)
    before = len(mesh.generations)
    mesh.cuts[:] = [Cut(0, "waits")]
    retry = asyncio.ensure_future(reasons_of(mesh, request))
    await until(lambda: len(mesh.generations) > before)
    retry.cancel()
    await until(lambda: not mesh.gateway.session(request.session_id).in_flight)
    assert await reasons_of(mesh, request) == ("RESTARTED",)
    assert await reasons_of(mesh, request) == ()


async def test_a_turn_that_takes_too_long_marks_its_retry(mesh: LiveMesh) -> None:
    await mesh.start_gateway(turn_timeout_ms=2000)
    request = await seeded_request(mesh)
    mesh.cuts[:] = [Cut(1, "waits")]
    with pytest.raises(RollmeshError) as caught:
        await streamed(mesh, request)
    assert caught.value.reason == "DEADLINE"

    async def answered() -> list[tuple[str, ...]]:
        try:
            return [await reasons_of(mesh, request)]
        except RollmeshError:  # a busy machine, and the mark stays
            return []

    assert await until(answered) == [("RESTARTED",)]
    await mesh.start_gateway()
