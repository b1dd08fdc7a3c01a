"""The weights that a router keeps: those that were accepted, whatever befalls a push."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.mesh import LeaseClient
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    StaleVersionError,
    StoreFullError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc
from tests.processes import ServiceProcess
from tests.router.engines import noting_engine, reason_of
from tests.router.routers import running_router
from tests.waiting import until, until_says

FIRST, SECOND, THIRD = b"first" * 100, b"second" * 100, b"third" * 100
SILENCE_MS = 3_000
TENSORS = {"w": np.zeros(1, np.float32)}


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running_router(tmp_path, push_silence_ms=SILENCE_MS) as process:
        yield process


def sdk(router: ServiceProcess) -> Client:
    return Client(MeshAddresses(router=router.address, gateway="", collector="", sidecar=""))


def messages(
    version: int, data: bytes, *, mode: engine_pb2.PauseMode.ValueType, size: int | None = None
) -> list[router_pb2.PushWeightsRequest]:
    header = router_pb2.PushWeightsHeader(
        policy_version=version,
        pause_mode=mode,
        safetensors_bytes=len(data) if size is None else size,
    )
    pieces = [data[at : at + 100] for at in range(0, len(data), 100)]
    return [
        router_pb2.PushWeightsRequest(header=header),
        *(router_pb2.PushWeightsRequest(safetensors_chunk=piece) for piece in pieces),
    ]


async def push(
    router: str,
    version: int,
    data: bytes,
    *,
    mode: engine_pb2.PauseMode.ValueType = engine_pb2.PAUSE_MODE_KEEP,
    size: int | None = None,
    then: asyncio.Event | None = None,
) -> router_pb2.PushWeightsResponse:
    """Pushes bytes. With `then` it falls silent after them until that is set."""

    async def parts() -> AsyncIterator[router_pb2.PushWeightsRequest]:
        for message in messages(version, data, mode=mode, size=size):
            yield message
        if then is not None:
            await then.wait()

    async with open_channel(router) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).PushWeights(parts(), timeout=60)
        with typed_errors(call):
            return await call


async def until_receiving(folder: Path) -> None:
    await until(lambda: list(folder.rglob("*.part")))


async def test_after_a_refused_push_a_late_engine_gets_the_weights_of_the_others(
    router: ServiceProcess,
) -> None:
    async with AsyncExitStack() as stack:
        early = await stack.enter_async_context(noting_engine(router.address, "early"))
        await push(router.address, 1, FIRST)
        early.refuses = True
        answer = await push(router.address, 2, SECOND)
        assert [reason_of(result) for result in answer.results] == ["INVALID_WEIGHTS"]
        with pytest.raises(InvalidFieldError) as caught:
            await push(router.address, 2, SECOND, mode=engine_pb2.PAUSE_MODE_UNSPECIFIED)
        assert caught.value.field == "header.pause_mode"
        late = await stack.enter_async_context(noting_engine(router.address, "late"))
        await late.until_taken(1)
        assert late.taken == [(1, FIRST)]


async def test_other_weights_never_get_a_version_that_an_engine_may_have_loaded(
    tmp_path: Path,
) -> None:
    async with running_router(tmp_path) as router:
        async with noting_engine(router.address, "engine") as engine:
            await push(router.address, 1, FIRST)
            engine.hangs.clear()
            unknown = asyncio.create_task(push(router.address, 2, SECOND))
            await until(lambda: engine.calls == 2)
            engine.refuses = True
            later = asyncio.create_task(push(router.address, 3, THIRD))
            await until(lambda: engine.calls == 3)
            engine.hangs.set()
            reasons = [reason_of((await one).results[0]) for one in (unknown, later)]
            assert reasons == ["SUPERSEDED", "INVALID_WEIGHTS"]
            with pytest.raises(StaleVersionError, match="2 is not above 2"):
                await push(router.address, 2, THIRD)
    async with running_router(tmp_path, port=router.port) as router, sdk(router) as client:
        async with noting_engine(router.address, "engine") as engine:
            await engine.until_taken(1)
            with pytest.raises(StaleVersionError, match="2 is not above 2"):
                await push(router.address, 2, THIRD)
            await push(router.address, 3, THIRD)
            assert engine.taken == [(1, FIRST), (3, THIRD)]
            await client.forget_weights()
            await push(router.address, 1, FIRST)


async def test_a_router_killed_during_a_push_keeps_the_former_weights(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_router(tmp_path))
        async with noting_engine(first.address, "early"):
            await push(first.address, 1, FIRST)
            more = asyncio.Event()
            pushing = asyncio.create_task(
                push(first.address, 2, SECOND[:300], size=len(SECOND), then=more)
            )
            await until_receiving(tmp_path)
            await first.kill()
            more.set()
            await asyncio.gather(pushing, return_exceptions=True)
        port = first.port
        second = await stack.enter_async_context(running_router(tmp_path, port=port))
        late = await stack.enter_async_context(noting_engine(second.address, "late"))
        await late.until_taken(1)
        assert late.taken == [(1, FIRST)]
        assert not list(tmp_path.rglob("*.part"))


async def test_loaded_weights_are_accepted_after_the_router_died_before_it_knew(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            running_router(tmp_path, fault="router-before-accept:2")
        )
        early = await stack.enter_async_context(noting_engine(first.address, "early"))
        await push(first.address, 1, FIRST)
        pushing = asyncio.create_task(push(first.address, 2, SECOND))
        await first.wait_line("FAULT router-before-accept")
        await first.kill()
        await asyncio.gather(pushing, return_exceptions=True)
        second = await stack.enter_async_context(running_router(tmp_path, port=first.port))
        late = await stack.enter_async_context(noting_engine(second.address, "late"))
        await late.until_taken(2)
        assert late.taken[-1] == (2, SECOND)
        assert early.taken == [(1, FIRST), (2, SECOND)]
        with pytest.raises(StaleVersionError):
            await push(second.address, 2, THIRD)


async def test_an_engine_with_other_bytes_of_the_same_version_gets_the_accepted_bytes(
    router: ServiceProcess,
) -> None:
    async with AsyncExitStack() as stack:
        early = await stack.enter_async_context(noting_engine(router.address, "early"))
        await push(router.address, 1, FIRST)
        stranger = await stack.enter_async_context(
            noting_engine(
                router.address,
                "stranger",
                load=router_pb2.ReplicaLoad(policy_version=1, push_id="x"),
            )
        )
        await stranger.until_taken(1)
        assert early.taken == stranger.taken == [(1, FIRST)]


async def test_a_push_that_falls_silent_keeps_no_other_waiting(
    router: ServiceProcess, tmp_path: Path
) -> None:
    async with noting_engine(router.address, "engine") as engine:
        more = asyncio.Event()
        silent = asyncio.create_task(
            push(router.address, 1, SECOND[:300], size=len(SECOND), then=more)
        )
        await until_receiving(tmp_path)
        await push(router.address, 1, FIRST)
        with pytest.raises(DeadlineError, match="push_silence_ms"):
            await silent
        more.set()
        assert engine.taken == [(1, FIRST)]
        assert not list(tmp_path.rglob("*.part"))


async def test_a_push_is_kept_if_its_only_engine_returns_while_it_is_received(
    tmp_path: Path,
) -> None:
    async with running_router(tmp_path) as router, sdk(router) as client:
        more = asyncio.Event()
        async with noting_engine(router.address, "engine"):
            pushing = asyncio.create_task(push(router.address, 1, FIRST, then=more))
            await until_receiving(tmp_path)

        async def is_alone() -> bool:
            return not (await client.replicas()).replicas

        await until(is_alone)
        async with noting_engine(router.address, "engine") as engine:
            await engine.until_registered()
            more.set()
            assert (await pushing).policy_version == 1
            assert engine.taken == [(1, FIRST)]
            assert (await client.replicas()).models[0].target_policy_version == 1


async def test_more_bytes_than_announced_are_refused_before_the_push_ends(
    router: ServiceProcess, tmp_path: Path
) -> None:
    async with noting_engine(router.address, "engine"):
        never = asyncio.Event()
        with pytest.raises(InvalidFieldError, match="announced"):
            await push(router.address, 1, FIRST, size=150, then=never)
        with pytest.raises(StoreFullError, match="room"):
            await push(router.address, 1, FIRST, size=2**60)
        assert not list(tmp_path.rglob("*.part"))
        await push(router.address, 1, FIRST)


async def test_an_engine_that_hangs_holds_up_neither_leases_nor_pushes_nor_late_engines(
    router: ServiceProcess,
) -> None:
    async with AsyncExitStack() as stack:
        well = await stack.enter_async_context(noting_engine(router.address, "well"))
        hung = await stack.enter_async_context(noting_engine(router.address, "hung"))
        leases = await stack.enter_async_context(LeaseClient(router.address, "g"))
        hung.hangs.clear()
        first = asyncio.create_task(push(router.address, 1, FIRST))
        await well.until_taken(1)
        late = await stack.enter_async_context(noting_engine(router.address, "late"))
        await late.until_taken(1)
        for session in ("s", "t"):
            async with leases.lease(session_id=session, deadline_ms=60_000) as grant:
                assert (grant.engine_id == "hung", grant.policy_version) == (False, 1)
        second = asyncio.create_task(push(router.address, 2, SECOND))
        await asyncio.gather(well.until_taken(2), late.until_taken(2))
        results = {one.engine_id: reason_of(one) for one in (await first).results}
        assert results == {"well": "", "hung": "SUPERSEDED"}
        hung.hangs.set()
        answer = await second
        assert {reason_of(one) for one in answer.results} == {""}
        assert answer.policy_version == 2
        assert hung.taken[-1] == (2, SECOND)


async def test_an_engine_that_fails_is_left_out_with_the_reason(
    router: ServiceProcess, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(sdk(router))
        await stack.enter_async_context(noting_engine(router.address, "well"))
        bad = await stack.enter_async_context(noting_engine(router.address, "bad"))
        bad.refuses = True
        await push(router.address, 1, FIRST)
        found = {one.hello.replica_id: one for one in (await client.replicas()).replicas}
        assert not found["well"].HasField("exclusion")
        exclusion = found["bad"].exclusion
        assert exclusion.reason == router_pb2.EXCLUSION_REASON_FENCED
        assert "do not fit" in exclusion.explanation
        log = tmp_path / "router.log"
        await until_says(log, "engine update failed")
        assert "brought up to date" not in log.read_text()
        bad.refuses = False
        await bad.until_taken(1)


async def test_the_log_records_the_outcome_of_a_push(
    router: ServiceProcess, tmp_path: Path
) -> None:
    log = tmp_path / "router.log"
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(noting_engine(router.address, "first"))
        await push(router.address, 1, FIRST)
        await until_says(log, "weights pushed")
        await until_says(log, "weights accepted")
        first.refuses = True
        await push(router.address, 2, SECOND)
        await until_says(log, "engine did not take the weights")
        await until_says(log, "weights withdrawn: every engine refused")
        first.refuses = False
        async with noting_engine(router.address, "late") as late:
            await late.until_taken(1)
            await until_says(log, "engine brought up to date")
            late.hangs.clear()
            pushing = asyncio.ensure_future(push(router.address, 2, SECOND))
            await until(lambda: late.calls == 2)
            await late.member.leave()
            await until_says(log, "engine update given up: the engine left")
        assert (await pushing).policy_version == 2
    lines = log.read_text().splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]  # gRPC writes there too
    accepted = [one for one in said if one["event"] == "weights accepted"]
    assert [(one["model"], one["policy_version"]) for one in accepted] == [
        ("policy", 1),
        ("policy", 2),
    ]


async def test_a_version_far_above_the_last_is_refused_until_the_weights_are_forgotten(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        careless = await stack.enter_async_context(running_router(tmp_path, max_version_step=2**39))
        early = await stack.enter_async_context(noting_engine(careless.address, "early"))
        await push(careless.address, 2**38, FIRST)
        await careless.kill()
        router = await stack.enter_async_context(
            running_router(tmp_path, port=careless.port, max_version_step=1000)
        )
        client = await stack.enter_async_context(sdk(router))
        await early.until_registered()
        with pytest.raises(InvalidFieldError, match="max_version_step"):
            await push(router.address, 2**38 + 1001, SECOND)
        with pytest.raises(StaleVersionError):
            await push(router.address, 7, SECOND)
        tool = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollmesh.router", "forget-weights", f"--router={router.address}"
        )
        assert await tool.wait() == 0
        assert await client.policy_version() == 0
        await push(router.address, 7, SECOND)
        assert early.taken[-1] == (7, SECOND)
        late = await stack.enter_async_context(noting_engine(router.address, "late"))
        await late.until_taken(7)


async def test_models_have_weights_of_their_own(router: ServiceProcess) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(sdk(router))
        with pytest.raises(InvalidFieldError, match="no engine or gateway is registered"):
            await client.push_weights(TENSORS, 1)
        a = await stack.enter_async_context(noting_engine(router.address, "a", model="m/a"))
        await client.push_weights(TENSORS, 1)
        b = await stack.enter_async_context(noting_engine(router.address, "b", model="m/b"))
        with pytest.raises(InvalidFieldError, match="m/a, m/b") as caught:
            await client.push_weights(TENSORS, 2)
        assert caught.value.field == "header.model"
        await client.push_weights(TENSORS, 5, model="m/b")
        assert [version for version, _ in a.taken] == [1]
        assert [version for version, _ in b.taken] == [5]
        assert [
            (one.model, one.target_policy_version) for one in (await client.replicas()).models
        ] == [
            ("m/a", 1),
            ("m/b", 5),
        ]


async def test_nothing_is_shown_of_a_model_that_left_without_weights(tmp_path: Path) -> None:
    async with running_router(tmp_path, metrics_port=0) as router, sdk(router) as client:

        async def shown() -> set[str]:
            found = await router.samples("rollmesh_router_target_policy_version")
            return {name.split('"')[1] for name in found}

        async with (
            noting_engine(router.address, "a", model="kept"),
            noting_engine(router.address, "b", model="forgotten"),
        ):
            for model in ("kept", "forgotten"):
                await client.push_weights(TENSORS, 1, model=model)
            await client.forget_weights("forgotten")
            assert await shown() == {"kept", "forgotten"}

        async def is_alone() -> bool:
            return await shown() == {"kept"}

        await until(is_alone)
        assert [one.model for one in (await client.replicas()).models] == ["kept"]
