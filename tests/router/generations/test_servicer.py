"""Generations through a router: any client of engines may be pointed at it."""

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.codec.arrays import pack_ids, unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import ImageUnknownError, InvalidFieldError, RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, read_stream, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.chat.images.pictures import picture
from tests.meshes import until_free
from tests.processes import ServiceProcess, running
from tests.router.routers import running_router
from tests.waiting import until

PROMPT = pack_ids(np.array([5, 6, 7], np.uint32))
TOKENS = 24

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Fleet:
    """A router and its engines."""

    folder: Path
    router: ServiceProcess
    stack: AsyncExitStack
    stub: "engine_pb2_grpc.EngineServiceAsyncStub"
    client: Client
    engines: dict[str, ServiceProcess] = field(default_factory=dict)

    async def add(self, name: str, **flags: object) -> ServiceProcess:
        given = {"backend": "scripted", "engine_id": name, "reply_tokens": TOKENS, **flags}
        engine = running("engine", self.folder / name, router=self.router.address, **given)
        self.engines[name] = await self.stack.enter_async_context(engine)
        return self.engines[name]

    async def busy(self) -> str:
        """Waits for an engine with a lease; returns its id."""

        async def look() -> str:
            replicas = (await self.client.replicas()).replicas
            return next((one.hello.replica_id for one in replicas if one.leases), "")

        return await until(look)


