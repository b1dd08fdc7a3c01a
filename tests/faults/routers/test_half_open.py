"""Connections whose other end is gone without a word: a host that lost its power or its network."""

import asyncio
from pathlib import Path

import pytest

from rollmesh.client import Client, MeshAddresses, Subscription
from rollmesh.mesh import Membership
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, router_pb2
from tests.collector.records import record
from tests.faults.proxy import proxy_to
from tests.processes import running
from tests.waiting import until

_KEEPALIVE_MS = 1000
_TIMEOUT_S = 30  # from the silence on. Half of grpc's default


async def test_an_engine_whose_host_is_gone_leaves_the_mesh(tmp_path: Path) -> None:
    hello = router_pb2.ReplicaHello(
        replica_id="engine-x",
        kind=router_pb2.REPLICA_KIND_ENGINE,
        address="127.0.0.1:9",
        model="policy",
        lease_capacity=1,
    )
    settings = {"port": 0, "data_dir": tmp_path / "router", "keepalive_ms": _KEEPALIVE_MS}
    async with (
        running("router", tmp_path, **settings) as router,
        proxy_to(router.address) as proxy,
        Membership(proxy.address, hello, router_pb2.ReplicaLoad) as member,
        Client(MeshAddresses(router=router.address, gateway="", collector="", sidecar="")) as sdk,
    ):
        await member.wait_registered()
        assert len((await sdk.replicas()).replicas) == 1
        proxy.silence()

        async def it_is_forgotten() -> bool:
            return not (await sdk.replicas()).replicas

        await until(it_is_forgotten, _TIMEOUT_S)


async def test_a_trainer_gets_units_lost_with_a_connection_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rollmesh.mesh.collectors.SHORT_KEEPALIVE_MS", _KEEPALIVE_MS
    )  # of the trainer
    settings = {"port": 0, "data_dir": tmp_path / "collector", "keepalive_ms": _KEEPALIVE_MS}
    async with (
        running("collector", tmp_path, **settings) as collector,
        proxy_to(collector.address) as proxy,
        open_channel(collector.address) as channel,
        Subscription(proxy.address, consumer="trainer", unit="session") as deliveries,
    ):
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        await stub.Ingest(collector_pb2.IngestRequest(sessions=[record("a")]))
        first = await anext(deliveries)
        await deliveries.acknowledge(first)
        proxy.silence()
        async with asyncio.timeout(_TIMEOUT_S):
            await stub.Ingest(collector_pb2.IngestRequest(sessions=[record("b")]))
            second = await anext(deliveries)
            await deliveries.acknowledge(second)
        assert (second.delivery_id, second.attempt) == ("b", 2)
