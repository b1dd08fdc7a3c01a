"""Receivers of OTLP, made from the protocol's messages: by gRPC, by HTTP, and one that hangs."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

trace_service_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc  # noqa: E402

from tests.waiting import until  # noqa: E402


@dataclass(frozen=True)
class SentSpan:
    """A span, decoded."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    links: list[str]
    """Span ids."""
    is_error: bool
    nanoseconds: int


@dataclass
class Receiver:
    """What a receiver got."""

    url: str = ""
    spans: list[SentSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take(self, request: Any, headers: dict[str, str]) -> None:
        self.headers.append(headers)
        self.spans += decoded(request)

    async def of_session(self, session_id: str, *names: str) -> list[SentSpan]:
        """The spans of all traces with a session in it, once they have these names.

        A name that is given twice is awaited twice.
        """

        def look() -> list[SentSpan]:
            traces = {
                one.trace_id
                for one in list(self.spans)
                if one.attributes.get("gen_ai.conversation.id") == session_id
            }
            found = [one for one in list(self.spans) if one.trace_id in traces]
            return found if Counter(names) <= Counter(one.name for one in found) else []

        return await until(look)


def decoded(request: Any) -> list[SentSpan]:
    """The spans of a message."""
    return [
        SentSpan(
            values_of(resource.resource.attributes)["service.name"],
            span.name,
            span.kind,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            values_of(span.attributes),
            [(one.name, values_of(one.attributes)) for one in span.events],
            [one.span_id.hex() for one in span.links],
            span.status.code == 2,
            span.end_time_unix_nano - span.start_time_unix_nano,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def values_of(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """Receives by HTTP."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces"
            if is_right:
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body), headers)
            self.send_response(200 if is_right else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def grpc_receiver() -> AsyncIterator[Receiver]:
    """Receives by gRPC."""
    receiver = Receiver()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        async def Export(self, request: Any, context: Any) -> Any:
            receiver.take(request, dict(context.invocation_metadata()))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0)


@asynccontextmanager
async def hanging_receiver() -> AsyncIterator[str]:
    """Accepts connections and never answers. Yields its URL."""
    taken: list[asyncio.StreamWriter] = []

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        await asyncio.Event().wait()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in taken:
            writer.close()
        server.close()
