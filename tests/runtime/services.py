"""A service whose behaviour a test defines, in this process or in its own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from rollmesh.runtime.process import run_service
from rollmesh.runtime.rpc import Bound, Context, ServerConfig, open_channel, serve
from rollmesh.v1 import server_pb2
from tests.paths import ROOT
from tests.processes import ServiceProcess

Script: TypeAlias = Callable[[bytes, Context], Awaitable[bytes]]

NAME = "rollmesh.test.ScriptedService"
OTHER = "rollmesh.test.Other"
"""A further service of it, with the same methods."""
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
_WAIT_S = 180


async def echo(request: bytes, context: Context) -> bytes:
    return request


def failing(error: Exception) -> Script:
    async def script(request: bytes, context: Context) -> bytes:
        raise error

    return script


@dataclass
class ScriptedService:
    """Has one method of each kind. All of them answer with the script's bytes."""

    script: Script = echo
    name: str = NAME
    events: list[str] = field(default_factory=list)
    """What happened to it, in order."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    address: asyncio.Future[str] | None = None
    """Where it is reached, set as soon as the server listens."""
    failure: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """What is put here ends the service."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, OTHER

    @property
    def capabilities(self) -> tuple[server_pb2.Capability.ValueType, ...]:
        return (server_pb2.CAPABILITY_SCORING,)

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(self, f"_{kind}"))
            for kind in KINDS
        }
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, handlers) for name in self.names]
        )

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        self.events.append("started")
        if self.address is not None:
            self.address.set_result(address)
            await self.may_start.wait()
        yield
        self.events.append("closed")

    async def ready(self) -> None:
        pass

    async def drain(self) -> None:
        self.events.append("drained")
        self.drained.set()

    async def failed(self) -> str:
        return await self.failure.get()

    async def _unary_unary(self, request: bytes, context: Context) -> bytes:
        return await self.script(request, context)

    async def _stream_unary(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        return await self.script(b"".join([request async for request in requests]), context)

    async def _unary_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self.script(request, context)

    async def _stream_stream(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self.script(request, context)


@asynccontextmanager
async def served(
    service: ScriptedService, **settings: Any
) -> AsyncIterator[tuple[grpc.aio.Channel, Bound]]:
    """Serves a service until the block ends. Yields a channel to it and its ports."""
    config = ServerConfig(**{"grace_ms": 1000, **settings})
    bound: asyncio.Future[Bound] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(service, config, announce=bound.set_result, stop=stop))
        try:
            async with asyncio.timeout(_WAIT_S):
                ports = await bound
            async with open_channel(f"127.0.0.1:{ports.port}") as channel:
                yield channel, ports
        finally:
            stop.set()


def begin(
    channel: grpc.aio.Channel,
    request: bytes = b"x",
    *,
    kind: str = "unary_stream",
    name: str = NAME,
    **call: Any,
) -> Any:
    """Calls the method of a kind with one request. Returns the running call."""
    method: Any = getattr(channel, kind)(f"/{name}/{kind}")
    requests = [request] if kind.startswith("stream") else request
    return method(requests, **{"timeout": _WAIT_S, **call})


async def ask(
    channel: grpc.aio.Channel,
    request: bytes = b"x",
    *,
    kind: str = "unary_unary",
    name: str = NAME,
    **call: Any,
) -> bytes:
    """Calls the method of a kind with one request. Returns the last answer."""
    return await answer_of(begin(channel, request, kind=kind, name=name, **call), kind)


async def answer_of(running: Any, kind: str) -> bytes:
    """Returns the last answer of a running call."""
    if kind.endswith("unary"):
        return bytes(await running)
    try:
        return bytes([answer async for answer in running][-1])
    finally:
        running.cancel()  # left before its request went out, grpc would keep it until collected


@asynccontextmanager
async def started(
    folder: Path, *flags: str, stdin: int | None = None
) -> AsyncIterator[ServiceProcess]:
    """Runs the service below as a process, whether it serves or not."""
    log = folder / "scripted.log"
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.runtime.services",
            *flags,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            cwd=ROOT,
        )
    result = ServiceProcess(process, log)
    try:
        yield result
    finally:
        await result.kill()


def _as_process(config: ServerConfig) -> ScriptedService:
    """Makes a service whose requests are orders."""
    service = ScriptedService()

    async def obey(request: bytes, context: Context) -> bytes:
        match request:
            case b"wait for the stop":
                await service.drained.wait()
                return b"finished"
            case b"wait for ever":
                await asyncio.Event().wait()
            case b"raise":
                raise KeyError("what nobody may see")
            case b"fail":
                service.failure.put_nowait("told to")
        return request

    service.script = obey
    return service


if __name__ == "__main__":
    sys.exit(run_service("scripted", ServerConfig, _as_process, sys.argv[1:], os.environ))
