"""The server interceptor: request ids, metrics, limits, and typed errors as gRPC statuses."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from rollmesh.runtime.access.guard import Context, Guard
from rollmesh.runtime.codec.enums import check_enums
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    OverloadedError,
    RollmeshError,
    StartingError,
    UndecodableError,
)
from rollmesh.runtime.in_flight import BytesInFlight, HeldRequest
from rollmesh.runtime.rpc.statuses import to_status
from rollmesh.runtime.telemetry import tracing
from rollmesh.runtime.telemetry.logs import current_request, fields
from rollmesh.runtime.telemetry.metrics import count_rpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_log = logging.getLogger(__name__)
_RETRY_MS = 200
_UNREAD_S = 600.0


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all four kinds of RPC."""

    def __init__(
        self,
        in_flight: BytesInFlight | None = None,
        starting: tuple[str, ...] = (),
        guard: Guard | None = None,
        unread_s: float = _UNREAD_S,
    ) -> None:
        """Makes an interceptor.

        Args:
            in_flight: Limit on the requests of unary calls. None sets none.
            starting: Full names of the gRPC services that cannot answer yet.
            guard: Admits callers. None admits all.
            unread_s: Longest time that an answer of a stream may be left unread, seconds.
        """
        self.in_flight = in_flight
        self.guard = guard
        self.unread_s = unread_s
        self.starting = starting
        """Full names of the gRPC services that cannot answer yet."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the handler of the called method, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # The kind of the method as grpc names it, such as `unary_stream`.
        kind = "stream_" if handler.request_streaming else "unary_"
        kind += "stream" if handler.response_streaming else "unary"
        call = _Call(self, handler, kind, handler_call_details)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: Handler = make(call.answer, call.read, handler.response_serializer)
        return wrapped


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Replaces a request that was refused while it was read.

    grpc answers malformed bytes with UNKNOWN and a logged traceback, and raises the parser's
    exception inside a handler that reads a stream. So the error is carried to the place where the
    handler takes the request.
    """

    error: RollmeshError


class _Call:
    """One RPC. For a handler that takes a stream, it is the iterator of the requests.

    A malformed request of a stream raises its error, and the handler may read on.
    """

    def __init__(
        self,
        server: RpcInterceptor,
        handler: "Handler",
        kind: str,
        details: grpc.HandlerCallDetails,
    ) -> None:
        self._server = server
        self._method = details.method
        self._inner: Callable[[Any, Context], Any] = getattr(handler, kind)
        self._parse = handler.request_deserializer
        self._counts = server.in_flight is not None and not handler.request_streaming
        self._held: HeldRequest | None = None
        self._requests: AsyncIterator[Any] | None = None
        self._streams_requests = handler.request_streaming
        metadata = details.invocation_metadata
        named: dict[str, Any] = dict(metadata or ())
        self._request_id = named.get("x-request-id", "")
        self._traceparent = named.get(tracing.TRACEPARENT, "")
        self._entry = None
        if server.guard is not None:
            self._entry = server.guard.meet(details.method, metadata)
            if server.guard.is_refused(self._entry):
                self._parse, self._counts = None, False  # a stranger's bytes are not parsed
        self._code = "CANCELLED"
        # While an answer waits for the caller: since when, and the task that ends the call.
        self._waits_since: float | None = None
        self._closing: asyncio.Task[None] | None = None
        self._answers: AsyncGenerator[Any, None] | None = None

    def read(self, data: bytes) -> Any:
        """Deserialises a request and counts its bytes. Returns a `_Refusal` instead of raising."""
        try:
            if self._counts and self._server.in_flight is not None:
                self._held = HeldRequest(self._server.in_flight, len(data))
                self._held.hold(len(data))
            if self._parse is None:
                return data
            request = self._parse(data)
            check_enums(request)
        except DecodeError as error:
            return _Refusal(
                UndecodableError("request", f"is not a message of this method: {error}")
            )
        except (InvalidFieldError, OverloadedError) as error:
            return _Refusal(error)
        return request

    def __aiter__(self) -> "_Call":
        return self

    async def __anext__(self) -> Any:
        """Returns the next request of the stream.

        Raises:
            RollmeshError: It was refused.
        """
        assert self._requests is not None
        request = await anext(self._requests)
        if isinstance(request, _Refusal):
            raise request.error
        return request

    async def answer(self, request: Any, context: Context) -> Any:
        """Admits the caller, runs the handler, and sends the answers of a stream.

        gRPC takes an answer only when the caller has read most of those before it. A caller that
        stops reading but keeps its connection would never release the call and its resources, so
        the generator is closed when an answer has waited too long. The status has to wait until the
        caller reads on or leaves: gRPC sends nothing past an answer.

        Returns:
            The answer of a unary method. An exception becomes the status of the call.
        """
        current_request.set(self._request_id or uuid.uuid4().hex)
        if self._traceparent:
            tracing.join(self._traceparent)
        began = time.perf_counter()
        server, answer = self._server, None
        try:
            if self._streams_requests:
                self._requests = request
            if server.guard is not None and self._entry is not None:
                await server.guard.admit(self._entry, context, self._requests)
            if isinstance(request, _Refusal):
                raise request.error
            if server.starting and self._method[1:].rpartition("/")[0] in server.starting:
                raise StartingError("the service is reading its store", retry_delay_ms=_RETRY_MS)
            answers = self._inner(self if self._streams_requests else request, context)
            if not hasattr(answers, "__aiter__"):
                answer = await answers  # of a unary method, or of a stream written to the context
            else:
                self._answers, self._loop = answers, asyncio.get_running_loop()
                # One timer looks periodically: an answer may be a single token.
                self._timer = self._loop.call_later(server.unread_s, self._look)
                try:
                    async for one in answers:
                        self._waits_since = self._loop.time()
                        await context.write(one)
                        self._waits_since = None
                        if self._closing is not None:
                            raise DeadlineError(
                                "the caller read nothing of the stream for "
                                f"{server.unread_s:g} s; call again"
                            )
                finally:
                    self._timer.cancel()
                    await (self._closing or answers.aclose())
            self._code = "OK"
        except Exception as error:  # the edge: everything becomes a status
            await self._fail(error, context)
        finally:
            if self._held is not None:
                self._held.give()
            count_rpc(self._method, self._code, time.perf_counter() - began)
        return answer

    def _look(self) -> None:
        """Ends the call if an answer has waited too long."""
        now = self._loop.time()
        since = now if self._waits_since is None else self._waits_since
        if (left := since + self._server.unread_s - now) > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        _log.warning("call ended: its caller does not read the stream")
        self._closing = self._loop.create_task(self._close())

    async def _close(self) -> None:
        assert self._answers is not None
        try:
            await self._answers.aclose()
        finally:
            if self._held is not None:
                self._held.give()

    async def _fail(self, error: Exception, context: Context) -> NoReturn:
        """Ends the call with the status of an error."""
        if isinstance(error, grpc.aio.AbortError):  # the handler set a status itself
            self._code = context.code().name if hasattr(context.code(), "name") else "UNKNOWN"
            raise error
        if isinstance(error, grpc.aio.InternalError):  # nothing can be sent: the client has left
            raise asyncio.CancelledError from error
        if not isinstance(error, RollmeshError):
            _log.error("unexpected error", exc_info=error, extra=fields(method=self._method))
            request_id = current_request.get()
            error = RollmeshError(f"unexpected error; see the log under request id {request_id}")
        self._code = error.code
        try:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
        except grpc.aio.InternalError:  # likewise. gRPC would log it with a traceback
            raise asyncio.CancelledError from None
        raise AssertionError("abort returned")
