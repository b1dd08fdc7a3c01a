"""A gateway's `Dispatch` stream to one router, which is opened again whenever it ends."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

import grpc

from rollmesh.mesh.leasing.lines import LONG_PATIENCE, Heard, Line, Silence
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, read_stream
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 0.5
_WELCOME_S = 5.0
_TRUSTED = 240
"""Ticks after which a router that was silent once is trusted again: half a minute."""


class Link:
    """One router, as a gateway reaches it. The stream is open also while another router is used."""

    def __init__(
        self,
        address: str,
        patience: int,
        *,
        hello: Callable[[], router_pb2.DispatchHello],
        changed: Callable[["Link"], None],
        answered: Callable[["Link", router_pb2.DispatchResponse], None],
    ) -> None:
        """Takes the router's `host:port` and the callbacks.

        Args:
            address: `host:port` of the router.
            patience: Ticks for which a ping may stay unanswered.
            hello: Returns the first message of a stream.
            changed: Called when the router has come up or gone down.
            answered: Called with every result of a request, and with news.
        """
        self.address = address
        self.line: Line | None = None
        """What to write to; None while the router is down."""
        self._patience = self._first_patience = patience
        self._silence = Silence(patience)
        self._hello = hello
        self._changed = changed
        self._answered = answered
        self._up_ticks = 0
        self._scope: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Keeps the stream open, forever."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            # A new channel each time: gRPC would share a connection that may be half open.
            async with open_channel(self.address, own_connection=True) as channel:
                try:
                    async with asyncio.timeout(_WELCOME_S) as self._scope:
                        await self._hold(channel, backoff)
                except (RollmeshError, ConnectionError, TimeoutError) as error:
                    reason = str(error) or "it was left, or does not answer"
                    text = fields(router=self.address, error=reason)
                    _log.info("router unreachable", extra=text)
                finally:
                    self._down()
            await asyncio.sleep(backoff.next_s())

    def tick(self, *, is_waiting: bool) -> None:
        """Takes note of the time: pings the router, or leaves it if it is silent.

        Args:
            is_waiting: Whether requests wait for its answer.
        """
        if self.line is None:
            return
        self._up_ticks += 1
        if self._up_ticks == _TRUSTED:
            self._patience = self._first_patience
        match self._silence.tick(is_waiting=is_waiting or self.line.is_restating):
            case Heard.TOO_LITTLE:
                self.line.ping()
            case Heard.NOTHING:
                _log.warning("router silent", extra=fields(router=self.address))
                # It may be overloaded, and those who come and go only add to that.
                self._patience = min(2 * self._patience, LONG_PATIENCE)
                self.leave()
            case Heard.ENOUGH:
                pass

    def leave(self) -> None:
        """Ends the stream, so that the router frees what it holds; another one follows."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._down()

    async def _hold(self, channel: grpc.aio.Channel, backoff: Backoff) -> None:
        line = Line()
        call = router_pb2_grpc.RouterServiceStub(channel).Dispatch(line.requests(self._hello()))
        try:
            async with aclosing(read_stream(call)) as responses:
                async for response in responses:
                    self._silence.heard()
                    match response.WhichOneof("result"):
                        case "welcome":
                            backoff.reset()
                            self._up(line)
                        case "grant" | "refusal" | "silent_engine" | "offered":
                            self._answered(self, response)
                        case _:
                            pass
        finally:
            line.end()

    def _up(self, line: Line) -> None:
        if self._scope is None or self._scope.expired():
            return
        self._scope.reschedule(None)
        self._silence, self._up_ticks = Silence(self._patience), 0
        self.line = line
        self._changed(self)

    def _down(self) -> None:
        if self.line is not None:
            self.line = None
            self._changed(self)
