"""A whole mesh of real processes around a scripted engine."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, MeshAddresses, Session, SessionResult, SubscribeOptions
from rollmesh.v1 import collector_pb2
from tests.locks import Locks
from tests.processes import ServiceProcess, reserved_port, running
from tests.waiting import until


@dataclass
class Mesh:
    """The processes of a mesh, by service."""

    folder: Path
    model: Path
    stack: AsyncExitStack
    processes: dict[str, ServiceProcess] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    locks: Locks | None = None
    """The tokens of its services. None lets everybody in."""

    @property
    def addresses(self) -> MeshAddresses:
        names = ("router", "gateway", "collector", "sidecar")
        token_file = str(self.locks.token_file("trainer")) if self.locks else ""
        return MeshAddresses(token_file=token_file, **{name: self.address(name) for name in names})

    def address(self, service: str) -> str:
        """Where a service is, from before its first start. No other program is given the port."""
        if service not in self.ports:
            holder = self.stack.enter_context(reserved_port())
            self.ports[service] = int(holder.getsockname()[1])
        return f"127.0.0.1:{self.ports[service]}"

    def client(self) -> Client:
        return Client(self.addresses)

    def client_of(self, *routers: str) -> Client:
        """A client that finds the gateways at these routers."""
        addresses = ",".join(self.address(name) for name in routers)
        return Client(replace(self.addresses, router=addresses, gateway=""))

    def openai(
        self, session: Session, *, max_retries: int = 0, timeout: float = 120
    ) -> AsyncOpenAI:
        return self.agent(
            session.base_url, session.api_key, max_retries=max_retries, timeout=timeout
        )

    def agent(self, base_url: str, api_key: str, **settings: Any) -> AsyncOpenAI:
        """The published client. Closed with the mesh."""
        settings = {"max_retries": 0, "timeout": 120, **settings}
        agent = AsyncOpenAI(base_url=base_url, api_key=api_key, **settings)
        self.stack.push_async_callback(agent.close)
        return agent

    async def start(self, service: str, **flags: object) -> ServiceProcess:
        """Starts a service, on the port of its predecessor where it had one."""
        return await self.run(service, service, **{**self.flags(service), **flags})

    async def run(self, service: str, name: str, **flags: object) -> ServiceProcess:
        """Runs a service under a name, with a folder of its own unless it is the only one."""
        folder = self.folder if service == name else self.folder / name
        process = await self.stack.enter_async_context(running(service, folder, **flags))
        self.processes[name] = process
        return process

    async def restart(self, service: str, **flags: object) -> ServiceProcess:
        """Kills a service and starts its successor on the same port and data."""
        await self.processes[service].kill()
        return await self.start(service, **flags)

    def flags(self, service: str) -> dict[str, object]:
        """The settings that a service is started with, by their Python names."""
        port: dict[str, object] = {"port": self.address(service).rpartition(":")[2]}
        if self.locks:
            port |= self.locks.flags(service)
        router = {"router": self.address("router")}
        match service:
            case "router" | "collector":
                return {"data_dir": self.folder / service, **port}
            case "engine":
                script = self.folder / "script.json"
                config = json.loads((self.model / "config.json").read_text())
                return {
                    **port,
                    **router,
                    "backend": "scripted",
                    "vocabulary_tokens": config.get("text_config", config)["vocab_size"],
                    "eos_id": 2,
                    "reply_tokens": 8,
                    "script": script if script.exists() else "",
                }
            case "gateway":
                return {
                    **port,
                    **router,
                    "collector": self.address("collector"),
                    "data_dir": self.folder / "gateway",
                    "model_path": self.model,
                }
            case _:
                return {"gateway": self.address("gateway"), **port}


@asynccontextmanager
async def scripted_mesh(
    folder: Path,
    model: Path,
    rules: Sequence[tuple[str, str | list[str]]] = (),
    *,
    first: Mapping[str, Mapping[str, object]] | None = None,
    locks: Locks | None = None,
    **engine: Any,
) -> AsyncIterator[Mesh]:
    """Runs a mesh. `rules` are pairs of the end of a prompt and the reply to it, as text.

    `first` has the flags of services' first processes, `engine` those of the engine's. With
    `locks` every service is locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if rules:
        write_script(folder / "script.json", Tokenizer(model), rules)
    async with AsyncExitStack() as stack:
        mesh = Mesh(folder, model, stack, locks=locks)
        for together in (("router", "collector"), ("engine", "gateway", "sidecar")):
            async with asyncio.TaskGroup() as tasks:
                for service in together:
                    flags = engine if service == "engine" else (first or {}).get(service, {})
                    tasks.create_task(mesh.start(service, **flags))
        yield mesh


async def delivered(client: Client, session: Session, **rules: Any) -> SessionResult:
    """What the collector delivers of a session by a filter. Others may come before it."""
    consumer = f"reader-of-{session.session_id}-{rules}"
    options = SubscribeOptions(filter=collector_pb2.DeliveryFilter(**rules))
    async with (
        client.subscribe(consumer, unit="session", options=options) as deliveries,
        asyncio.timeout(120),
    ):
        async for delivery in deliveries:
            await deliveries.acknowledge(delivery)
            (result,) = delivery.sessions
            if result.session_id == session.session_id:
                return result
    raise AssertionError("the deliveries ended without the session")


def recorded(mesh: Mesh, session: Session) -> set[int]:
    """Nodes of the answers that the gateway's journal has as sent."""
    with closing(sqlite3.connect(mesh.folder / "gateway" / "journal.sqlite")) as db:
        found = db.execute("SELECT node_id FROM sent WHERE session_id = ?", (session.session_id,))
        return {node_id for (node_id,) in found}


async def until_free(client: Client) -> None:
    """Waits until no engine is leased."""
    await _until_leased(client, is_wanted=False)


async def until_sampled(client: Client) -> None:
    """Waits until an engine is leased."""
    await _until_leased(client, is_wanted=True)


async def _until_leased(client: Client, *, is_wanted: bool) -> None:
    async def look() -> bool:
        return is_wanted == any(one.leases for one in (await client.replicas()).replicas)

    await until(look)


CHATML = "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


def write_script(
    path: Path,
    tokenizer: Tokenizer,
    rules: Sequence[tuple[str, str | list[str]]],
    turn: tuple[str, str] = CHATML,
) -> None:
    """Writes a script: what the user (or tool) said last, and the reply to it, or its tokens.

    `turn` is what the template prints between the two, and what ends the reply. Both are added.
    """
    ending, end = turn
    path.write_text(
        json.dumps(
            [
                {
                    # The last turn as the template ends it. Ids, because scripts know no text.
                    "after": tokenizer.encode(f"{said}{ending}").tolist(),
                    "reply": [id_ for one in reply for id_ in tokenizer.encode(one).tolist()],
                }
                for said, text in rules
                for reply in [[f"{text}{end}"] if isinstance(text, str) else [*text, end]]
            ]
        )
    )
