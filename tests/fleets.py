"""A mesh whose gateways share a database, as real processes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, MeshAddresses, Session, SessionResult
from rollmesh.mesh import journal_of
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, router_pb2, router_pb2_grpc
from tests.collector.postgres_server import Database, postgres_database
from tests.meshes import Mesh, write_script
from tests.processes import ServiceProcess, running
from tests.waiting import until

_PATIENT = {"takeover_wait_ms": 120_000}
"""Of a sidecar: on a busy machine, another gateway takes its time to start."""


@dataclass
class Fleet:
    """A mesh with two gateways on one database, found through the router."""

    mesh: Mesh
    database: Database
    client: Client
    lease_ms: int

    async def start_gateway(self, name: str, **flags: object) -> ServiceProcess:
        """Starts a gateway that has nothing but the database."""
        mesh = self.mesh
        process = await mesh.stack.enter_async_context(
            running(
                "gateway",
                mesh.folder / name,
                gateway_id=name,
                router=mesh.address("router"),
                collector=mesh.address("collector"),
                model_path=mesh.model,
                journal=self.database.url,
                journal_lease_ms=self.lease_ms,
                **flags,
            )
        )
        mesh.processes[name] = process
        return process

    async def owners(self) -> dict[str, tuple[int, str]]:
        """The epoch and the gateway of each journal, as the router knows them."""
        async with open_channel(self.mesh.address("router")) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            response = await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=60)
        owners: dict[str, tuple[int, str]] = {}
        for gateway in response.gateways:
            for served in gateway.journals:
                found = (served.epoch, gateway.gateway_id)
                owners[served.journal_id] = max(found, owners.get(served.journal_id, (0, "")))
        return owners

    async def live_sessions(self) -> int:
        """Number of open sessions of all gateways, as they say."""
        total = 0
        for name, process in self.mesh.processes.items():
            if name.startswith("gateway") and process.is_running:
                async with open_channel(process.address) as channel:
                    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                    info = await stub.GetGatewayInfo(
                        gateway_pb2.GetGatewayInfoRequest(), timeout=30
                    )
                total += info.live_sessions
        return total

    async def owner(self, session: Session) -> str:
        """The gateway that serves a session."""
        return (await self.owners()).get(journal_of(session.session_id), (0, ""))[1]

    async def session_at(self, name: str) -> Session:
        """A session that the router placed on a gateway."""

        async def opened() -> Any:
            session = await self.client.open_session(self.client.session_request())
            return session if await self.owner(session) == name else None

        session: Session = await until(opened)
        return session

    def agent(self, session: Session, **settings: Any) -> openai.AsyncOpenAI:
        address = self.mesh.processes["sidecar"].address
        return self.mesh.agent(
            f"http://{address}/sessions/{session.api_key}/v1", "none", **settings
        )

    async def results(self, count: int) -> dict[str, SessionResult]:
        """What a trainer gets of the closed sessions."""
        found: dict[str, SessionResult] = {}
        async with self.client.subscribe("audit", unit="session") as deliveries:
            async with asyncio.timeout(120):
                while len(found) < count:
                    delivery = await anext(deliveries)
                    await deliveries.acknowledge(delivery)
                    (result,) = delivery.sessions
                    assert result.session_id not in found
                    found[result.session_id] = result
        return found


@asynccontextmanager
async def gateway_fleet(
    folder: Path, model: Path, rules: Sequence[tuple[str, str]], lease_ms: int
) -> AsyncIterator[Fleet]:
    """Runs gateway-0 and gateway-1, and what they need. `rules` as for `scripted_mesh`."""
    write_script(folder / "script.json", Tokenizer(model), rules)
    async with postgres_database() as database, AsyncExitStack() as stack:
        mesh = Mesh(folder, model, stack)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mesh.start("router"))
            tasks.create_task(mesh.start("collector"))
        router = mesh.address("router")
        addresses = MeshAddresses(
            router=router, collector=mesh.address("collector"), sidecar=mesh.address("sidecar")
        )
        async with Client(addresses) as client:
            fleet = Fleet(mesh, database, client, lease_ms)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(mesh.start("engine", tokens_per_second=100))
                tasks.create_task(mesh.start("sidecar", gateway="", router=router, **_PATIENT))
                tasks.create_task(fleet.start_gateway("gateway-0"))
                tasks.create_task(fleet.start_gateway("gateway-1"))
            yield fleet
