"""Adapter revisions at a router: kept, retained, and brought to late engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollmesh.mesh import LeaseClient, Membership
from rollmesh.runtime.errors import (
    AdapterUnknownError,
    InvalidFieldError,
    StaleVersionError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc, sampling_pb2
from tests.controls import unload_adapter
from tests.processes import ServiceProcess
from tests.router.engines import NotingEngine, noting_engine, reason_of
from tests.router.routers import running_router
from tests.waiting import until

ROOM = 8
CONFIG = '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running_router(tmp_path, max_adapter_lag=1) as process:
        yield process


def data_of(name: str, version: int) -> bytes:
    return f"{name} {version} ".encode() * 100


async def push(
    router: str, name: str, version: int, request_id: str = "", data: bytes = b""
) -> list[engine_pb2.EngineResult]:
    given = data or data_of(name, version)
    header = engine_pb2.AdapterHeader(
        adapter=sampling_pb2.AdapterRef(name=name, version=version),
        config_json=CONFIG,
        safetensors_bytes=len(given),
        request_id=request_id,
    )
    requests = [
        router_pb2.PushAdapterRequest(header=header),
        *(
            router_pb2.PushAdapterRequest(safetensors_chunk=given[at : at + 100])
            for at in range(0, len(given), 100)
        ),
    ]
    async with open_channel(router) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).PushAdapter(iter(requests), timeout=60)
        with typed_errors(call):
            return list((await call).results)


async def unload(router: str, name: str, version: int = 0) -> None:
    async with open_channel(router) as channel:
        with typed_errors():
            stub = router_pb2_grpc.RouterServiceStub(channel)
            await stub.ControlEngines(unload_adapter(name, version), timeout=60)


async def retained(router: str) -> list[tuple[str, int]]:
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with typed_errors():
            found = await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=60)
    return [(one.name, one.version) for model in found.models for one in model.adapters]


async def has_left(router: str, engine_id: str) -> bool:
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        found = await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=60)
    return engine_id not in {one.hello.replica_id for one in found.replicas}


def engine_with_room(
    stack: AsyncExitStack, router: str, name: str, room: int = ROOM
) -> "asyncio.Future[NotingEngine]":
    engine = noting_engine(router, name, max_adapters=room)
    return asyncio.ensure_future(stack.enter_async_context(engine))


async def test_the_newest_revisions_of_each_name_are_retained_and_late_engines_get_them(
    router: ServiceProcess, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        early = await engine_with_room(stack, router.address, "early")
        await stack.enter_async_context(noting_engine(router.address, "without"))
        for name, version in (("math", 1), ("math", 2), ("code", 7), ("math", 3)):
            results = await push(router.address, name, version)
            assert [(one.engine_id, reason_of(one)) for one in results] == [("early", "")]
        kept = [("code", 7), ("math", 2), ("math", 3)]
        await early.until_holding(*kept)
        assert await retained(router.address) == kept
        assert len(list(tmp_path.rglob("*.safetensors"))) == 3
        late = await engine_with_room(stack, router.address, "late")
        await late.until_holding(*kept)
        assert late.files == {one: data_of(*one) for one in kept}


async def test_a_router_that_restarts_brings_its_revisions_and_unloads_everything_else(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(tmp_path))
        early = await engine_with_room(stack, first.address, "early")
        for version in (1, 2):
            await push(first.address, "math", version)
        await first.kill()
        early.load.adapters.add(adapter=sampling_pb2.AdapterRef(name="old", version=1), push_id="x")
        second = await stack.enter_async_context(running_router(tmp_path, port=first.port))
        late = await engine_with_room(stack, second.address, "late")
        for engine in (early, late):
            await engine.until_holding(("math", 1), ("math", 2))
        with pytest.raises(StaleVersionError):
            await push(second.address, "math", 2)


async def test_an_adapter_that_every_engine_refuses_is_dropped_and_nothing_changes(
    router: ServiceProcess, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        engine = await engine_with_room(stack, router.address, "engine")
        for version in (1, 2):
            await push(router.address, "math", version)
        engine.refuses = True
        results = await push(router.address, "math", 3)
        assert [reason_of(one) for one in results] == ["INVALID_WEIGHTS"]
        assert await retained(router.address) == engine.adapters == [("math", 1), ("math", 2)]
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2
        engine.refuses = False
        await push(router.address, "math", 3)
        await engine.until_holding(("math", 2), ("math", 3))


async def test_an_offered_revision_drops_no_earlier_one_before_an_engine_holds_it(
    router: ServiceProcess, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        engine = await engine_with_room(stack, router.address, "engine")
        for version in (1, 2):
            await push(router.address, "math", version)
        engine.hangs.clear()
        pushing = asyncio.create_task(push(router.address, "math", 3))
        await until(lambda: len(list(tmp_path.rglob("*.safetensors"))) == 3)
        late = await engine_with_room(stack, router.address, "late")
        await late.until_holding(("math", 1), ("math", 2))
        assert await retained(router.address) == [("math", 1), ("math", 2)]
        engine.hangs.set()
        await pushing
        for one in (engine, late):
            await one.until_holding(("math", 2), ("math", 3))


async def test_a_push_is_repeated_by_its_request_id_and_a_version_is_used_once(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(tmp_path))
        engine = await engine_with_room(stack, first.address, "engine")
        await push(first.address, "math", 5, "a")
        await first.kill()
        second = await stack.enter_async_context(running_router(tmp_path, port=first.port))
        await until(lambda: retained_by(second.address))
        await engine.until_registered()
        await push(second.address, "math", 5, "a")
        for version in (4, 5):
            with pytest.raises(StaleVersionError, match="is not above 5"):
                await push(second.address, "math", version, "b")
        assert engine.files == {("math", 5): data_of("math", 5)}


async def retained_by(router: str) -> bool:
    return bool(await retained(router))


async def test_too_little_room_is_an_error_that_says_how_much_is_needed(
    router: ServiceProcess,
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(noting_engine(router.address, "without"))
        with pytest.raises(InvalidFieldError, match="no engine takes adapters"):
            await push(router.address, "math", 1)
        small = await engine_with_room(stack, router.address, "small", room=2)
        for version in (1, 2, 3):  # the first is dropped
            await push(router.address, "math", version)
        with pytest.raises(InvalidFieldError, match="max_adapters=3") as caught:
            await push(router.address, "code", 1)
        assert (caught.value.field, caught.value.metadata["needed"]) == ("header.adapter", "3")
        await unload(router.address, "math", 2)
        await push(router.address, "code", 1)
        await small.until_holding(("code", 1), ("math", 3))


async def test_adapters_are_forgotten_by_name_before_the_weights_change(
    router: ServiceProcess,
) -> None:
    async with AsyncExitStack() as stack:
        engine = await engine_with_room(stack, router.address, "engine")
        await push(router.address, "math", 1)
        await push(router.address, "math", 2)
        header = router_pb2.PushWeightsHeader(
            policy_version=1, pause_mode=engine_pb2.PAUSE_MODE_KEEP, safetensors_bytes=1
        )
        requests = [
            router_pb2.PushWeightsRequest(header=header),
            router_pb2.PushWeightsRequest(safetensors_chunk=b"x"),
        ]
        async with open_channel(router.address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            call = stub.PushWeights(iter(requests), timeout=60)
            with pytest.raises(InvalidFieldError, match="unload them first"), typed_errors(call):
                await call
            await unload(router.address, "math")
            await engine.until_holding()
            assert await retained(router.address) == []
            with typed_errors():
                await stub.PushWeights(iter(requests), timeout=60)
        await push(router.address, "math", 1)


async def test_a_gateway_that_names_revisions_learns_which_are_lost_and_keeps_the_others(
    router: ServiceProcess,
) -> None:
    load = router_pb2.ReplicaLoad()
    hello = router_pb2.ReplicaHello(
        replica_id="g",
        kind=router_pb2.REPLICA_KIND_GATEWAY,
        address="127.0.0.1:1",
        model="policy",
    )
    async with AsyncExitStack() as stack:
        engine = await engine_with_room(stack, router.address, "engine")
        member = await stack.enter_async_context(Membership(router.address, hello, lambda: load))
        await member.wait_registered()
        for version in (1, 2, 3):
            await push(router.address, "math", version)
        for version in (1, 2):
            load.pinned_adapters.add(name="math", version=version)
        assert await member.name_adapters() == {("math", 1)}
        for version in (4, 5):
            await push(router.address, "math", version)
        await engine.until_holding(("math", 2), ("math", 4), ("math", 5))


async def test_a_peer_keeps_the_same_revisions(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(tmp_path / "a"))
        second = await stack.enter_async_context(
            running_router(tmp_path / "b", peers=first.address)
        )
        engine = await engine_with_room(stack, first.address, "engine")
        await push(first.address, "math", 1)
        await until(lambda: retained_by(second.address))
        await first.kill()
        late = await engine_with_room(stack, second.address, "late")
        await late.until_holding(("math", 1))
        assert late.files == engine.files
        await push(second.address, "math", 2)
        await late.until_holding(("math", 1), ("math", 2))


async def test_an_engine_that_hangs_holds_up_neither_others_nor_the_end_of_a_router(
    router: ServiceProcess,
) -> None:
    async with AsyncExitStack() as stack:
        well = await engine_with_room(stack, router.address, "well")
        hung, other = [
            await engine_with_room(stack, router.address, name) for name in ("hung", "other")
        ]
        hung.hangs.clear()
        pushing = asyncio.create_task(push(router.address, "math", 1))
        await well.until_holding(("math", 1))
        await until(lambda: retained_by(router.address))
        await hung.member.leave()
        assert {one.engine_id: reason_of(one) for one in await pushing} == {
            "well": "",
            "hung": "SUPERSEDED",
            "other": "",
        }
        other.hangs.clear()
        late = asyncio.create_task(push(router.address, "math", 2))
        await well.until_holding(("math", 1), ("math", 2))
        async with asyncio.timeout(60):
            assert await router.terminate() == 0
        await asyncio.gather(late, return_exceptions=True)


async def test_only_engines_that_hold_a_revision_are_leased_for_it(
    router: ServiceProcess,
) -> None:
    adapter = sampling_pb2.AdapterRef(name="math", version=1)
    async with AsyncExitStack() as stack:
        leases = await stack.enter_async_context(LeaseClient(router.address, "g"))
        for number in range(3):
            await stack.enter_async_context(noting_engine(router.address, f"without-{number}"))
        slow = await engine_with_room(stack, router.address, "slow")
        with pytest.raises(AdapterUnknownError):
            async with leases.lease(session_id="s", adapter=adapter, deadline_ms=60_000):
                pass
        await push(router.address, "math", 1)
        for session in ("s", "t", "u"):
            lease = leases.lease(session_id=session, adapter=adapter, deadline_ms=60_000)
            async with lease as grant:
                assert grant.engine_id == "slow"
        await slow.member.leave()
        await until(lambda: has_left(router.address, "slow"))
        waiting = asyncio.create_task(
            stack.enter_async_context(
                leases.lease(session_id="s", adapter=adapter, deadline_ms=60_000)
            )
        )
        await engine_with_room(stack, router.address, "late")
        assert (await waiting).engine_id == "late"
