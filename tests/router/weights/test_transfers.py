"""What the router does with weights that the trainer sends itself, by a transfer backend."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses, Transfer, WeightsPushError
from rollmesh.client.sync import Client as SyncClient
from rollmesh.integrations.vllm_transfer import MeshWeightSync
from rollmesh.mesh import Membership
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2
from tests.processes import ServiceProcess, running
from tests.router.engines import reason_of
from tests.router.routers import running_router
from tests.waiting import until, until_says

UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
NCCL = Transfer("nccl", [UPDATE])
TENSORS = {"w": np.zeros(1, np.float32)}


class Mesh:
    """A router and scripted engines that act as if they had a backend."""

    def __init__(self, folder: Path, stack: AsyncExitStack, router: ServiceProcess) -> None:
        self._folder, self._stack, self._router = folder, stack, router
        self.log = folder / "router.log"
        self.addresses = MeshAddresses(
            router=router.address, gateway="-", collector="-", sidecar="-"
        )

    async def add(self, engine_id: str, backend: str = "nccl") -> None:
        await self._stack.enter_async_context(
            running(
                "engine",
                self._folder,
                backend="scripted",
                engine_id=engine_id,
                weight_transfer=backend,
                router=self._router.address,
            )
        )


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        yield Mesh(tmp_path, stack, router)


async def replicas(client: Client, count: int) -> dict[str, router_pb2.Replica]:
    async def look() -> list[router_pb2.Replica]:
        found = (await client.replicas()).replicas
        return list(found) if len(found) >= count else []

    return {one.hello.replica_id: one for one in await until(look)}


def said(results: list[engine_pb2.EngineResult]) -> dict[str, str]:
    return {result.engine_id: reason_of(result) for result in results}


async def test_each_engine_gets_its_own_init_info(mesh: Mesh) -> None:
    await mesh.add("a")
    await mesh.add("b")
    async with Client(mesh.addresses) as client:
        await replicas(client, 2)
        with pytest.raises(WeightsPushError, match="rank_offset") as caught:
            await client.init_weight_transfer("nccl", {}, {"b": {"rank_offset": 2}})
        assert said(caught.value.results) == {"a": "WEIGHT_TRANSFER_FAILED", "b": ""}
        with pytest.raises(InvalidFieldError, match="c: not registered"):
            await client.init_weight_transfer("nccl", {}, {"c": {"rank_offset": 2}})


async def test_a_transfer_that_no_engine_took_fences_no_engine(mesh: Mesh) -> None:
    await mesh.add("plain", backend="")
    await mesh.add("late")
    async with Client(mesh.addresses) as client:
        await replicas(client, 2)
        with pytest.raises(WeightsPushError) as caught:  # none, and not joined
            await client.push_weights(NCCL, 1)
        assert set(said(caught.value.results).values()) == {"WEIGHT_TRANSFER_FAILED"}
        with pytest.raises(WeightsPushError, match="at least one object"):
            await client.push_weights(Transfer("nccl", ["no object"]), 1)
        assert not any(one.fenced for one in (await replicas(client, 2)).values())
        await client.push_weights(TENSORS, 1)  # the version is still free


async def test_an_engine_that_missed_a_transfer_is_left_out_until_the_next_push(mesh: Mesh) -> None:
    await mesh.add("a")
    async with Client(mesh.addresses) as client:
        await replicas(client, 1)
        await client.init_weight_transfer("nccl", {"rank_offset": 1})
        await mesh.add("b", backend="")
        await replicas(client, 2)
        results = await client.push_weights(NCCL, 1, allow_partial=True)
        assert said(results) == {"a": "", "b": "WEIGHT_TRANSFER_FAILED"}
        await mesh.add("c")  # comes later: the router has nothing to give it
        found = await replicas(client, 3)
        assert {name: one.fenced for name, one in found.items()} == {
            "a": False,
            "b": True,
            "c": True,
        }
        await until_says(mesh.log, "a transfer cannot be repeated")
        await client.push_weights(TENSORS, 2)
        assert not any(one.fenced for one in (await replicas(client, 3)).values())


class Noting(engine_pb2_grpc.EngineServiceServicer):
    """An engine that takes every update and notes its version."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> Any:
        versions = [request.header.policy_version async for request in request_iterator]
        self.updates.append(versions[0])
        return engine_pb2.UpdateWeightsResponse(policy_version=versions[0])


