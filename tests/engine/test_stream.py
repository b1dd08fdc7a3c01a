"""Many generations on one stream to an engine, as a gateway has it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.mesh import Answer, EngineClients
from rollmesh.runtime.codec import EXPERTS, experts_column, pack_ids
from rollmesh.runtime.errors import (
    DeadlineError,
    EngineFaultError,
    InvalidFieldError,
    PromptEmptyError,
    RemoteError,
    RequestIdInUseError,
    RollmeshError,
)
from rollmesh.runtime.rpc import open_channel, read_stream
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.engine.engines import Engine, Result
from tests.processes import ServiceProcess, running

LONG = 100_000
ABORT = sampling_pb2.FINISH_REASON_ABORT


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    flags = {
        "backend": "scripted",
        "reply_tokens": LONG,
        "tokens_per_second": 200,
        "grace_ms": 600_000,
    }
    async with running("engine", tmp_path, **flags) as process:
        yield process


@pytest.fixture
async def clients() -> AsyncIterator[EngineClients]:
    clients = EngineClients(60_000)
    yield clients
    await clients.close()


@pytest.fixture
async def engine(process: ServiceProcess) -> AsyncIterator[Engine]:
    async with open_channel(process.address) as channel:
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())


async def rest(answer: Answer) -> Result:
    result = Result()
    while not result.finish.reason:
        result.take(await answer.next())
    return result


async def messages_of(call: Any) -> list[engine_pb2.GenerationsResponse]:
    async with aclosing(read_stream(call)) as messages:
        return [message async for message in messages]


async def test_waiting_messages_are_bounded_by_the_tokens_and_rows_that_were_requested(
    clients: EngineClients,
) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=1)
    generate = engine_pb2.GenerateRequest(
        token_ids_u32le=pack_ids(np.arange(500, dtype=np.uint32)),
        sampling=sampling,
        columns=[EXPERTS],
    )
    request = engine_pb2.StreamedGenerate(generate=generate)
    row = experts_column(0, np.zeros((1, 1, 1), np.uint8))
    with clients.of("127.0.0.1:9").begin(request, 60_000, {}) as answer:
        for _ in range(501):
            answer.put(engine_pb2.TokenChunk(columns=[row]))
        answer.put(engine_pb2.TokenChunk(finish=engine_pb2.GenerateFinish()))
        messages = [await answer.next() for _ in range(502)]
        assert messages[-1].HasField("finish")
        for _ in range(600):
            answer.put(engine_pb2.TokenChunk(columns=[row]))
        with pytest.raises(EngineFaultError, match="more messages than were requested"):
            await rest(answer)


async def test_the_tokens_of_a_step_travel_in_one_message(engine: Engine) -> None:
    call = engine.stub.Generations()
    begin = [
        engine_pb2.BeginGeneration(number=number, request=engine.request(20, 1))
        for number in range(1, 9)
    ]
    await call.write(engine_pb2.GenerationsRequest(begin=begin))
    await call.done_writing()
    messages = await messages_of(call)  # it ends with the last generation
    frames = [sum(one.HasField("answer") for one in message.frames) for message in messages]
    assert sum(frames) == 8 * 20
    assert max(frames) >= 8
    assert len(frames) < 80


async def test_a_generation_may_send_all_tokens_at_its_end(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    with clients.of(process.address).begin(engine.request(20, 0), 60_000, {}) as answer:
        result = await rest(answer)
    assert (len(result.ids), result.messages) == (20, 1)


async def test_a_reader_that_does_not_read_holds_up_no_other(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    client = clients.of(process.address)
    with client.begin(engine.request(200, 1), 60_000, {}) as unread:
        with client.begin(engine.request(50, 1), 60_000, {}) as read:
            assert len((await rest(read)).ids) == 50
        assert len((await rest(unread)).ids) == 200


async def test_a_generation_that_fails_leaves_the_others_alone(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    client, good = clients.of(process.address), engine.request(100, 1)
    wrong: list[tuple[Any, int, type[RollmeshError]]] = [
        (engine.request(5, 1, token_ids_u32le=b""), 60_000, PromptEmptyError),
        (engine.request(5, 1, request_id=good.generate.request_id), 60_000, RequestIdInUseError),
        (engine.request(LONG, 1), 50, DeadlineError),
    ]
    with client.begin(good, 60_000, {}) as answer:
        result = Result()
        result.take(await answer.next())
        for request, timeout_ms, error in wrong:
            with client.begin(request, timeout_ms, {}) as failing, pytest.raises(error):
                await rest(failing)
        assert len(result.ids) + len((await rest(answer)).ids) == 100


async def test_an_abort_ends_one_generation_however_early_it_comes(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    client = clients.of(process.address)
    for is_sampling in (False, True):
        with client.begin(engine.request(LONG, 1), 60_000, {}) as answer:
            if is_sampling:
                await answer.next()
            answer.abort()
            assert (await rest(answer)).finish.reason == ABORT


async def test_a_generation_whose_caller_leaves_ends(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    client = clients.of(process.address)
    with ExitStack() as stack:
        for _ in range(3):
            beginning = client.begin(engine.request(LONG, 1), 60_000, {})
            await stack.enter_context(beginning).next()
    await engine.until(lambda info: info.running == 0)


async def test_a_number_in_use_ends_the_stream(engine: Engine) -> None:
    call = engine.stub.Generations()
    begin = [
        engine_pb2.BeginGeneration(number=1, request=engine.request(LONG, 1)) for _ in range(2)
    ]
    await call.write(engine_pb2.GenerationsRequest(begin=begin))
    with pytest.raises(InvalidFieldError, match="is in use"):
        await messages_of(call)
    await engine.until(lambda info: info.running == 0)


async def test_an_engine_that_dies_fails_all_and_the_next_one_has_a_stream_of_its_own(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    client = clients.of(process.address)
    with ExitStack() as stack:
        answers = [
            stack.enter_context(client.begin(engine.request(LONG, 1), 60_000, {})) for _ in range(3)
        ]
        for answer in answers:
            await answer.next()
        await process.kill()
        for answer in answers:
            with pytest.raises(RemoteError):
                await rest(answer)
    assert clients.of(process.address) is not client


async def test_an_engine_that_stops_finishes_its_generations_and_waits_for_no_idle_stream(
    process: ServiceProcess, clients: EngineClients, engine: Engine
) -> None:
    client = clients.of(process.address)
    with client.begin(engine.request(100, 1), 60_000, {}) as answer:
        result = Result()
        result.take(await answer.next())
        stopping = asyncio.ensure_future(process.terminate())
        assert len(result.ids) + len((await rest(answer)).ids) == 100
    assert await stopping == 0


async def test_an_engine_of_an_older_release_is_out_of_service_with_the_remedy(
    clients: EngineClients,
) -> None:
    new = engine_pb2.StreamedGenerate()
    server = grpc.aio.server()  # without methods
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with clients.of(f"127.0.0.1:{port}").begin(new, 60_000, {}) as answer:
            async with asyncio.timeout(60):
                with pytest.raises(EngineFaultError, match="upgrade engines before gateways"):
                    await answer.next()
    finally:
        await server.stop(None)