@asynccontextmanager
async def fleet_of(folder: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(folder, missed_reports=2))
        addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
        client = await stack.enter_async_context(Client(addresses))
        channel = await stack.enter_async_context(open_channel(router.address))
        yield Fleet(folder, router, stack, engine_pb2_grpc.EngineServiceStub(channel), client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet_of(tmp_path_factory.mktemp("quick")) as fleet:
        for name in ("a", "b"):
            await fleet.add(name)
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Engines that sample for longer than a test needs; tests that kill one add another."""
    async with fleet_of(tmp_path_factory.mktemp("slow")) as fleet:
        await fleet.add("slow", tokens_per_second=2)
        yield fleet


def request(request_id: str, **fields: Any) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(
        **{"request_id": request_id, "token_ids_u32le": PROMPT, **fields}
    )


@dataclass
class Seen:
    """What a client gets."""

    token_ids: list[int]
    logprobs: list[float]
    finish: engine_pb2.GenerateFinish

    @property
    def engines(self) -> list[str]:
        return [span.engine_id for span in self.finish.version_spans]


async def whole(fleet: Fleet, asked: engine_pb2.GenerateRequest, limit_s: float = 60) -> Seen:
    with typed_errors():
        said = await fleet.stub.Generate(asked, timeout=limit_s)
    return Seen(ids_of(said), logprobs_of(said), said.finish)


async def streamed(
    fleet: Fleet, asked: engine_pb2.GenerateRequest, first: asyncio.Event | None = None
) -> Seen:
    call = fleet.stub.StreamGenerate(
        engine_pb2.StreamGenerateRequest(generate=asked, max_chunk_tokens=4), timeout=60
    )
    seen = Seen([], [], engine_pb2.GenerateFinish())
    messages = [one async for one in noted(read_stream(call), first)]
    for one in messages:
        seen.token_ids += ids_of(one)
        seen.logprobs += logprobs_of(one)
    assert [one.HasField("prompt_crc32") for one in messages] == [True] + [False] * (
        len(messages) - 1
    )
    assert [one.HasField("finish") for one in messages] == [False] * (len(messages) - 1) + [True]
    seen.finish = messages[-1].finish
    return seen


async def noted(messages: Any, first: asyncio.Event | None) -> AsyncIterator[Any]:
    async for one in messages:
        if first is not None:
            first.set()
        yield one


def ids_of(message: Any) -> list[int]:
    return [int(one) for one in unpack_ids(message.token_ids_u32le, "ids")]


def logprobs_of(message: Any) -> list[float]:
    return [float(one) for one in unpack_logprobs(message.logprobs_f32le, "logprobs")]


def check_finish(finish: engine_pb2.GenerateFinish, tokens: int) -> None:
    assert (finish.prompt_tokens, finish.prompt_crc32) == (3, zlib.crc32(PROMPT))
    covered = [at for span in finish.version_spans for at in range(span.start, span.end)]
    assert covered == list(range(tokens))


async def test_both_ways_of_asking_get_the_same_answer(quick: Fleet) -> None:
    one = await whole(quick, request("w", session_id="same"))
    other = await streamed(quick, request("s", session_id="same"))
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert len(one.token_ids) == TOKENS
    for seen in (one, other):
        assert seen.finish.reason == sampling_pb2.FINISH_REASON_STOP
        assert seen.finish.stop_token_id == one.token_ids[-1]
        check_finish(seen.finish, TOKENS)
    assert one.engines == other.engines  # a session stays on its engine


async def test_what_an_engine_refuses_is_the_clients_error(quick: Fleet) -> None:
    with pytest.raises(RollmeshError) as caught:
        await whole(quick, request("r", token_ids_u32le=b""))
    assert caught.value.reason == "PROMPT_EMPTY"
    with pytest.raises(RollmeshError) as caught:
        await whole(quick, request("r", model="other"))
    assert (caught.value.reason, getattr(caught.value, "field", "")) == ("INVALID_FIELD", "model")
    with pytest.raises(RollmeshError) as caught:
        await whole(quick, request(""))
    assert getattr(caught.value, "field", "") == "request_id"


async def test_a_router_tells_what_its_engines_are(quick: Fleet) -> None:
    info = await quick.stub.GetInfo(engine_pb2.GetInfoRequest(model="policy"), timeout=60)
    assert (info.model, info.backend, info.vocabulary_tokens) == ("policy", "scripted", 1000)
    assert info.max_context_tokens == 131_072
    assert (info.paused, info.sleeping, info.holds_request) == (False, False, False)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("Pause", "PauseEngines"),
        ("Resume", "ResumeEngines"),
        ("Sleep", "SleepEngines"),
        ("WakeUp", "WakeUpEngines"),
        ("ResetPrefixCache", "ResetPrefixCaches"),
        ("InitWeightTransfer", "InitWeightTransfers"),
    ],
)
async def test_control_is_refused_by_name(quick: Fleet, method: str, named: str) -> None:
    asked = getattr(engine_pb2, f"{method}Request")()
    with pytest.raises(RollmeshError, match=named) as caught, typed_errors():
        await getattr(quick.stub, method)(asked, timeout=60)
    assert (caught.value.reason, caught.value.code) == ("WRONG_SERVICE", "UNIMPLEMENTED")


async def test_new_weights_are_refused_by_name(quick: Fleet) -> None:
    async def parts() -> AsyncIterator[engine_pb2.UpdateWeightsRequest]:
        for _ in range(3):
            yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=b"x")

    with pytest.raises(RollmeshError, match="PushWeights") as caught, typed_errors():
        await quick.stub.UpdateWeights(parts(), timeout=60)
    assert caught.value.reason == "WRONG_SERVICE"


@pytest.mark.parametrize("way", [whole, streamed])
async def test_a_generation_survives_its_engine(tmp_path: Path, way: Any, quick: Fleet) -> None:
    undisturbed = await way(quick, request("undisturbed"))
    async with fleet_of(tmp_path) as fleet:
        first = await fleet.add("first", tokens_per_second=2)
        started = asyncio.Event()
        asking: asyncio.Task[Seen]
        async with asyncio.TaskGroup() as tasks:
            if way is streamed:
                asking = tasks.create_task(streamed(fleet, request("r"), started))
                await started.wait()
            else:
                asking = tasks.create_task(whole(fleet, request("r")))
                await fleet.busy()
            await first.kill()
            await fleet.add("second")
        seen = asking.result()
    assert (seen.token_ids, seen.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)
    check_finish(seen.finish, TOKENS)
    assert seen.engines[-1] == "second"
    assert way is whole or seen.engines == ["first", "second"]


async def test_images_are_sent_to_a_router_once_and_by_it_to_each_engine(
    tmp_path: Path, quick: Fleet
) -> None:
    sha256 = hashlib.sha256(picture()).hexdigest()
    image = engine_pb2.PromptImage(sha256=sha256, offset=1, length=2)
    with pytest.raises(ImageUnknownError) as caught:
        await whole(quick, request("unknown", images=[image]))
    assert caught.value.sha256s == [sha256]
    misplaced = engine_pb2.PromptImage(sha256=sha256, offset=2, length=2, data=picture())
    with pytest.raises(InvalidFieldError) as refused:
        await whole(quick, request("misplaced", images=[misplaced]))
    assert refused.value.field == "images[0].length"
    sent = engine_pb2.PromptImage(sha256=sha256, offset=1, length=2, data=picture())
    undisturbed = await whole(quick, request("sent", images=[sent]))
    assert undisturbed.token_ids != (await whole(quick, request("text"))).token_ids
    async with fleet_of(tmp_path) as fleet:
        first = await fleet.add("first", tokens_per_second=4)
        await whole(fleet, request("one", images=[sent], sampling={"max_tokens": 1}))
        started = asyncio.Event()
        asking = asyncio.ensure_future(streamed(fleet, request("r", images=[image]), started))
        await started.wait()
        await first.kill()
        await fleet.add("second")
        seen = await asking
    assert (seen.token_ids, seen.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)
    assert seen.engines == ["first", "second"]


async def test_a_seed_begins_anew_where_nothing_was_sent_and_fails_where_it_was(
    tmp_path: Path, quick: Fleet
) -> None:
    seeded = {"sampling": sampling_pb2.SamplingParams(seed=1)}
    undisturbed = await whole(quick, request("undisturbed", **seeded))
    async with fleet_of(tmp_path) as fleet:
        first = await fleet.add("first", tokens_per_second=2)
        started = asyncio.Event()
        sent = asyncio.ensure_future(streamed(fleet, request("sent", **seeded), started))
        unsent = asyncio.ensure_future(whole(fleet, request("unsent", **seeded)))
        await started.wait()
        await first.kill()
        await fleet.add("second")
        with pytest.raises(RollmeshError) as caught:
            await sent
        assert caught.value.reason == "ENGINE_LOST"
        seen = await unsent
    assert (seen.token_ids, seen.engines) == (undisturbed.token_ids, ["second"])


async def test_an_aborted_generation_ends_with_its_tokens(slow: Fleet) -> None:
    started = asyncio.Event()
    asking = asyncio.ensure_future(streamed(slow, request("aborted"), started))
    await started.wait()
    with pytest.raises(RollmeshError) as caught:
        await whole(slow, request("aborted"))
    assert caught.value.reason == "REQUEST_ID_IN_USE"
    info = await slow.stub.GetInfo(engine_pb2.GetInfoRequest(request_id="aborted"), timeout=60)
    assert info.holds_request
    asked = engine_pb2.AbortRequest(request_ids=["aborted", "unknown"])
    assert (await slow.stub.Abort(asked, timeout=60)).request_ids == ["aborted"]
    seen = await asking
    assert seen.finish.reason == sampling_pb2.FINISH_REASON_ABORT
    assert 0 < len(seen.token_ids) < TOKENS
    check_finish(seen.finish, len(seen.token_ids))


async def test_an_aborted_generation_that_waits_for_an_engine_ends_at_once(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path) as fleet:
        await fleet.add("full", tokens_per_second=1, lease_capacity=1)
        first = asyncio.ensure_future(whole(fleet, request("first")))
        await fleet.busy()
        second = asyncio.ensure_future(whole(fleet, request("second")))

        async def both() -> bool:
            info = await fleet.stub.GetInfo(engine_pb2.GetInfoRequest(request_id="second"))
            return info.holds_request

        await until(both)
        asked = engine_pb2.AbortRequest(request_ids=["second"])

        async def aborted() -> bool:
            return bool((await fleet.stub.Abort(asked, timeout=60)).request_ids)

        await until(aborted)
        seen = await second
        assert (seen.token_ids, seen.finish.reason) == ([], sampling_pb2.FINISH_REASON_ABORT)
        assert not first.done()
        await fleet.stub.Abort(engine_pb2.AbortRequest(all=True), timeout=60)
        assert (await first).finish.reason == sampling_pb2.FINISH_REASON_ABORT


async def test_a_call_that_is_cancelled_frees_the_engine(slow: Fleet) -> None:
    started = asyncio.Event()
    asking = asyncio.ensure_future(streamed(slow, request("cancelled"), started))
    await started.wait()
    asking.cancel()
    await until_free(slow.client)
    info = await slow.stub.GetInfo(engine_pb2.GetInfoRequest(request_id="cancelled"), timeout=60)
    assert not info.holds_request


async def test_a_deadline_ends_a_generation(slow: Fleet) -> None:
    with pytest.raises(RollmeshError) as caught:
        await whole(slow, request("late"), limit_s=0.5)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    await until_free(slow.client)


async def test_no_engine_is_a_typed_error(tmp_path: Path) -> None:
    async with fleet_of(tmp_path) as fleet:
        with pytest.raises(RollmeshError) as caught:
            await whole(fleet, request("r"))
        assert caught.value.reason == "NO_ENGINE"


async def test_a_router_stops_when_its_last_generation_has_ended(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path, grace_ms=600_000))
        given = {"backend": "scripted", "tokens_per_second": 8, "reply_tokens": TOKENS}
        engine = await stack.enter_async_context(
            running("engine", tmp_path, router=router.address, **given)
        )
        channel = await stack.enter_async_context(open_channel(router.address))
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        call = stub.StreamGenerate(  # without a deadline
            engine_pb2.StreamGenerateRequest(generate=request("r"), max_chunk_tokens=4)
        )
        messages = aiter(read_stream(call))
        await anext(messages)
        stopping = asyncio.ensure_future(router.terminate())
        rest = [one async for one in messages]
        assert rest[-1].finish.reason == sampling_pb2.FINISH_REASON_STOP
        await engine.kill()
        assert await stopping == 0


async def test_health_names_both_services_of_a_router(quick: Fleet) -> None:
    async with open_channel(quick.router.address) as channel:
        untyped_channel: Any = channel
        health: Any = health_pb2_grpc.HealthStub(untyped_channel)
        for name in ("rollmesh.v1.EngineService", "rollmesh.v1.RouterService"):
            request = health_pb2.HealthCheckRequest(service=name)
            answer = await health.Check(request, timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
