"""Several collectors on one store: gateways and trainers learn them, and leave those that die."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import Client, MeshAddresses, SubscribeOptions, Subscription
from rollmesh.runtime.errors import ConsumerUnknownError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, router_pb2, router_pb2_grpc
from tests.collector.postgres_server import postgres_database
from tests.faults.proxy import proxy_to
from tests.meshes import Mesh
from tests.processes import ServiceProcess, reserved_port, running, started
from tests.waiting import until

ASK: list[Any] = [{"role": "user", "content": "plain"}]
LATEST = SubscribeOptions(start=pb.Position(end=pb.LOG_END_LATEST))
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Fleet:
    """A mesh in which only the router's address is known, and its store."""

    def __init__(self, mesh: Mesh, store: str) -> None:
        self.mesh = mesh
        self.store = store
        self.addresses = MeshAddresses(router=mesh.address("router"))

    def collector(self, folder: Path, **flags: Any) -> AbstractAsyncContextManager[ServiceProcess]:
        settings = {"router": self.mesh.address("router"), "store": self.store, **flags}
        return running("collector", folder, **settings)

    async def rollout(self, client: Client) -> str:
        """Runs a session of one turn. Returns its id once it is closed."""
        session = await client.open_session(client.session_request())
        agent = self.mesh.openai(session)
        await agent.chat.completions.create(model="policy", messages=ASK)
        await client.close_session(session)
        return session.session_id


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("many-collectors")
    async with postgres_database() as database, AsyncExitStack() as stack:
        mesh = Mesh(folder, tokenizer_dir, stack)
        router = mesh.address("router")
        await mesh.start("router")
        await mesh.start("engine")
        await mesh.start("gateway", collector="")
        await mesh.start("sidecar", gateway="", router=router)
        yield Fleet(mesh, database.url)


async def read(subscription: Subscription, count: int) -> list[str]:
    """Takes and acknowledges deliveries. Returns their ids."""
    ids: list[str] = []
    async with asyncio.timeout(90):
        for _ in range(count):
            delivery = await anext(subscription)
            ids.append(delivery.delivery_id)
            await subscription.acknowledge(delivery)
    return ids


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        pytest.param("collector-mid-ingest", signal.SIGKILL, id="killed-mid-ingest"),
        pytest.param("collector-before-ack", signal.SIGKILL, id="killed-after-the-commit"),
        pytest.param("collector-before-ack", signal.SIGSTOP, id="stopped-after-the-commit"),
        pytest.param("collector-after-delivery", signal.SIGKILL, id="killed-mid-delivery"),
        pytest.param("collector-after-delivery", signal.SIGSTOP, id="stopped-mid-delivery"),
        pytest.param(
            "collector-after-acknowledgement", signal.SIGKILL, id="killed-after-an-acknowledgement"
        ),
    ],
)
async def test_a_collector_that_dies_is_left_for_another_and_each_session_comes_once(
    fleet: Fleet, tmp_path: Path, fault: str, number: signal.Signals
) -> None:
    consumer = f"trainer-{tmp_path.name}"
    async with (
        fleet.collector(tmp_path / "first", fault=fault) as first,
        Client(fleet.addresses) as client,
        client.subscribe(consumer, unit="session", options=LATEST) as subscription,
    ):

        async def subscribed() -> bool:
            return consumer in [one.name for one in await client.consumers()]

        await until(subscribed)
        reading = asyncio.ensure_future(read(subscription, 3))
        sessions = [await fleet.rollout(client) for _ in range(3)]
        await first.wait_line("FAULT")
        async with fleet.collector(tmp_path / "second") as second:
            os.kill(first.pid, number)
            assert sorted(await reading) == sorted(sessions)
            sessions.append(await fleet.rollout(client))
            assert await read(subscription, 1) == sessions[3:]
            async with Client(MeshAddresses(collector=second.address)) as at_second:
                stats = await at_second.stats()
                (mine,) = [one for one in stats.consumers if one.name == consumer]
                assert (mine.acknowledged, mine.ready, mine.leased) == (4, 0, 0)


