"""The `Dispatch` streams: requests of gateways, and the lease table's answers, at once or later."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollmesh.internal.v1 import leases_pb2, leases_pb2_grpc
from rollmesh.router import metrics
from rollmesh.router.engines import Engine, Fleet
from rollmesh.router.leases import EndedWait, LeaseTable
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    DeadlineError,
    EnginesBusyError,
    InvalidFieldError,
    OverloadedError,
    RollmeshError,
    SupersededError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc import Context, to_status
from rollmesh.runtime.telemetry import fields, genai, tracing
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)
_MAX_FAULT_CHARS = 500
_MAX_UNREAD = 16_384
_MOST_RESTATED = 1_024
_RETRY_MS = 1_000


@dataclass(slots=True, eq=False)
class _Outbox:
    """The responses of one stream that its gateway has not read yet."""

    responses: asyncio.Queue[leases_pb2.DispatchResponse | None] = field(
        default_factory=asyncio.Queue
    )
    """None is the end of the stream."""
    error: Exception | None = None
    """Why the stream has ended, or None if the gateway ended it."""


class Dispatch(leases_pb2_grpc.LeaseServiceServicer):
    """All `Dispatch` streams of a router, and the timer of its lease table."""

    def __init__(self, table: LeaseTable, router_id: str) -> None:
        self._table = table
        self._router_id = router_id
        self._outboxes: dict[str, _Outbox] = {}
        self._ended: RollmeshError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms: int | None = None
        self._tasks: asyncio.TaskGroup
        table.fleet.on_change = self._changed
        table.fleet.on_circuit = _log_circuit
        table.fleet.on_offer = self._offered
        table.on_absent = self.warn_of_silence

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Owns the tasks that read streams, and the timer."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:
                self._set_timer(None, 0)

    async def Dispatch(
        self, request_iterator: AsyncIterator[leases_pb2.DispatchRequest], context: Context
    ) -> AsyncIterator[leases_pb2.DispatchResponse]:
        """Serves one stream and yields its responses.

        Raises:
            InvalidFieldError: A message is empty, the first is no hello, or a later one is.
            OverloadedError: The gateway does not read its responses.
            SupersededError: A later stream of the same process is open, or was opened.
            ShuttingDownError: The router stops.
        """
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidFieldError("hello", "is missing; send it in the first message")
        if self._ended is not None:
            raise self._ended
        hello, stream_id, outbox = first.hello, uuid.uuid4().hex, _Outbox()
        if (former := self._table.open_stream(stream_id, hello)) is not None:
            number = hello.stream_number
            self._end(former, SupersededError(f"stream {number} of this process replaces this one"))
        self._outboxes[stream_id] = outbox
        welcome = leases_pb2.DispatchWelcome(router_id=self._router_id)
        self._send(stream_id, leases_pb2.DispatchResponse(welcome=welcome))
        for model in self._table.fleet.offered_models():
            if hello.model in {"", model}:
                self._send(stream_id, self._news(model))
        warn_of_misfits(self._table.fleet)
        reader = self._tasks.create_task(self._read(stream_id, outbox, request_iterator))
        reader.add_done_callback(lambda _: outbox.responses.put_nowait(None))  # however it ended
        try:
            while (response := await outbox.responses.get()) is not None:
                yield response
                if response.HasField("grant"):
                    await faults.reach("router-after-grant")
            if outbox.error is not None:
                raise outbox.error
        finally:
            reader.cancel()
            self._close(stream_id)

    async def _read(
        self, stream_id: str, outbox: _Outbox, requests: AsyncIterator[leases_pb2.DispatchRequest]
    ) -> None:
        """Takes requests until the gateway ends the stream. The writer raises any error."""
        try:
            async for request in requests:
                if stream_id not in self._outboxes:
                    return
                await self._take(stream_id, request)
        except Exception as error:  # one stream's error must not stop the others
            outbox.error = outbox.error or error

    async def _take(self, stream_id: str, request: leases_pb2.DispatchRequest) -> None:
        table, now_ms = self._table, clock.monotonic_ms()
        for release in request.releases:
            if release.engine_fault:
                self._report(stream_id, release)
            table.release(stream_id, release.lease_id, release.outcome, now_ms=now_ms)
        if request.releases:
            self._step(now_ms)
            await faults.reach("router-after-release")
        match request.WhichOneof("part"):
            case "acquire":
                asked = request.acquire
                result: leases_pb2.LeaseGrant | RollmeshError | None
                try:
                    result = table.acquire(stream_id, asked, now_ms=now_ms)
                except RollmeshError as error:
                    if asked.wait_ms and isinstance(error, EnginesBusyError):
                        metrics.QUEUE_REFUSALS.labels("full").inc()
                    result = error
                if result is None:
                    self._set_timer(table.due_ms(now_ms), now_ms)
                else:
                    self._answer(EndedWait(stream_id, asked.lease_id, 0, result, asked.traceparent))
            case "restate":
                stated = request.restate.engines
                ids = sum(len(one.lease_ids) + len(one.sessions) for one in stated)
                if ids > _MOST_RESTATED or len(stated) > _MOST_RESTATED:
                    raise InvalidFieldError(
                        "restate.engines",
                        f"has {ids} leases and sessions; give at most {_MOST_RESTATED} in one "
                        "message",
                    )
                table.restate(stream_id, stated, now_ms=now_ms)
                self._set_timer(table.due_ms(now_ms), now_ms)
            case "forget":
                table.forget(request.forget.session_id)
            case "ping":
                self._send(stream_id, leases_pb2.DispatchResponse(pong=leases_pb2.DispatchPong()))
            case "hello":
                raise InvalidFieldError("hello", "is not the first message; send it once")
            case None if not request.releases:
                raise InvalidFieldError("part", "is empty; set one of its fields, or releases")

    def _report(self, stream_id: str, release: leases_pb2.ReleaseLease) -> None:
        """Takes the fault of an engine that misbehaved."""
        fault = release.engine_fault[:_MAX_FAULT_CHARS]
        engine = self._table.report_fault(stream_id, release.lease_id, fault)
        if engine is not None:
            metrics.FAULTS.inc()
            gateways = sorted(engine.reports)
            _log.error(
                "engine out of service" if engine.fault else "engine reported by one gateway",
                extra=fields(engine=engine.engine_id, fault=fault, gateways=gateways),
            )

    def _step(self, now_ms: int) -> None:
        """Ends the waits that can end now, and sets the timer for the next."""
        for ended in self._table.end_waits(now_ms):
            metrics.WAITED_SECONDS.observe(ended.waited_ms / 1000)
            if isinstance(ended.result, RollmeshError):
                metrics.QUEUE_REFUSALS.labels("deadline").inc()
            self._answer(ended)
        self._set_timer(self._table.due_ms(now_ms), now_ms)

    def _answer(self, ended: EndedWait) -> None:
        """Answers a request for a lease, and records its span."""
        result, error = ended.result, ""
        attributes: dict[str, object] = {genai.QUEUE_MS: ended.waited_ms}
        response = leases_pb2.DispatchResponse(lease_id=ended.lease_id)
        if isinstance(result, RollmeshError):
            error = result.reason
            metrics.LEASE_REQUESTS.labels(error.lower()).inc()
            response.refusal.CopyFrom(to_status(result))
        else:
            attributes[genai.ENGINE_ID] = result.engine_id
            metrics.GRANTED.inc()
            response.grant.CopyFrom(result)
        self._send(ended.stream_id, response)
        if ended.traceparent and tracing.is_on():
            place = tracing.place_of(ended.traceparent)
            tracing.child("lease", "server", place, ended.waited_ms, attributes, error=error)

    def warn_of_silence(self, engine: Engine) -> None:
        """Warns the gateways with leases on an engine that it has stopped reporting.

        Its address is empty if it has not registered since this router started.
        """
        news = leases_pb2.SilentEngine(engine_id=engine.engine_id, address=engine.address)
        for stream_id in {lease.stream_id for lease in engine.held}:
            self._send(stream_id, leases_pb2.DispatchResponse(silent_engine=news))

    def _offered(self, model: str) -> None:
        """Tells gateways which policy versions the engines of their model may have."""
        for stream_id, stream in self._table.streams.items():
            if stream.hello.model in {"", model}:
                self._send(stream_id, self._news(model))

    def _news(self, model: str) -> leases_pb2.DispatchResponse:
        newest = self._table.fleet.newest_version(model)
        offered = leases_pb2.OfferedWeights(model=model, policy_version=newest)
        for name, version in sorted(self._table.fleet.retained(model)):
            offered.adapters.add(name=name, version=version)
        return leases_pb2.DispatchResponse(offered=offered)

    def _send(self, stream_id: str, response: leases_pb2.DispatchResponse) -> None:
        if (outbox := self._outboxes.get(stream_id)) is None:
            return
        if outbox.responses.qsize() < _MAX_UNREAD:
            outbox.responses.put_nowait(response)
            return
        _log.warning("gateway does not read its responses", extra=fields(stream=stream_id))
        unread = f"{_MAX_UNREAD} responses are unread; read them"
        self._end(stream_id, OverloadedError(unread, retry_delay_ms=_RETRY_MS))

    def end_streams(self, gateway_id: str) -> None:
        """Ends the streams of a gateway that has stopped reporting, which frees its leases."""
        error = DeadlineError("the gateway does not report to the router; connect again")
        for stream_id, stream in tuple(self._table.streams.items()):
            if stream.hello.gateway_id == gateway_id:
                self._end(stream_id, error)

    def end(self, error: RollmeshError) -> None:
        """Ends all streams with an error, for good."""
        self._ended = error
        for stream_id in tuple(self._outboxes):
            self._end(stream_id, error)

    def _end(self, stream_id: str, error: RollmeshError) -> None:
        """Ends a stream now, with an error."""
        outbox = self._outboxes[stream_id]
        self._close(stream_id)
        while not outbox.responses.empty():
            outbox.responses.get_nowait()
        outbox.error = error
        outbox.responses.put_nowait(None)

    def _close(self, stream_id: str) -> None:
        """Closes a stream and frees its leases."""
        if self._outboxes.pop(stream_id, None) is not None:
            self._table.close_stream(stream_id)
            self._changed()

    def _changed(self) -> None:
        """Schedules a step: engines change in the middle of other steps, and many at once."""
        self._set_timer(0, 0)

    def _set_timer(self, due_ms: int | None, now_ms: int) -> None:
        if due_ms == self._due_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_ms = None, due_ms
        if due_ms is not None:
            delay_s = max(due_ms - now_ms, 0) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = self._due_ms = None
        self._step(clock.monotonic_ms())


def _log_circuit(engine: Engine) -> None:
    """Logs and counts a change of a circuit."""
    name = router_pb2.CircuitState.Name(engine.circuit.state)
    state = name.removeprefix("CIRCUIT_STATE_").lower().replace("_", "-")
    metrics.CIRCUITS.labels(state).inc()
    _log.warning("engine circuit changed", extra=fields(engine=engine.engine_id, state=state))


def warn_of_misfits(fleet: Fleet) -> None:
    """Logs the engines that some gateways cannot lease, unless a weight update will change that."""
    for engine in fleet.engines.values():
        exclusion = fleet.exclusion(engine)
        if exclusion and not fleet.fenced(engine):
            why = exclusion.explanation
            _log.warning("engine excluded", extra=fields(engine=engine.engine_id, why=why))
