"""Control calls: every engine of a model does what is asked, and has a result. Others do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.client import Client, EngineControlError, MeshAddresses, WeightsPushError
from rollmesh.runtime.errors import InvalidFieldError, RepeatConflictError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2_grpc, sampling_pb2
from tests.controls import WAKE_UP, Control, abort, sleep
from tests.processes import ServiceProcess, running
from tests.router.engines import noting_engine, reason_of
from tests.router.routers import running_router
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
MANY, FEW = 2000, 160
"""Tokens that take longer than any test, and some that take eight seconds."""
ENGINES = {"a": "policy", "b": "policy", "c": "judge"}
Calls = dict[str, Callable[[str], Awaitable[list[engine_pb2.EngineResult]]]]


class Fleet:
    """A router with two engines of one model and one of another."""

    def __init__(self, router: ServiceProcess, client: Client) -> None:
        self.router = router
        self.client = client
        self.stubs: dict[str, engine_pb2_grpc.EngineServiceAsyncStub] = {}

    async def states(self) -> dict[str, tuple[bool, bool]]:
        """Whether each engine is paused, and whether it sleeps, as the router knows."""
        replicas = (await self.client.replicas()).replicas
        loads = {one.hello.replica_id: one.hello.load for one in replicas}
        return {name: (load.paused, load.sleeping) for name, load in loads.items()}

    async def until(self, **states: tuple[bool, bool]) -> None:
        async def look() -> bool:
            return {**await self.states(), **states} == await self.states()

        await until(look)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("control")
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(folder))
        addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
        made = Fleet(router, await stack.enter_async_context(Client(addresses)))
        for name, model in ENGINES.items():
            flags = {
                "router": router.address,
                "backend": "scripted",
                "tokens_per_second": 20,
                "reply_tokens": MANY,
            }
            engine = await stack.enter_async_context(
                running("engine", folder / name, engine_id=name, model=model, **flags)
            )
            channel = await stack.enter_async_context(open_channel(engine.address))
            made.stubs[name] = engine_pb2_grpc.EngineServiceStub(channel)
        yield made


async def test_engines_sleep_wake_up_pause_and_resume_together(fleet: Fleet) -> None:
    client, asleep, awake = fleet.client, (False, True), (False, False)
    done = await client.sleep_engines(model="policy")
    assert sorted(one.engine_id for one in done) == ["a", "b"]
    await fleet.until(a=asleep, b=asleep, c=awake)
    await client.wake_up_engines("policy")
    await fleet.until(a=awake, b=awake, c=awake)
    assert [one.engine_id for one in await client.pause_engines("abort", "judge")] == ["c"]
    await fleet.until(a=awake, b=awake, c=(True, False))
    await client.resume_engines("judge")
    await fleet.until(a=awake, b=awake, c=awake)
    assert len(await client.reset_prefix_caches("policy")) == 2


async def test_generations_of_a_model_are_aborted_and_others_continue(fleet: Fleet) -> None:
    def generate(name: str) -> Awaitable[engine_pb2.GenerateResponse]:
        tokens = MANY if ENGINES[name] == "policy" else FEW
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens)
        return fleet.stubs[name].Generate(
            engine_pb2.GenerateRequest(
                request_id=f"on-{name}", token_ids_u32le=b"\x05\0\0\0", sampling=sampling
            )
        )

    async def are_running() -> bool:
        infos = [
            await stub.GetInfo(engine_pb2.GetInfoRequest(request_id=f"on-{name}"))
            for name, stub in fleet.stubs.items()
        ]
        return all(info.holds_request for info in infos)

    calls = {name: asyncio.ensure_future(generate(name)) for name in ENGINES}
    await until(are_running)
    async with open_channel(fleet.router.address) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        request = abort("on-b", "on-c", "unknown", model="policy", request_id="once")
        aborted = await router.ControlEngines(request)
        found = {one.engine_id: list(one.aborted_request_ids) for one in aborted.results}
        assert found == {"a": [], "b": ["on-b"]}
        assert await router.ControlEngines(request) == aborted  # a repeat aborts nothing again
        request.abort.request_ids.append("on-a")
        with pytest.raises(RepeatConflictError), typed_errors():
            await router.ControlEngines(request)
    assert (await calls["b"]).finish.reason == sampling_pb2.FINISH_REASON_ABORT
    assert {one.engine_id for one in await fleet.client.abort_generations("policy")} == {"a", "b"}
    assert (await calls["a"]).finish.reason == sampling_pb2.FINISH_REASON_ABORT
    assert (await calls["c"]).finish.reason != sampling_pb2.FINISH_REASON_ABORT


async def test_an_engine_that_fails_is_named_and_the_others_obey(fleet: Fleet) -> None:
    async with noting_engine(fleet.router.address, "d", model="policy"):
        with pytest.raises(EngineControlError, match="d: ") as failed:  # it knows no such calls
            await fleet.client.sleep_engines(2, "policy")
        results = {one.engine_id: one.status.code for one in failed.value.results}
        assert (results["a"], results["b"], bool(results["d"])) == (0, 0, True)
        await fleet.until(a=(False, True), b=(False, True))
        with pytest.raises(EngineControlError) as cached:
            await fleet.client.reset_prefix_caches("policy")
        reasons = {one.engine_id: reason_of(one) for one in cached.value.results}
        assert reasons == {"a": "", "b": "", "d": "PREFIX_CACHE_IN_USE"}
        with pytest.raises(EngineControlError):
            await fleet.client.wake_up_engines("policy")
        await fleet.until(a=(False, False), b=(False, False))


@pytest.mark.parametrize("call", ["sleep", "wake_up", "reset", "abort", "pause", "resume"])
async def test_a_control_call_names_its_model_where_there_are_several(
    fleet: Fleet, call: str
) -> None:
    client = fleet.client
    calls: Calls = {
        "sleep": lambda model: client.sleep_engines(model=model),
        "wake_up": client.wake_up_engines,
        "reset": client.reset_prefix_caches,
        "abort": client.abort_generations,
        "pause": lambda model: client.pause_engines(model=model),
        "resume": client.resume_engines,
    }
    with pytest.raises(InvalidFieldError, match=r"model: is empty; .*\(judge, policy\)"):
        await calls[call]("")
    with pytest.raises(InvalidFieldError, match="model: 'gpt-9' is not in the mesh"):
        await calls[call]("gpt-9")


async def test_bad_arguments_of_control_calls_are_refused(fleet: Fleet) -> None:
    with pytest.raises(InvalidFieldError, match="level: is 3; give 1 or 2"):
        await fleet.client.sleep_engines(3, "policy")
    with pytest.raises(InvalidFieldError, match="mode: 'nap' is invalid"):
        await fleet.client.pause_engines("nap", "policy")  # type: ignore[arg-type]
    async with open_channel(fleet.router.address) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(InvalidFieldError, match="request_ids: is empty"), typed_errors():
            await router.ControlEngines(abort(model="policy"))
        with pytest.raises(InvalidFieldError, match="action: is not set"), typed_errors():
            await router.ControlEngines(Control(model="policy"))


async def test_a_sleeping_engine_takes_a_push_once_it_is_awake(fleet: Fleet) -> None:
    client, weights = fleet.client, {"w": np.zeros(1, np.float32)}
    await client.sleep_engines(model="judge")
    await fleet.until(c=(False, True))
    with pytest.raises(WeightsPushError, match="wake it up") as refused:
        await client.push_weights(weights, 1, model="judge")
    assert [reason_of(one) for one in refused.value.results] == ["ENGINE_ASLEEP"]
    await client.wake_up_engines("judge")
    await client.push_weights(weights, 1, model="judge")  # the version is still free
    await fleet.stubs["a"].ControlEngines(sleep())
    await fleet.until(a=(False, True), b=(False, False))
    results = await client.push_weights(weights, 1, model="policy", allow_partial=True)
    assert {one.engine_id: reason_of(one) for one in results} == {"a": "ENGINE_ASLEEP", "b": ""}
    await fleet.stubs["a"].ControlEngines(WAKE_UP)

    async def is_up_to_date() -> bool:
        info = await fleet.stubs["a"].GetInfo(engine_pb2.GetInfoRequest())
        return info.policy_version == 1

    await until(is_up_to_date)
