"""A restored trainer opens a run: its versions go back, and the trainer before it is fenced."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.router import KeptWeights, RouterConfig, RouterService
from rollmesh.runtime import number_of
from rollmesh.runtime.errors import InvalidFieldError, RunAbandonedError, StaleVersionError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from tests.gateway.live import served
from tests.processes import reserved_port
from tests.router.engines import noting_engine
from tests.router.routers import running_router

TENSORS = {"w": np.zeros(1, np.float32)}
CONFIG = {"peft_type": "LORA"}


def client_of(*routers: str) -> Client:
    return Client(MeshAddresses(router=",".join(routers), gateway="", collector="", sidecar=""))


async def test_engines_take_older_weights_of_a_newer_run(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        engine = await stack.enter_async_context(noting_engine(router.address, "early"))
        first = await stack.enter_async_context(client_of(router.address))
        for version in (5, 9):
            await first.push_weights(TENSORS, version)
        restored = await stack.enter_async_context(client_of(router.address))
        run = await restored.open_run(5)
        assert (run.number, run.model, list(run.ancestors)) == (1, "policy", [5])
        assert await restored.policy_version() == 4  # so the next one is that of the checkpoint
        await restored.push_weights(TENSORS, 5)
        assert await restored.policy_version() == 5
        assert [version for version, _ in engine.taken] == [5, 9, number_of(1, 5)]
        late = await stack.enter_async_context(noting_engine(router.address, "late"))
        await late.until_taken(number_of(1, 5))
        assert len(late.taken) == 1
        with pytest.raises(StaleVersionError):
            await restored.push_weights(TENSORS, 5)
        await restored.push_weights(TENSORS, 6)


async def test_a_run_whose_caller_left_is_stored_before_another_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, gate, open_run = threading.Event(), threading.Event(), KeptWeights.open_run

    def held(kept: KeptWeights, run: sampling_pb2.PolicyRun, request_id: str) -> None:
        if not stores.is_set():
            stores.set()
            assert gate.wait(60)
        open_run(kept, run, request_id)

    monkeypatch.setattr(KeptWeights, "open_run", held)
    config = RouterConfig(port=0, data_dir=tmp_path, grace_ms=0)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(served(RouterService(config), config))
        await stack.enter_async_context(noting_engine(router, "engine"))
        channel = await stack.enter_async_context(open_channel(router))
        stub = router_pb2_grpc.RouterServiceStub(channel)
        first = router_pb2.OpenRunRequest(model="policy", version=5, request_id="first")
        left = stub.OpenRun(first)
        assert await asyncio.to_thread(stores.wait, 60)
        left.cancel()
        await stub.ListReplicas(router_pb2.ListReplicasRequest())  # the router has heard of it
        second = router_pb2.OpenRunRequest(model="policy", version=5, request_id="second")
        opening = stub.OpenRun(second)
        await stub.ListReplicas(router_pb2.ListReplicasRequest())
        gate.set()
        later, repeated = await opening, await stub.OpenRun(first)
    assert (repeated.run.number, later.run.number) == (1, 2)


async def test_a_trainer_that_still_runs_cannot_push_after_another_was_restored(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        engine = await stack.enter_async_context(noting_engine(router.address, "engine"))
        zombie = await stack.enter_async_context(client_of(router.address))
        await zombie.push_weights(TENSORS, 9)
        restored = await stack.enter_async_context(client_of(router.address))
        await restored.open_run(5)
        with pytest.raises(RunAbandonedError, match=r"run 0 .* run 1 was opened at version 5"):
            await zombie.push_weights(TENSORS, 10)
        pushed = await asyncio.gather(
            zombie.push_weights(TENSORS, 11),
            restored.push_weights(TENSORS, 5),
            return_exceptions=True,
        )
        assert isinstance(pushed[0], RunAbandonedError)
        assert [version for version, _ in engine.taken] == [9, number_of(1, 5)]


async def test_a_run_survives_a_router_that_is_killed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        engine = await stack.enter_async_context(noting_engine(router.address, "engine"))
        old = await stack.enter_async_context(client_of(router.address))
        await old.push_weights(TENSORS, 9)
        restored = await stack.enter_async_context(client_of(router.address))
        run = await restored.open_run(5, request_id="attempt-2")
        await router.kill()
        router = await stack.enter_async_context(running_router(tmp_path, port=router.port))
        await engine.until_registered()
        other = await stack.enter_async_context(client_of(router.address))
        assert await other.open_run(5, request_id="attempt-2") == run  # another rank
        with pytest.raises(RunAbandonedError):
            await old.push_weights(TENSORS, 10)
        await restored.push_weights(TENSORS, 5)
        assert engine.taken[-1][0] == number_of(1, 5)


async def test_a_router_that_lost_its_folder_opens_a_run_above_that_of_the_engines(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        load = router_pb2.ReplicaLoad(policy_version=number_of(4, 2), push_id="lost")
        engine = await stack.enter_async_context(noting_engine(router.address, "e", load=load))
        client = await stack.enter_async_context(client_of(router.address))
        state = {"policy_run": {"number": 2, "ancestors": [7]}}
        run = await client.open_run(8, state=state)
        assert (run.number, list(run.ancestors)) == (5, [7, number_of(2, 8)])
        await client.push_weights(TENSORS, 8)
        assert engine.load.policy_version == number_of(5, 8)


async def test_two_trainers_that_open_runs_at_two_routers_get_two_runs(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        holders = [stack.enter_context(reserved_port()) for _ in range(2)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in holders]
        for at, address in enumerate(addresses):
            port, folder = address.rpartition(":")[2], tmp_path / f"router-{at}"
            await stack.enter_async_context(
                running_router(folder, port=port, peers=addresses[1 - at])
            )
        engine = await stack.enter_async_context(noting_engine(",".join(addresses), "engine"))
        clients = [
            await stack.enter_async_context(client_of(*addresses[at:], *addresses[:at]))
            for at in range(2)
        ]
        await clients[0].push_weights(TENSORS, 3)
        runs = await asyncio.gather(*(one.open_run(3) for one in clients))
        assert sorted(one.number for one in runs) == [1, 2]
        later = clients[runs[0].number < runs[1].number]
        (earlier,) = [one for one in clients if one is not later]
        with pytest.raises(RunAbandonedError):
            await earlier.push_weights(TENSORS, 4)
        await later.push_weights(TENSORS, 4)
        assert engine.taken[-1][0] == number_of(2, 4)


async def test_an_adapter_has_runs_of_its_own(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        engine = await stack.enter_async_context(
            noting_engine(router.address, "engine", max_adapters=6)
        )
        first = await stack.enter_async_context(client_of(router.address))
        for name, version in (("math", 6), ("code", 3)):
            await first.push_adapter(TENSORS, name, version, CONFIG)
        restored = await stack.enter_async_context(client_of(router.address))
        await restored.open_run(2, adapter="math")
        assert await restored.policy_version(adapter="math") == 1
        await restored.push_adapter(TENSORS, "math", 2, CONFIG)
        assert await restored.policy_version(adapter="math") == 2
        assert ("math", number_of(1, 2)) in engine.adapters
        with pytest.raises(RunAbandonedError, match=r"header\.adapter\.version"):
            await first.push_adapter(TENSORS, "math", 7, CONFIG)
        await first.push_adapter(TENSORS, "code", 4, CONFIG)
        await restored.unload_adapter("math", 2)
        assert ("math", number_of(1, 2)) not in engine.adapters


async def test_a_difference_to_weights_of_an_abandoned_run_becomes_whole_weights(
    tmp_path: Path,
) -> None:
    weights = {"w": np.zeros(1000, np.float32)}
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        engine = await stack.enter_async_context(noting_engine(router.address, "engine"))
        client = await stack.enter_async_context(client_of(router.address))
        await client.push_weights(weights, 1, delta=True)
        await client.open_run(1)
        await client.push_weights(weights, 1, delta=True)
        await client.push_weights(weights, 2, delta=True)
        first, again, difference = [len(data) for _, data in engine.taken]
        assert first == again > 4 * difference


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"version": -1}, "version"),
        ({"version": 10**12}, "version"),
        ({"version": 1, "model": "other"}, "model"),
        ({"version": 1, "adapter": "a" * 65}, "adapter.name"),
        ({"version": 1, "parent": sampling_pb2.PolicyRun(ancestors=[1])}, "parent.ancestors"),
    ],
)
async def test_a_run_that_cannot_be_opened_names_the_field(
    tmp_path: Path, given: dict[str, object], field: str
) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        await stack.enter_async_context(noting_engine(router.address, "engine"))
        request = router_pb2.OpenRunRequest(request_id="r", **given)  # type: ignore[arg-type]
        async with open_channel(router.address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            with pytest.raises(InvalidFieldError) as caught, typed_errors():
                await stub.OpenRun(request, timeout=60)
        assert caught.value.field == field


async def test_a_version_of_a_run_that_is_not_open_is_refused(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        await stack.enter_async_context(noting_engine(router.address, "engine"))
        client = await stack.enter_async_context(client_of(router.address))
        client.follow_run(sampling_pb2.PolicyRun(number=3, model="policy"))
        with pytest.raises(InvalidFieldError, match="of run 3, which is not open"):
            await client.push_weights(TENSORS, 1)
