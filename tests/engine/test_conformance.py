"""The same promises for both backends, through real gRPC and a real engine process."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from rollmesh.runtime.errors import (
    InvalidConstraintError,
    InvalidFieldError,
    InvalidWeightsError,
    ModelMismatchError,
    RequestIdInUseError,
    StaleVersionError,
)
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.engine.engines import KEEP, PROMPT, Engine, Result
from tests.processes import running

LONG = 1900  # tokens enough that what happens meanwhile happens in the middle, on any machine
BACKENDS = [pytest.param("scripted"), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scripted_engine(
    tmp_path_factory: pytest.TempPathFactory, other_model_dir: Path
) -> AsyncIterator[Engine]:
    flags: dict[str, object] = {"vocabulary_tokens": 365, "max_context_tokens": 2048}
    flags |= {"reply_tokens": 2000, "tokens_per_second": 1000}
    folder = tmp_path_factory.mktemp("engine")
    async with (
        running("engine", folder, backend="scripted", **flags) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other_model_dir)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


# The first vLLM test waits for the model to start.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_whole_and_streamed_answers_are_the_same(engine: Engine) -> None:
    greedy = {"temperature": 0.0}
    whole = await engine.generate(engine.request(24, 0, sampling=greedy))
    streamed = await engine.generate(engine.request(24, 4, sampling=greedy))
    assert (whole.messages, len(whole.ids)) == (1, 24)
    assert streamed.messages >= 6
    assert streamed.ids == whole.ids  # nothing repeated, nothing missing
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    for result in (whole, streamed):
        assert len(result.logprobs) == 24
        assert result.finish.reason == sampling_pb2.FINISH_REASON_LENGTH
        assert result.spans[0][1] == 0
        assert result.spans[-1][2] == 24
        assert result.finish.prompt_tokens == len(PROMPT)
        assert result.finish.prompt_crc32 == zlib.crc32(PROMPT.tobytes())


@pytest.mark.parametrize("chunk", [0, 5], ids=["whole", "streamed"])
async def test_the_most_likely_ids_come_with_each_sampled_one(engine: Engine, chunk: int) -> None:
    greedy = {"temperature": 0.0}
    request = engine.request(24, chunk, sampling=greedy, top_logprobs=3)
    result = await engine.generate(request)
    assert len(result.top_ids) == len(result.ids) == 24
    assert [row[0] for row in result.top_ids] == result.ids
    assert [row[0] for row in result.top_logprobs] == pytest.approx(result.logprobs, abs=1e-4)
    for ids, logprobs in zip(result.top_ids, result.top_logprobs, strict=True):
        assert len(set(ids)) == 3
        assert logprobs == sorted(logprobs, reverse=True)
    plain = await engine.generate(engine.request(24, chunk, sampling=greedy))
    assert (plain.top_ids, plain.ids) == ([], result.ids)


async def test_what_is_masked_is_not_sampled_and_log_probs_stay_the_models(engine: Engine) -> None:
    if (await engine.info()).backend == "scripted":
        pytest.skip("a script is to keep the masks itself")
    greedy = {"temperature": 0.0}
    plain = await engine.generate(engine.request(12, 0, sampling=greedy, top_logprobs=20))
    # The second most likely one, by three ways to take the most likely out.
    second = plain.top_ids[0][1]
    for masks in (
        {"allowed_token_ids": [second]},
        {"logit_bias": {second: 100.0}},
        {"bad_sequences": [sampling_pb2.TokenSequence(token_ids=plain.ids[:1])]},
    ):
        result = await engine.generate(engine.request(1, 0, sampling=greedy | masks))
        assert result.ids == [second], masks
        assert result.logprobs == pytest.approx([plain.top_logprobs[0][1]], abs=1e-4), masks
    result = await engine.generate(
        engine.request(1, 0, sampling=greedy, banned_token_ids=plain.ids[:1])
    )
    assert result.ids == [second]
    assert result.logprobs == pytest.approx([plain.top_logprobs[0][1]], abs=1e-4)
    # The last id of a longer sequence is masked only after the others.
    long = sampling_pb2.TokenSequence(token_ids=plain.ids[:3])
    sampling = greedy | {"bad_sequences": [long]}
    result = await engine.generate(engine.request(3, 0, sampling=sampling))
    assert result.ids[:2] == plain.ids[:2]
    assert result.ids[2] == plain.top_ids[2][1]


async def test_ids_that_are_no_text_are_not_sampled_under_a_constraint_either(
    engine: Engine,
) -> None:
    if (await engine.info()).backend == "scripted":
        pytest.skip("a script is to keep the masks itself")
    form = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = json.dumps({"type": "structural_tag", "format": form})
    constraint = engine_pb2.Constraint(structural_tag_json=tag)

    async def sampled(*banned: int) -> list[int]:
        greedy = {"temperature": 0.0}
        request = engine.request(
            1, 0, sampling=greedy, constraint=constraint, banned_token_ids=banned
        )
        request.generate.sampling.ignore_eos = False
        return (await engine.generate(request)).ids

    (first,) = await sampled()
    assert await sampled(first) != [first]


async def test_a_stop_token_ends_the_answer_and_is_named(engine: Engine) -> None:
    greedy = await engine.generate(engine.request(24, 0, sampling={"temperature": 0.0}))
    stop = greedy.ids[7]
    sampling = {"temperature": 0.0, "stop_token_ids": [stop]}
    result = await engine.generate(engine.request(24, 0, sampling=sampling))
    assert result.ids == greedy.ids[: greedy.ids.index(stop) + 1]
    assert result.finish.reason == sampling_pb2.FINISH_REASON_STOP
    assert result.finish.stop_token_id == stop


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        pytest.param("{", "not JSON", id="no JSON"),
        pytest.param('{"type": "structural_tag"}', "no format", id="no format"),
        pytest.param('{"format": ' * 80 + "{}" + "}" * 80, "nested deeper", id="deep"),
        pytest.param('{"format": {"a": "' + "x" * 131_072 + '"}}', "more than", id="large"),
    ],
)
async def test_a_constraint_that_is_none_is_refused(engine: Engine, tag: str, says: str) -> None:
    request = engine.request(4, 0, constraint=engine_pb2.Constraint(structural_tag_json=tag))
    with pytest.raises(InvalidConstraintError, match=says) as caught:
        await engine.generate(request)
    assert caught.value.field == "constraint.structural_tag_json"


async def test_the_messages_of_a_long_collected_answer_grow_with_it(engine: Engine) -> None:
    asked = engine.request(600, 64)
    asked.min_chunk_tokens = 8
    async with asyncio.timeout(120), aclosing(engine.stream(asked)) as responses:
        sizes = [len(response.token_ids_u32le) // 4 async for response in responses]
    assert sum(sizes) == 600
    assert max(sizes) <= 64
    assert sizes[0] <= 16  # few are lost early
    assert len(sizes) <= 40  # in equal ones it would be 75


async def test_leaving_a_stream_aborts_the_request(engine: Engine) -> None:
    async with aclosing(engine.stream(engine.request(LONG, 1))) as responses:
        await anext(responses)
        assert (await engine.info()).running >= 1
    await engine.until(lambda info: info.running == 0)


async def test_abort_gives_what_there_is(engine: Engine) -> None:
    request, result = engine.request(LONG, 1), Result()
    async with asyncio.timeout(120), aclosing(engine.stream(request)) as responses:
        async for response in responses:
            result.take(response)
            if result.messages == 3:
                abort = engine_pb2.AbortRequest(
                    request_ids=[request.generate.request_id, "unknown"]
                )
                aborted = await engine.stub.Abort(abort)
                assert list(aborted.request_ids) == [request.generate.request_id]
    assert result.finish.reason == sampling_pb2.FINISH_REASON_ABORT
    assert 3 <= len(result.ids) == len(result.logprobs) < LONG
    assert result.spans[-1][2] == len(result.ids)


async def test_a_running_id_is_refused(engine: Engine) -> None:
    request = engine.request(LONG, 1)
    async with aclosing(engine.stream(request)) as responses:
        await anext(responses)
        with pytest.raises(RequestIdInUseError):
            await engine.generate(request)
    await engine.until(lambda info: info.running == 0)
    assert len((await engine.generate(engine.request(3, 0))).ids) == 3


@pytest.mark.parametrize(
    ("fields", "reason", "name"),
    [
        ({"token_ids_u32le": b""}, "PROMPT_EMPTY", "token_ids_u32le"),
        ({"token_ids_u32le": b"\1\2\3"}, "INVALID_FIELD", "token_ids_u32le"),
        (
            {"token_ids_u32le": np.full(2048, 5, "<u4").tobytes()},
            "PROMPT_TOO_LONG",
            "token_ids_u32le",
        ),
        (
            {"token_ids_u32le": np.array([9999], "<u4").tobytes()},
            "TOKEN_OUT_OF_VOCABULARY",
            "token_ids_u32le",
        ),
        ({"request_id": ""}, "INVALID_FIELD", "request_id"),
        ({"model": "another"}, "MODEL_MISMATCH", "model"),
        ({"sampling": {"temperature": -1.0}}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"sampling": {"top_p": float("nan")}}, "INVALID_SAMPLING", "sampling.top_p"),
        ({"sampling": {"stop_token_ids": [9999]}}, "INVALID_SAMPLING", "sampling.stop_token_ids"),
        ({"top_logprobs": 21}, "INVALID_FIELD", "top_logprobs"),
        ({"sampling": {"logit_bias": {9999: 1.0}}}, "INVALID_SAMPLING", "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {5: 101.0}}}, "INVALID_SAMPLING", "sampling.logit_bias"),
        (
            {"sampling": {"logit_bias": {5: float("nan")}}},
            "INVALID_SAMPLING",
            "sampling.logit_bias",
        ),
        (
            {"sampling": {"allowed_token_ids": [9999]}},
            "INVALID_SAMPLING",
            "sampling.allowed_token_ids",
        ),
        (
            {"sampling": {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}},
            "INVALID_SAMPLING",
            "sampling.allowed_token_ids",
        ),
        ({"banned_token_ids": [9999]}, "INVALID_FIELD", "banned_token_ids"),
        ({"banned_token_ids": [5] * 65}, "INVALID_FIELD", "banned_token_ids"),
        (
            {"sampling": {"bad_sequences": [sampling_pb2.TokenSequence()]}},
            "INVALID_SAMPLING",
            "sampling.bad_sequences",
        ),
        (
            {"sampling": {"bad_sequences": [sampling_pb2.TokenSequence(token_ids=[9999])]}},
            "INVALID_SAMPLING",
            "sampling.bad_sequences",
        ),
        (
            {
                "sampling": {
                    "allowed_token_ids": [5],
                    "bad_sequences": [sampling_pb2.TokenSequence(token_ids=[7, 5])],
                }
            },
            "INVALID_SAMPLING",
            "sampling.bad_sequences",
        ),
    ],
)
async def test_a_bad_request_names_its_field_and_the_engine_stays_up(
    engine: Engine, fields: dict[str, Any], reason: str, name: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await engine.generate(engine.request(5, 0, **fields))
    assert (caught.value.reason, caught.value.field) == (reason, name)
    assert len((await engine.generate(engine.request(2, 0))).ids) == 2


async def test_the_context_limit_is_a_length(engine: Engine) -> None:
    prompt = np.full(2044, 5, "<u4").tobytes()
    result = await engine.generate(engine.request(100, 0, token_ids_u32le=prompt))
    assert len(result.ids) == 4
    assert result.finish.reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_a_pause_that_is_repeated_after_a_resume_pauses_nothing(engine: Engine) -> None:
    pause = engine_pb2.PauseRequest(mode=KEEP, request_id="pause")
    await engine.stub.Pause(pause)
    await engine.stub.Resume(engine_pb2.ResumeRequest())
    await engine.stub.Pause(pause)
    assert not (await engine.info()).paused


@pytest.mark.parametrize(
    "method", ["Abort", "Pause", "Resume", "Sleep", "WakeUp", "ResetPrefixCache"]
)
async def test_a_call_that_means_another_model_is_refused(engine: Engine, method: str) -> None:
    request = getattr(engine_pb2, f"{method}Request")(model="another")
    with pytest.raises(ModelMismatchError), typed_errors():
        await getattr(engine.stub, method)(request)


async def test_paused_requests_wait_and_go_on(engine: Engine) -> None:
    result, late = Result(), []
    async with asyncio.timeout(120), aclosing(engine.stream(engine.request(100, 1))) as responses:
        async for response in responses:
            result.take(response)
            if result.messages == 2:
                await engine.stub.Pause(engine_pb2.PauseRequest(mode=KEEP))
                assert (await engine.info()).paused
                late.append(asyncio.ensure_future(engine.generate(engine.request(5, 0))))
                await engine.stub.Resume(engine_pb2.ResumeRequest())
    assert len(result.ids) == 100
    assert len((await late[0]).ids) == 5
    assert not (await engine.info()).paused


async def test_a_pause_that_aborts_ends_requests_with_what_they_have(engine: Engine) -> None:
    result = Result()
    async with asyncio.timeout(120), aclosing(engine.stream(engine.request(LONG, 1))) as responses:
        async for response in responses:
            result.take(response)
            if result.messages == 2:
                await engine.stub.Pause(engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_ABORT))
    await engine.stub.Resume(engine_pb2.ResumeRequest())
    assert result.finish.reason == sampling_pb2.FINISH_REASON_ABORT


async def test_a_pause_that_waits_lets_requests_end_and_holds_new_ones(engine: Engine) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        stream = engine.stream(engine.request(200, 1))
        await anext(stream)
        wait = engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_WAIT)
        paused = group.create_task(_call(engine.stub.Pause(wait)))
        rest = [response async for response in stream]
        assert rest[-1].finish.reason == sampling_pb2.FINISH_REASON_LENGTH
        await paused
        late = group.create_task(engine.generate(engine.request(5, 0)))
        await engine.until(lambda info: info.running + info.waiting == 1)
        assert not late.done()
        await engine.stub.Resume(engine_pb2.ResumeRequest())
        assert len((await late).ids) == 5


async def test_a_pause_whose_caller_leaves_changes_nothing(engine: Engine) -> None:
    async with asyncio.timeout(120), aclosing(engine.stream(engine.request(LONG, 1))) as responses:
        await anext(responses)
        wait = engine_pb2.PauseRequest(mode=engine_pb2.PAUSE_MODE_WAIT)
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await engine.stub.Pause(wait, timeout=0.2)
    assert len((await engine.generate(engine.request(5, 0))).ids) == 5
    assert not (await engine.info()).paused


async def _call(call: Any) -> Any:
    return await call


async def test_new_weights_in_the_middle_of_a_request_show_in_its_spans(engine: Engine) -> None:
    before = (await engine.info()).policy_version
    result = Result()
    async with asyncio.timeout(120), aclosing(engine.stream(engine.request(LONG, 1))) as responses:
        async for response in responses:
            result.take(response)
            if result.messages == 3:
                await engine.update(before + 1, engine.weights)
    (old, start, middle), (new, again, end) = result.spans
    assert (old, new) == (before, before + 1)
    assert (start, middle, end) == (0, again, LONG)
    assert 3 <= middle < LONG
    assert (await engine.info()).policy_version == before + 1


async def test_bad_weights_leave_the_old_ones_in_use(engine: Engine, tmp_path: Path) -> None:
    before = (await engine.info()).policy_version
    whole = (engine.weights / "model.safetensors").read_bytes()
    empty = tmp_path / "empty"
    empty.mkdir()
    for source in (whole[:-100], b"rubbish", empty, tmp_path / "missing"):
        with pytest.raises(InvalidWeightsError):
            await engine.update(before + 1, source)
    with pytest.raises(StaleVersionError):
        await engine.update(before, whole)
    assert (await engine.info()).policy_version == before
    result = await engine.generate(engine.request(5, 0))
    assert result.spans == [(before, 0, 5)]


async def test_the_prefix_cache_can_be_reset_and_the_engine_sleep(engine: Engine) -> None:
    await engine.until(lambda info: info.running == 0)
    answer = await engine.stub.ResetPrefixCache(engine_pb2.ResetPrefixCacheRequest())
    assert answer.reset
    await engine.stub.Sleep(engine_pb2.SleepRequest())
    assert (await engine.info()).sleeping
    await engine.stub.WakeUp(engine_pb2.WakeUpRequest())
    assert not (await engine.info()).sleeping
    assert len((await engine.generate(engine.request(3, 0))).ids) == 3


async def test_health_is_serving(engine: Engine) -> None:
    async with open_channel(engine.process.address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in (b"", b"rollmesh.v1.EngineService"):
            request = b"\n" + bytes([len(name)]) + name if name else b""
            assert await check(request, timeout=10) == b"\x08\x01"
