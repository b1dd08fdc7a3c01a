"""Registration with the routers.

A replica waits for one of them at its start. If a router goes away later, or removes a replica that
was silent for too long, the replica keeps serving and registers again. A refusal by any of them is
final.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

import grpc

from rollmesh.mesh.routers.preference import addresses_of
from rollmesh.mesh.routers.reachable import reachable
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, read_stream
from rollmesh.runtime.rpc.statuses import status_code_of
from rollmesh.runtime.tasks import Background
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)
_REPORT_MS = 1_000
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 0.5
_LOG_MS = 30_000  # between two warnings that the router is away
_FINAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}


class Membership(Background):
    """The registration of one replica with every router; reconnects when a router comes back.

    Entering starts to register; leaving ends the streams, and the routers forget the replica.
    """

    def __init__(
        self,
        router: str,
        hello: router_pb2.ReplicaHello,
        load: Callable[[], router_pb2.ReplicaLoad],
    ) -> None:
        """Identifies the replica.

        Args:
            router: `host:port` of the router, or several separated by commas.
            hello: Identity of the replica. An address of no host becomes the one that leads to
                the router.
            load: Returns its load.
        """
        super().__init__()
        said = router_pb2.ReplicaHello()
        said.CopyFrom(hello)
        said.instance_id = uuid.uuid4().hex
        said.report_interval_ms = _REPORT_MS
        self._one_changed = asyncio.Event()
        self._streams = [
            _Registration(address, said, load, self._one_changed)
            for address in addresses_of(router)
        ]

    def notify(self) -> None:
        """Reports the load now instead of within a second."""
        for stream in self._streams:
            stream.notify()

    @property
    def registered(self) -> bool:
        """Whether the replica is registered with a router now."""
        return any(stream.registered for stream in self._streams)

    async def wait_registered(self) -> None:
        """Waits until the replica is registered with one of the routers.

        Raises:
            RollmeshError: A router refused it: its id is in use, or a field is wrong.
        """
        while not self.registered:
            if (refusal := self._refusal()) is not None:
                raise refusal
            self._one_changed.clear()
            await self._one_changed.wait()

    async def wait_refused(self) -> str:
        """Waits until a router refuses the replica; returns the reason."""
        while (refusal := self._refusal()) is None:
            self._one_changed.clear()
            await self._one_changed.wait()
        return str(refusal)

    async def leave(self) -> None:
        """Ends the streams for good."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self._task)

    def _refusal(self) -> RollmeshError | None:
        refusals = (stream.refusal for stream in self._streams)
        return next((one for one in refusals if one is not None), None)

    async def _stay(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.stay())


class _Registration:
    """The `Register` stream to one router."""

    def __init__(
        self,
        router: str,
        hello: router_pb2.ReplicaHello,
        load: Callable[[], router_pb2.ReplicaLoad],
        turned: asyncio.Event,
    ) -> None:
        """Takes the address, the identity, the load, and an event to set at each change."""
        self._router = router
        self._hello = hello
        self._load = load
        self._turned = turned
        self._changed = asyncio.Event()
        self._next_log_ms = 0
        self.registered = False
        """Whether the replica is registered now."""
        self.refusal: RollmeshError | None = None
        """Why the router refused it for good."""

    def notify(self) -> None:
        """Reports the load now."""
        self._changed.set()

    async def stay(self) -> None:
        """Keeps the stream open until the router refuses the replica."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        _log.info("registering", extra=fields(router=self._router))
        while True:
            was_registered = False
            # A new channel each time: its own pause between connections would be too long.
            async with open_channel(self._router, own_connection=True) as channel:
                try:
                    await self._hold_stream(channel)
                except RollmeshError as error:
                    if status_code_of(error) in _FINAL:
                        self.refusal = error
                        return
                    self._log_absence(error)
                finally:
                    was_registered, self.registered = self.registered, False
                    self._turned.set()
            if was_registered:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def _log_absence(self, error: RollmeshError) -> None:
        now_ms = clock.monotonic_ms()
        if now_ms >= self._next_log_ms or self.registered:
            self._next_log_ms = now_ms + _LOG_MS
            _log.warning(
                "waiting for the router",
                extra=fields(router=self._router, reason=error.reason, error=str(error)),
            )

    async def _hold_stream(self, channel: grpc.aio.Channel) -> None:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        hello = router_pb2.ReplicaHello()
        hello.CopyFrom(self._hello)
        hello.address = await reachable(hello.address, self._router)
        ended = asyncio.Event()
        call = stub.Register(self._reports(hello, ended))
        try:
            async with aclosing(read_stream(call)) as responses:
                async for _ in responses:
                    _log.info("registered", extra=fields(router=self._router))
                    self.registered = True
                    self._turned.set()
        finally:
            ended.set()  # lets the call's own task end
            self._changed.set()

    async def _reports(
        self, hello: router_pb2.ReplicaHello, ended: asyncio.Event
    ) -> AsyncIterator[router_pb2.RegisterRequest]:
        hello.load.CopyFrom(self._load())
        yield router_pb2.RegisterRequest(hello=hello)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_MS / 1000):
                    await self._changed.wait()
            if ended.is_set():
                return
            self._changed.clear()
            yield router_pb2.RegisterRequest(load=self._load())