async def test_a_transfer_that_is_over_is_sent_to_no_engine_that_comes_later(mesh: Mesh) -> None:
    late = Noting()  # type: ignore[abstract]  # the other methods are not called
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(late, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    hello = router_pb2.ReplicaHello(
        replica_id="late",
        kind=router_pb2.REPLICA_KIND_ENGINE,
        address=f"127.0.0.1:{port}",
        model="policy",
        lease_capacity=1,
    )
    await mesh.add("a")
    async with Client(mesh.addresses) as client:
        await replicas(client, 1)
        await client.init_weight_transfer("nccl", {"rank_offset": 1})
        await client.push_weights(NCCL, 1)
        async with Membership(mesh.addresses.router, hello, router_pb2.ReplicaLoad):
            await replicas(client, 2)
            await client.push_weights(TENSORS, 2)
    assert late.updates == [2]
    await server.stop(None)


async def test_vllms_client_gives_every_engine_its_ranks_and_version(mesh: Mesh) -> None:
    await mesh.add("a")
    await mesh.add("b")
    async with Client(mesh.addresses) as client:
        await replicas(client, 2)
    await asyncio.to_thread(_drive, mesh.addresses)
    async with Client(mesh.addresses) as client:

        async def reported() -> bool:  # an engine answers before it reports
            loads = [one.hello.load for one in (await replicas(client, 2)).values()]
            return [load.policy_version for load in loads] == [7, 7]

        await until(reported)


def _drive(addresses: MeshAddresses) -> None:
    """Calls what vLLM's trainer side calls."""
    with SyncClient(addresses) as client:
        sync = MeshWeightSync(client, "nccl", ranks_per_engine=4)
        assert sync.ranks == 8
        sync.init_weight_transfer_engine({"rank_offset": 1, "world_size": 9})
        for version in (6, 7):
            sync.policy_version = version
            sync.start_weight_update()
            sync.update_weights(UPDATE)
            sync.finish_weight_update()


class Calls:
    """Replaces the SDK's client and records its calls."""

    def __init__(self) -> None:
        self.inits: list[tuple[Any, ...]] = []
        self.pushes: list[tuple[Any, ...]] = []

    def replicas(self) -> router_pb2.ListReplicasResponse:
        kinds = {
            "b": router_pb2.REPLICA_KIND_ENGINE,
            "gateway": router_pb2.REPLICA_KIND_GATEWAY,
            "a": router_pb2.REPLICA_KIND_ENGINE,
        }
        hellos = [
            router_pb2.ReplicaHello(replica_id=id_, kind=kinds[id_], model="policy")
            for id_ in kinds
        ]
        judge = router_pb2.REPLICA_KIND_ENGINE
        hellos.append(router_pb2.ReplicaHello(replica_id="c", kind=judge, model="judge"))
        return router_pb2.ListReplicasResponse(
            replicas=[router_pb2.Replica(hello=hello) for hello in hellos],
            models=[router_pb2.ModelWeights(model=name) for name in ("judge", "policy")],
        )

    def init_weight_transfer(self, *given: Any, by_engine: Any, model: str) -> None:
        self.inits.append((*given, by_engine, model))

    def push_weights(self, *given: Any, mode: str, model: str) -> None:
        self.pushes.append((*given, mode, model))


def test_ranks_are_counted_over_the_engines_of_a_model_in_order_of_their_names() -> None:
    calls: Any = Calls()
    sync = MeshWeightSync(calls, "nccl", ranks_per_engine=4, model="policy")
    assert sync.ranks == 8
    info = {"rank_offset": 1, "world_size": 9}
    sync.init_weight_transfer_engine(info)
    own = {"a": {"rank_offset": 1}, "b": {"rank_offset": 5}}
    assert calls.inits == [("nccl", info, own, "policy")]
    with pytest.raises(InvalidFieldError, match="judge, policy"):
        MeshWeightSync(calls, "nccl")


def test_each_push_has_a_version_of_its_own_and_comes_whole() -> None:
    calls: Any = Calls()
    sync = MeshWeightSync(calls, "nccl", mode="wait", model="policy")
    with pytest.raises(InvalidFieldError, match="policy_version"):
        sync.start_weight_update()
    sync.policy_version = 7
    sync.start_weight_update()
    sync.update_weights(UPDATE)
    with pytest.raises(InvalidFieldError, match="packed=False"):
        sync.update_weights(UPDATE)
    with pytest.raises(InvalidFieldError, match="weight_version"):
        sync.finish_weight_update("other")
    sync.finish_weight_update("7")
    assert calls.pushes == [(NCCL, 7, "wait", "policy")]
    with pytest.raises(InvalidFieldError, match="policy_version"):
        sync.start_weight_update()
