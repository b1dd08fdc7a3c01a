"""Registration with the router.

A replica waits for the router at its start. If the router goes away later, or removes a replica
that was silent for too long, the replica keeps serving and registers again. A refusal by the router
is final.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

import grpc

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
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_LOG_MS = 30_000  # between two warnings that the router is away
_FINAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}


class Membership(Background):
    """The `Register` stream of one replica; reconnects when the router comes back.

    Entering starts to register; leaving ends the stream, and the router forgets the replica.
    """

    def __init__(
        self,
        router: str,
        hello: router_pb2.ReplicaHello,
        load: Callable[[], router_pb2.ReplicaLoad],
    ) -> None:
        """Takes the router's `host:port`, the replica's identity, and a function for its load."""
        super().__init__()
        self._router = router
        self._hello = router_pb2.ReplicaHello()
        self._hello.CopyFrom(hello)
        self._hello.instance_id = uuid.uuid4().hex
        self._hello.report_interval_ms = _REPORT_MS
        self._load = load
        self._changed = asyncio.Event()
        self._registered = asyncio.Event()
        self._refused = asyncio.Event()
        self._refusal: RollmeshError | None = None
        self._next_log_ms = 0
        self._left = False

    def notify(self) -> None:
        """Reports the load now instead of within a second."""
        self._changed.set()

    @property
    def registered(self) -> bool:
        """Whether the replica is registered now."""
        return self._registered.is_set() and self._refusal is None

    async def wait_registered(self) -> None:
        """Waits until the replica is registered.

        Raises:
            RollmeshError: The router refused it: its id is in use, or a field is wrong.
        """
        await self._registered.wait()
        if self._refusal is not None:
            raise self._refusal

    async def wait_refused(self) -> str:
        """Waits until the router refuses the replica; returns the reason."""
        await self._refused.wait()
        return str(self._refusal)

    async def leave(self) -> None:
        """Ends the stream for good."""
        self._left = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(self._task)

    async def _stay(self) -> None:
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        _log.info("registering", extra=fields(router=self._router))
        async with open_channel(self._router) as channel:
            while not self._left:
                try:
                    await self._hold_stream(channel)
                except RollmeshError as error:
                    if status_code_of(error) in _FINAL:
                        self._refusal = error
                        self._refused.set()
                        self._registered.set()  # wakes the waiters
                        return
                    self._log_absence(error)
                if self._registered.is_set():
                    backoff.reset()
                self._registered.clear()
                await asyncio.sleep(backoff.next_s())

    def _log_absence(self, error: RollmeshError) -> None:
        now_ms = clock.monotonic_ms()
        if now_ms >= self._next_log_ms or self._registered.is_set():
            self._next_log_ms = now_ms + _LOG_MS
            _log.warning(
                "waiting for the router",
                extra=fields(router=self._router, reason=error.reason, error=str(error)),
            )

    async def _hold_stream(self, channel: grpc.aio.Channel) -> None:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        ended = asyncio.Event()
        call = stub.Register(self._reports(ended))
        try:
            async with aclosing(read_stream(call)) as responses:
                async for _ in responses:
                    _log.info("registered", extra=fields(router=self._router))
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
                async with asyncio.timeout(_REPORT_MS / 1000):
                    await self._changed.wait()
            if ended.is_set():
                return
            self._changed.clear()
            yield router_pb2.RegisterRequest(load=self._load())
