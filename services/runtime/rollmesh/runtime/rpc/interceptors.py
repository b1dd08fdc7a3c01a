"""The server interceptor: request ids, metrics, and typed errors as gRPC statuses."""

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_status import rpc_status

from rollmesh.runtime.access.guard import Entry, Guard
from rollmesh.runtime.errors import RollmeshError, StartingError
from rollmesh.runtime.in_flight import BytesInFlight
from rollmesh.runtime.rpc.answers import Answers
from rollmesh.runtime.rpc.requests import AcceptedRequests, RequestReader, accepted
from rollmesh.runtime.rpc.statuses import status_code_of, to_status
from rollmesh.runtime.telemetry.logs import current_request_id, fields, set_request_id
from rollmesh.runtime.telemetry.metrics import count_rpc

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
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
            in_flight: Limit on the requests of unary calls; None sets none.
            starting: Full names of the gRPC services that cannot answer yet.
            guard: Says who may call; None lets everybody.
            unread_s: How long an answer of a stream may be left unread, seconds.
        """
        self._in_flight = in_flight
        self._guard = guard
        self._unread_s = unread_s
        self.starting = starting
        """Full names of the gRPC services that cannot answer yet."""
        self.locked = guard is not None
        """Whether callers have to show who they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the handler of the called method, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        call = _Call(method, _request_id(handler_call_details))
        in_flight = None if handler.request_streaming else self._in_flight
        reader = RequestReader(handler.request_deserializer, in_flight)
        if self._guard is not None:
            call.guard = self._guard
            call.entry = self._guard.meet(method, handler_call_details.invocation_metadata)
            if self._guard.is_refused(call.entry):
                reader = RequestReader(None)  # a stranger's bytes are not parsed
        if handler.response_streaming:
            inner_stream: Any = handler.stream_stream or handler.unary_stream
            # A streaming handler either yields its responses or writes them to the context.
            inner = self._reading(inner_stream, handler, method)
            stream = (
                _wrap_unary(inner, reader, call)
                if inspect.iscoroutinefunction(inner_stream)
                else _wrap_stream(inner, reader, call, self._unread_s)
            )
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(stream, reader.read, handler.response_serializer)
        inner_unary: Any = handler.stream_unary or handler.unary_unary
        unary = _wrap_unary(self._reading(inner_unary, handler, method), reader, call)
        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, reader.read, handler.response_serializer)

    def _reading(
        self, inner: Callable[[Any, Context], Any], handler: "Handler", method: str
    ) -> Callable[..., Any]:
        """Returns a handler that raises the error of a refused request as it reads the request."""
        if self.starting and method[1:].rpartition("/")[0] in self.starting:
            inner = _not_yet
        if handler.request_streaming:
            return lambda requests, context: inner(AcceptedRequests(requests), context)
        return lambda request, context: inner(accepted(request), context)


def _not_yet(_request: Any, _context: Context) -> NoReturn:
    raise StartingError("the service is reading its store", retry_delay_ms=_RETRY_MS)


def _request_id(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == "x-request-id" and isinstance(value, str):
            return value
    return uuid.uuid4().hex


@dataclass(slots=True)
class _Call:
    """One RPC, before its handler."""

    method: str
    request_id: str
    guard: Guard | None = None
    entry: Entry | None = None
    """What the guard knows of its caller."""

    async def admitted(self, request: Any, context: Context) -> None:
        """Returns if its caller may make it.

        Args:
            request: The request, or the stream of them.
            context: Of the call.

        Raises:
            RollmeshError: The caller may not.
        """
        if self.guard is not None and self.entry is not None:
            requests = request if isinstance(request, AsyncIterator) else None
            await self.guard.admit(self.entry, context, requests)


class _Watch:
    """Measures one RPC and turns its exception into a status."""

    def __init__(self, call: _Call) -> None:
        set_request_id(call.request_id)
        self._method = call.method
        self._started = time.perf_counter()
        self._code = "CANCELLED"

    def ended(self) -> None:
        count_rpc(self._method, self._code, time.perf_counter() - self._started)

    def succeeded(self) -> None:
        self._code = "OK"

    async def failed(self, error: Exception, context: Context) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):  # the handler set a status itself
            self._code = context.code().name if hasattr(context.code(), "name") else "UNKNOWN"
            raise error
        if isinstance(error, grpc.aio.InternalError):  # nothing can be sent: the client has left
            raise asyncio.CancelledError from error
        if not isinstance(error, RollmeshError):
            _log.error("unexpected error", exc_info=error, extra=fields(method=self._method))
            request_id = current_request_id()
            error = RollmeshError(f"unexpected error; see the log under request id {request_id}")
        status = to_status(error)
        self._code = status_code_of(error).name
        try:
            await context.abort_with_status(rpc_status.to_status(status))
        except grpc.aio.InternalError:  # likewise; grpc would log it with a traceback
            raise asyncio.CancelledError from None
        raise AssertionError("abort returned")


def _wrap_unary(
    inner: Callable[[Any, Context], Awaitable[Any]],
    reader: RequestReader,
    call: _Call,
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def handle(request: Any, context: Context) -> Any:
        watch = _Watch(call)
        try:
            await call.admitted(request, context)
            answer = await inner(request, context)
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes a status
            await watch.failed(error, context)
        else:
            watch.succeeded()
            return answer
        finally:
            reader.release()
            watch.ended()

    return handle


def _wrap_stream(
    inner: Callable[[Any, Context], Any], reader: RequestReader, call: _Call, unread_s: float
) -> Callable[[Any, Context], Awaitable[None]]:
    async def handle(request: Any, context: Context) -> None:
        watch = _Watch(call)
        try:
            await call.admitted(request, context)
            await Answers(inner(request, context), context, unread_s, reader.release).send()
            watch.succeeded()
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes a status
            await watch.failed(error, context)
        finally:
            reader.release()
            watch.ended()

    return handle
