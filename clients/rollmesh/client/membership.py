"""Keeps a replica registered with the router for as long as a block runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from types import TracebackType

import grpc

from rollmesh.runtime.channels import open_channel, read_stream
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.logs import fields
from rollmesh.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)
_REPORT_S = 1.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0


class Membership(AbstractAsyncContextManager["Membership"]):
    """One replica's open `Register` stream; re-opened for as long as the router is away."""

    def __init__(
        self,
        router: str,
        hello: router_pb2.ReplicaHello,
        load: Callable[[], router_pb2.ReplicaLoad],
    ) -> None:
        """Takes the router's `host:port`, who the replica is, and how to ask how it is doing."""
        self._router = router
        self._hello = hello
        self._load = load
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self._left = False
        self._task: asyncio.Task[None] | None = None
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> "Membership":
        """Begins to register; returns at once."""
        await self._group.__aenter__()
        self._task = self._group.create_task(self._stay())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the router."""
        if self._task is not None:
            self._task.cancel()
        await self._group.__aexit__(None, None, None)

    def notify(self) -> None:
        """Reports the load now instead of at the next second."""
        self._changed.set()

    async def wait_registered(self) -> None:
        """Waits until the router knows the replica."""
        await self._registered.wait()

    async def leave(self) -> None:
        """Ends the stream and does not open it again."""
        self._left = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self._task)

    async def _stay(self) -> None:
        delay = _FIRST_RETRY_S
        async with open_channel(self._router) as channel:
            while not self._left:
                try:
                    await self._hold_stream(channel)
                    delay = _FIRST_RETRY_S
                except RollmeshError as error:
                    level = logging.INFO if self._registered.is_set() else logging.DEBUG
                    _log.log(
                        level, "not registered", extra=fields(reason=error.reason, error=str(error))
                    )
                self._registered.clear()
                await asyncio.sleep(delay)
                delay = min(delay * 2, _LAST_RETRY_S)

    async def _hold_stream(self, channel: grpc.aio.Channel) -> None:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        ended = asyncio.Event()
        call = stub.Register(self._reports(ended))
        try:
            async with aclosing(read_stream(call)) as responses:
                async for _ in responses:
                    self._registered.set()
        finally:
            ended.set()  # lets the call's own task end
            self._changed.set()

    async def _reports(self, ended: asyncio.Event) -> AsyncIterator[router_pb2.RegisterRequest]:
        hello = router_pb2.ReplicaHello()
        hello.CopyFrom(self._hello)
        hello.load.CopyFrom(self._load())
        yield router_pb2.RegisterRequest(hello=hello)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await self._changed.wait()
            if ended.is_set():
                return
            self._changed.clear()
            yield router_pb2.RegisterRequest(load=self._load())
