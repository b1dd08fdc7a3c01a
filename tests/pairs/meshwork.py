"""The mesh of the pairs: two of each service that may be lost, tokens, and kept weights."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, MeshAddresses, Session, Subscription
from rollmesh.runtime.access import CallerConfig, Identity, digest_line
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import server_pb2, server_pb2_grpc
from tests.audited import RETRIES, RULES, Agent
from tests.collector.postgres_server import postgres_database
from tests.locks import Locks
from tests.meshes import Mesh, write_script
from tests.waiting import until

LIMIT_S = 90.0
"""Time in which each call of a pair ends, also on a busy machine."""
LONG = "word " * 60
TENSORS = {"w": np.zeros(4, np.float32)}
_LEASE_MS = 1_000


@dataclass
class Meshwork:
    """A running mesh of real processes, named `engine-0`, `gateway-1`, `sidecar` and so on."""

    mesh: Mesh
    locks: Locks
    client: Client
    database: str
    read: Subscription
    """A consumer of all sessions, for as long as the mesh runs."""
    _replacing: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def start(self, name: str) -> None:
        """Starts a service, or its successor on the same port and data."""
        kind, mesh = name.partition("-")[0], self.mesh
        both = ",".join(mesh.address(f"router-{at}") for at in range(2))
        flags: dict[str, object] = {"grace_ms": 5_000, "router": both}
        match kind:
            case "router":
                flags = {"grace_ms": 1_000, "data_dir": mesh.folder / name, "peers": both}
            case "collector":
                flags |= {"data_dir": mesh.folder / name}
            case "engine":
                vocabulary = json.loads((mesh.model / "config.json").read_text())["vocab_size"]
                script = mesh.folder / "script.json"
                flags |= {"engine_id": name, "backend": "scripted", "vocabulary_tokens": vocabulary}
                flags |= {
                    "eos_id": 2,
                    "script": script,
                    "tokens_per_second": 200,
                    "max_adapters": 6,
                }
            case "gateway":
                flags |= {"gateway_id": name, "model_path": mesh.model, "journal": self.database}
                flags |= {"journal_lease_ms": _LEASE_MS}
            case _:
                flags |= {"gateway": "", "takeover_wait_ms": 120_000}
        port = mesh.address(name).rpartition(":")[2]
        await mesh.run(kind, name, port=port, **flags, **self.locks.flags(kind))

    async def replace(self, name: str, how: signal.Signals) -> None:
        """Ends a service by a signal, and starts its successor as a supervisor does."""
        async with self._replacing.setdefault(name, asyncio.Lock()):
            process = self.mesh.processes[name]
            os.kill(process.pid, how)
            code = await process.exit_code()
            assert code == (0 if how == signal.SIGTERM else -how), f"{name} ended with {code}"
            await self.start(name)

    def agent(self, session: Session) -> openai.AsyncOpenAI:
        return self.mesh.openai(session, max_retries=RETRIES)

    async def open(self, *adapters: str) -> Session:
        return await self.client.open_session(self.client.session_request(adapters=adapters))

    async def push(self, tensors: Mapping[str, Any] = TENSORS) -> None:
        """Pushes weights under the next version."""
        version = await self.client.policy_version() + 1
        await self.client.push_weights(tensors, version)

    async def rotate(self, role: str, servers: Sequence[str]) -> None:
        """Changes the token of a role. The one before the last is not accepted any more."""
        new = secrets.token_urlsafe(32)
        file, accepted = self.locks.token_file(role), self.locks.folder / "accepted" / role
        last = accepted.read_text().splitlines()[-1]
        _replace(accepted, f"{last}\n{digest_line(new)}\n")
        offered = file.with_name(f"{role}.next")
        _replace(offered, new)
        for server in servers:
            await until(lambda server=server: self._accepts(server, offered))  # type: ignore[misc]
        offered.replace(file)

    async def _accepts(self, server: str, token: Path) -> bool:
        identity = Identity(CallerConfig(token_file=str(token)))
        async with open_channel(self.mesh.address(server), identity=identity) as channel:
            try:
                with typed_errors():
                    await server_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
                        server_pb2.GetServerInfoRequest(), timeout=LIMIT_S, wait_for_ready=True
                    )
            except RollmeshError:
                return False
        return True

    async def go_on(self) -> None:
        """Makes the engines sample again, whatever they were told."""
        await self.client.wake_up_engines()
        await self.client.resume_engines()

    async def rest(self) -> None:
        """Waits until both engines are current and awake, and none is leased."""

        async def whole() -> bool:
            try:
                replicas = (await self.client.replicas()).replicas
            except RollmeshError:
                return False
            engines = [one for one in replicas if one.circuit]
            return len(engines) == 2 and not any(
                one.leases or one.fenced or one.HasField("exclusion") for one in engines
            )

        await until(whole, LIMIT_S)

    async def check_versions(self) -> None:
        """Checks that a turn is sampled with the current weights, and says so."""
        version = await self.client.policy_version()
        agent = await self.answered()
        await self.client.close_session(agent.session)
        async with asyncio.timeout(LIMIT_S):
            async for delivery in self.read:
                await self.read.acknowledge(delivery)
                (result,) = delivery.sessions
                if result.session_id == agent.session.session_id:
                    versions = result.trajectories[0].policy_versions
                    found = {*versions[versions >= 0].tolist()}
                    assert found == {version}, (found, version, result)
                    return

    async def answered(self, turns: int = 1) -> Agent:
        """Returns an agent in an open session that has so many answers."""
        agent = Agent(await self.open())
        await agent.run(lambda: len(agent.answers) < turns)
        return agent


def _replace(file: Path, text: str) -> None:
    """Replaces a secret file as a deployment does, by a rename."""
    new = file.with_name(f".{file.name}")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(file)


async def ended(call: Awaitable[Any]) -> str:
    """Waits for a call. Returns "" or the reason of its typed error.

    Raises:
        TimeoutError: It did not end in its time.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            await call
    except RollmeshError as error:
        return error.reason if error.reason != "REMOTE" else str(error)
    except openai.APIStatusError as error:
        return str(error.code or error)
    return ""


@asynccontextmanager
async def meshwork(folder: Path, model: Path) -> AsyncIterator[Meshwork]:
    """Runs the mesh with weights of version 1."""
    write_script(folder / "script.json", Tokenizer(model), [*RULES, ("long", LONG)])
    async with postgres_database() as database, AsyncExitStack() as stack:
        locks = Locks(folder / "tokens")
        mesh = Mesh(folder, model, stack, locks=locks)
        routers = ",".join(mesh.address(f"router-{at}") for at in range(2))
        addresses = MeshAddresses(
            router=routers,
            collector=mesh.address("collector"),
            sidecar=mesh.address("sidecar"),
            token_file=str(locks.token_file("trainer")),
        )
        async with Client(addresses) as client, client.subscribe("all", unit="session") as read:
            work = Meshwork(mesh, locks, client, database.url, read)
            for together in (
                ("router-0", "router-1", "collector"),
                ("engine-0", "engine-1", "gateway-0", "gateway-1", "sidecar"),
            ):
                async with asyncio.TaskGroup() as tasks:
                    for name in together:
                        tasks.create_task(work.start(name))
            await work.push()
            yield work