async def test_addresses_may_be_given_and_one_of_them_be_dead(fleet: Fleet, tmp_path: Path) -> None:
    with reserved_port() as dead:
        nobody = f"127.0.0.1:{dead.getsockname()[1]}"
        async with fleet.collector(tmp_path) as collector:
            addresses = MeshAddresses(collector=f"{nobody}, {collector.address}")
            async with (
                Client(addresses) as client,
                client.subscribe("given", unit="session") as subscription,
            ):
                await anext(subscription)
                assert "given" in [one.name for one in await client.consumers()]


@pytest.mark.long
async def test_a_collector_whose_host_is_gone_is_left_for_another(
    fleet: Fleet, tmp_path: Path
) -> None:
    with reserved_port() as port:
        heir = f"127.0.0.1:{port.getsockname()[1]}"  # nobody is there yet
        async with (
            fleet.collector(tmp_path / "first", router="") as first,
            proxy_to(first.address) as proxy,
            Client(fleet.addresses) as client,
            Subscription(
                f"{proxy.address},{heir}", consumer="moves", unit="session", options=LATEST
            ) as subscription,
            Client(MeshAddresses(collector=first.address)) as at_first,
        ):

            async def subscribed() -> bool:
                stats = await at_first.stats()
                return any(one.name == "moves" and one.streams for one in stats.consumers)

            await until(subscribed)
            proxy.silence()
            async with fleet.collector(tmp_path / "heir", port=heir.rpartition(":")[2]):
                session = await fleet.rollout(client)
                assert await read(subscription, 1) == [session]


async def test_a_trainer_needs_no_address_but_the_routers(fleet: Fleet, tmp_path: Path) -> None:
    async with fleet.collector(tmp_path), Client(fleet.addresses) as client:
        infos = await client.server_infos()
        assert {name: one.service.rpartition(".")[2] for name, one in infos.items()} == {
            "router": "RouterService",
            "gateway": "GatewayService",
            "collector": "CollectorService",
        }
        async with client.subscribe("alone", unit="session", options=LATEST) as subscription:
            session_id = await fleet.rollout(client)
            await client.set_rewards(session_id, reward=0.5)
            assert await read(subscription, 1) == [session_id]
            assert (await client.stored_session(session_id)).reward == 0.5
        await client.delete_consumer("alone")
        with pytest.raises(ConsumerUnknownError):
            await client.delete_consumer("alone")


async def test_a_collector_of_another_store_is_refused_and_says_so(
    fleet: Fleet, tmp_path: Path
) -> None:
    async with fleet.collector(tmp_path / "first") as first:
        router = fleet.mesh.address("router")
        folder = tmp_path / "other"
        async with started(
            "collector", folder, port=0, router=router, data_dir=folder / "data"
        ) as other:
            assert await other.exit_code() == 1
        said = (folder / "collector.log").read_text()
        expected = f"store_id: is another one than that of the collector at {first.address}"
        assert f"rollmesh collector: {expected}" in said


async def test_the_router_lists_members_of_one_kind(fleet: Fleet, tmp_path: Path) -> None:
    async with fleet.collector(tmp_path) as collector:
        async with open_channel(fleet.mesh.address("router")) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)

            async def kinds(kind: router_pb2.ReplicaKind.ValueType) -> list[tuple[int, str]]:
                request = router_pb2.ListReplicasRequest(kind=kind)
                found = (await stub.ListReplicas(request, timeout=60)).replicas
                return [(one.hello.kind, one.hello.address) for one in found]

            only = router_pb2.REPLICA_KIND_COLLECTOR

            async def others_are_gone() -> bool:  # those of earlier tests
                return await kinds(only) == [(only, collector.address)]

            await until(others_are_gone)
            every = await kinds(router_pb2.REPLICA_KIND_UNSPECIFIED)
            assert {kind for kind, _ in every} == {1, 2, 3, 4}
