"""How all backends abort, pause, take new weights, sleep, and say that they are well."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.runtime.errors import (
    EngineAsleepError,
    InvalidWeightsError,
    StaleVersionError,
    WeightsDroppedError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.controls import ABORT, RESET_PREFIX_CACHE, RESUME, WAIT, WAKE_UP, abort, pause, sleep
from tests.engine.engines import LONG, Engine, Result, in_mid_answer

# The first vLLM test waits for the model to start.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_leaving_a_stream_aborts_the_request(engine: Engine) -> None:
    running = 0
    async with asyncio.timeout(240):
        while not running:  # again, if the whole answer was sampled before it was left
            async with aclosing(engine.stream(engine.request(LONG, 1))) as responses:
                await anext(responses)
                running = (await engine.info()).running
    await engine.until(lambda info: info.running == 0)


async def test_abort_gives_what_there_is(engine: Engine) -> None:
    aborted = list[tuple[str, list[str]]]()

    async def act(request: engine_pb2.GenerateRequest) -> None:
        response = await engine.stub.ControlEngines(abort(request.request_id, "unknown"))
        (found,) = response.results
        aborted.append((request.request_id, list(found.aborted_request_ids)))

    result = await in_mid_answer(engine, act, is_aborted)
    request_id, found = aborted[-1]
    assert found == [request_id]
    assert 3 <= len(result.ids) == len(result.logprobs) < LONG
    assert result.spans[-1][2] == len(result.ids)


def is_aborted(result: Result) -> bool:
    return result.finish.reason == sampling_pb2.FINISH_REASON_ABORT


async def test_a_pause_that_is_repeated_after_a_resume_pauses_nothing(engine: Engine) -> None:
    request = pause(request_id="pause")
    await engine.stub.ControlEngines(request)
    await engine.stub.ControlEngines(RESUME)
    await engine.stub.ControlEngines(request)
    assert not (await engine.info()).paused


async def test_paused_requests_wait_and_go_on(engine: Engine) -> None:
    result, late = Result(), []
    async with asyncio.timeout(120), aclosing(engine.stream(engine.request(100, 1))) as responses:
        async for response in responses:
            result.take(response)
            if result.messages == 2:
                await engine.stub.ControlEngines(pause())
                assert (await engine.info()).paused
                late.append(asyncio.ensure_future(engine.generate(engine.request(5, 0))))
                await engine.stub.ControlEngines(RESUME)
    assert len(result.ids) == 100
    assert len((await late[0]).ids) == 5
    assert not (await engine.info()).paused


async def test_tokens_that_were_sampled_before_a_pause_arrive_during_it(engine: Engine) -> None:
    asked, result = engine.request(600, 512, sampling={"temperature": 0.0}), Result()
    asked.collect_ms = 1_000
    async with (
        asyncio.timeout(120),
        aclosing(engine.stream(asked)) as collected,
        aclosing(engine.stream(engine.request(LONG, 1))) as later,
    ):
        result.take(await anext(collected))
        for _ in range(8):
            await anext(later)
        await engine.stub.ControlEngines(pause())
        while len(result.ids) < 8:
            result.take(await anext(collected))
        await engine.stub.ControlEngines(RESUME)
        async for response in collected:
            result.take(response)
    whole = await engine.generate(engine_pb2.StreamedGenerate(generate=asked.generate))
    assert result.ids == whole.ids
    assert result.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_a_pause_that_aborts_ends_requests_with_their_tokens_so_far(engine: Engine) -> None:
    async def act(_: engine_pb2.GenerateRequest) -> None:
        await engine.stub.ControlEngines(pause(ABORT))
        await engine.stub.ControlEngines(RESUME)

    result = await in_mid_answer(engine, act, is_aborted)
    assert 3 <= len(result.ids) == len(result.logprobs) < LONG


async def test_a_pause_that_waits_lets_requests_end_and_holds_new_ones(engine: Engine) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        stream = engine.stream(engine.request(200, 1))
        await anext(stream)
        paused = group.create_task(_call(engine.stub.ControlEngines(pause(WAIT))))
        rest = [response async for response in stream]
        assert rest[-1].finish.reason == sampling_pb2.FINISH_REASON_LENGTH
        await paused
        late = group.create_task(engine.generate(engine.request(5, 0)))
        await engine.until(lambda info: info.running + info.waiting == 1)
        assert not late.done()
        await engine.stub.ControlEngines(RESUME)
        assert len((await late).ids) == 5


async def test_a_pause_whose_caller_leaves_changes_nothing(engine: Engine) -> None:
    async def act(_: engine_pb2.GenerateRequest) -> None:
        try:
            await engine.stub.ControlEngines(pause(WAIT), timeout=0.2)
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())
        else:  # the answer had ended
            await engine.stub.ControlEngines(RESUME)

    codes = list[grpc.StatusCode]()
    await in_mid_answer(engine, act, lambda _: bool(codes))
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert len((await engine.generate(engine.request(5, 0))).ids) == 5
    assert not (await engine.info()).paused


async def _call(call: Any) -> Any:
    return await call


async def test_new_weights_in_the_middle_of_a_request_show_in_its_spans(engine: Engine) -> None:
    async def act(_: engine_pb2.GenerateRequest) -> None:
        versions.append(versions[-1] + 1)
        await engine.update(versions[-1], engine.weights)

    versions = [(await engine.info()).policy_version]
    result = await in_mid_answer(engine, act, lambda result: len(result.spans) > 1)
    (old, start, middle), (new, again, end) = result.spans
    assert [old, new] == versions[-2:]
    assert (start, middle, end) == (0, again, LONG)
    assert 3 <= middle < LONG
    assert (await engine.info()).policy_version == new


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
    await engine.stub.ControlEngines(RESET_PREFIX_CACHE)
    await engine.stub.ControlEngines(sleep())
    assert (await engine.info()).sleeping
    await engine.stub.ControlEngines(WAKE_UP)
    assert not (await engine.info()).sleeping
    assert len((await engine.generate(engine.request(3, 0))).ids) == 3


async def test_weights_that_a_sleep_drops_are_missed_until_an_update(engine: Engine) -> None:
    async def act(_: engine_pb2.GenerateRequest) -> None:
        version = (await engine.info()).policy_version + 1
        await engine.stub.ControlEngines(sleep(2))
        with pytest.raises(EngineAsleepError):
            await engine.update(version, engine.weights)
        await engine.stub.ControlEngines(WAKE_UP)
        for chunk in (0, 1):
            with pytest.raises(WeightsDroppedError, match="push weights"):
                await engine.generate(engine.request(5, chunk))
        await engine.update(version, engine.weights)
        assert (await engine.generate(engine.request(5, 0))).spans == [(version, 0, 5)]

    await in_mid_answer(engine, act, is_aborted)


async def test_health_is_serving(engine: Engine) -> None:
    async with open_channel(engine.process.address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        for name in (b"", b"rollmesh.v1.EngineService"):
            request = b"\n" + bytes([len(name)]) + name if name else b""
            assert await check(request, timeout=60) == b"\x08\x01"
