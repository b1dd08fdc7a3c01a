"""Traces: spans of this process, sent to a receiver of OTLP by OpenTelemetry's exporters.

A place in a trace travels as the `traceparent` of W3C, in gRPC metadata and in messages of long
streams. Inside a process a context variable has it. A trace is sampled where it begins, and all
services keep to that. The SDK of OpenTelemetry is imported only if an endpoint is set. Without
one, each function here returns after one `if`.

A receiver never delays a call: ended spans wait in a bounded queue, and a thread sends them.
"""

import contextlib
import contextvars
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from rollmesh.runtime.access.tls import read_secret
from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry.logs import fields

TRACEPARENT = "traceparent"
"""Name of the header, and of the entry of gRPC metadata."""
_HEADER = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([\x20-\x7e]*)")
_MOST_WAITING, _MOST_WITH_CONTENT = 4_096, 256
"""Ended spans that wait to be sent. Further ones are dropped. One has up to 192 KiB of content."""
_BATCH, _BATCH_WITH_CONTENT = 512, 16
"""Spans in a message, which receivers of gRPC refuse above 4 MiB."""
_DELAY_MS = 1_000
_EXPORT_S = 10.0
_LAST_WORD_S = 1.0
"""Time for the last spans when the process stops. The others are lost."""
_SHARES = 1 << 64
_log = logging.getLogger(__name__)
Attributes: TypeAlias = Mapping[str, Any]
"""Values by name. A None is left out."""


class Place(NamedTuple):
    """A span of a trace, as `traceparent` names it."""

    trace_id: int
    span_id: int
    """0 for the beginning of a trace."""
    sampled: bool

    @property
    def header(self) -> str:
        """The value of `traceparent`."""
        flags = "01" if self.sampled else "00"
        return f"00-{self.trace_id:032x}-{self.span_id or 1:016x}-{flags}"


NOWHERE = Place(0, 0, sampled=False)
"""No trace."""


@dataclass(slots=True, eq=False)
class Span:
    """One span. Times are nanoseconds since 1970."""

    name: str
    kind: str
    """`server`, `client`, `internal`, `producer` or `consumer`."""
    place: Place
    parent_id: int
    """0 for the root."""
    start_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    end_ns: int = 0
    events: list[tuple[str, int, Attributes]] = field(default_factory=list)
    links: Sequence[Place] = ()
    error: str = ""
    """The type of its error. Empty if it has none."""

    def set(self, attributes: Attributes) -> None:
        """Sets attributes."""
        self.attributes.update(attributes)

    def describe(self, make: Callable[[], Attributes]) -> None:
        """Sets the attributes that a function returns. Its errors are logged: nobody else fails."""
        try:
            self.attributes.update(make())
        except Exception:  # the edge: a trace must not stop a turn
            _log.exception("span not described", extra=fields(span=self.name))

    def fail(self, error: BaseException) -> None:
        """Marks it as failed with an error."""
        self.error = error.reason if isinstance(error, RollmeshError) else type(error).__name__


_here: contextvars.ContextVar[Span | Place | None] = contextvars.ContextVar("trace", default=None)
_recorder: "_Recorder | None" = None


def is_on() -> bool:
    """Returns whether this process sends spans."""
    return _recorder is not None


def takes_content() -> bool:
    """Returns whether spans have messages and tools."""
    return _recorder is not None and _recorder.with_content


# Where a span is.


def place_of(header: str) -> Place:
    """Returns the place that a `traceparent` names, `NOWHERE` if it is none."""
    found = _HEADER.fullmatch(header) if header else None
    if found is None or header.startswith("ff"):
        return NOWHERE
    place = Place(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & 1))
    return place if place.trace_id and place.span_id else NOWHERE


def place_of_session(session_id: str) -> Place:
    """Returns the root of a session's own trace, the same in every service and at any time."""
    digest = sha256(session_id.encode()).digest()
    trace_id = int.from_bytes(digest[:16], "big") or 1
    return _shared(Place(trace_id, int.from_bytes(digest[16:24], "big") or 1, sampled=True))


def _shared(place: Place) -> Place:
    """Returns a place, sampled only if the ratio has it: by the trace, as OpenTelemetry does."""
    if _recorder is None:
        return place
    within = place.trace_id % _SHARES < _recorder.ratio * _SHARES
    return place._replace(sampled=place.sampled and within)


def _begun() -> Place:
    trace_id = secrets.randbits(128) or 1
    return _shared(Place(trace_id, 0, sampled=True))


def carried() -> str:
    """Returns the `traceparent` for a call to another service. Empty without a trace."""
    here = _here.get() if _recorder is not None else None
    place = here.place if isinstance(here, Span) else here
    return place.header if place is not None and place.trace_id else ""


def join(header: str) -> None:
    """Puts the current task into the trace that its caller named."""
    if _recorder is not None:
        _here.set(place_of(header))


# Recording.


class _Entered:
    """The block of a span. Its error is the span's."""

    __slots__ = ("_span", "_token", "_was")

    def __init__(self, span: Span | None, place: Place) -> None:
        self._span, self._was = span, place

    def __enter__(self) -> Span | None:
        self._token = _here.set(self._span or self._was)
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _here.reset(self._token)
        if self._span is not None:
            if error is not None:
                self._span.fail(error)
            record(self._span)


_OFF: contextlib.AbstractContextManager[Span | None] = contextlib.nullcontext()


def span(
    name: str,
    kind: str,
    attributes: Attributes | None = None,
    *,
    of_caller: str | None = None,
    of_agent: str | None = None,
) -> contextlib.AbstractContextManager[Span | None]:
    """Returns the block of a span. It yields None if the span is not sampled.

    Its parent is the current span. Without one a trace begins, which the ratio may leave out.

    Args:
        name: Its name.
        kind: As in `Span`.
        attributes: Those that are known at its beginning.
        of_caller: `traceparent` of another service, whose word on sampling counts. If it is empty
            there is no span.
        of_agent: `traceparent` of an agent. The ratio applies to its traces too.
    """
    if _recorder is None:
        return _OFF
    if of_caller is not None:
        parent = place_of(of_caller)
    elif of_agent is not None:
        parent = _shared(place_of(of_agent))
        parent = parent if parent.trace_id else _begun()
    else:
        here = _here.get()
        parent = (here.place if isinstance(here, Span) else here) or _begun()
    if not parent.sampled:
        return _Entered(None, parent)
    place = Place(parent.trace_id, _new_id(), sampled=True)
    return _Entered(
        Span(name, kind, place, parent.span_id, time.time_ns(), dict(attributes or {})), parent
    )


def note(name: str, attributes: Attributes) -> None:
    """Adds an event to the current span, if it is sampled."""
    if _recorder is not None and isinstance(here := _here.get(), Span):
        here.events.append((name, time.time_ns(), attributes))


def tell(attributes: Attributes) -> None:
    """Sets attributes of the current span, if it is sampled."""
    if _recorder is not None and isinstance(here := _here.get(), Span):
        here.attributes.update(attributes)


def record(span: Span) -> None:
    """Ends a span, unless it has ended, and sends it soon."""
    span.end_ns = span.end_ns or max(time.time_ns(), span.start_ns)
    if _recorder is not None:
        _recorder.take(span)


def child(
    name: str, kind: str, parent: Place, took_ms: float, attributes: Attributes, error: str = ""
) -> None:
    """Records a span that ends now and took a time, milliseconds, if its parent is sampled."""
    if _recorder is not None and parent.sampled:
        place = Place(parent.trace_id, _new_id(), sampled=True)
        start_ns = time.time_ns() - round(took_ms * 1e6)
        record(Span(name, kind, place, parent.span_id, start_ns, dict(attributes), error=error))


def _new_id() -> int:
    return secrets.randbits(64) or 1  # not of `random`, which engines seed


# Sending.


@contextlib.contextmanager
def sending(service: str, config: TracesConfig) -> Iterator[None]:
    """Sends the spans of this process while the block runs, if an endpoint is set.

    Args:
        service: Name of the service.
        config: The settings of traces.

    Raises:
        ConfigError: A package is missing, or a setting is wrong.
    """
    global _recorder
    if not config.traces_endpoint:
        yield
        return
    _recorder = _Recorder(service, config)
    try:
        yield
    finally:
        recorder, _recorder = _recorder, None
        recorder.close()


class Exporter:
    """OpenTelemetry's exporter for the settings, whose outcomes are counted.

    Raises:
        ConfigError: The packages are missing, or the headers are wrong.
    """

    def __init__(
        self, config: TracesConfig, count: Callable[[str, int], None] = lambda *_: None
    ) -> None:
        """Opens nothing: the first batch does.

        Args:
            config: The settings.
            count: Called with an outcome, `sent` or `failed`, and a number of spans.
        """
        self._count = count
        headers, url = _headers(config), urlsplit(config.traces_endpoint)
        self.handed = 0
        """Spans that were sent or have failed."""
        try:
            if config.traces_protocol == "grpc":
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                    OTLPSpanExporter as Grpc,
                )

                self._inner: Any = Grpc(
                    endpoint=config.traces_endpoint,
                    insecure=url.scheme == "http",
                    headers={name.lower(): value for name, value in headers.items()},
                    timeout=_EXPORT_S,
                )
            else:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
                    OTLPSpanExporter as Http,
                )

                path = "" if url.path.strip("/") else "/v1/traces"
                endpoint = config.traces_endpoint.rstrip("/") + path
                self._inner = Http(endpoint=endpoint, headers=headers, timeout=_EXPORT_S)
        except ImportError as error:
            raise ConfigError(
                f"traces_endpoint: traces need the OpenTelemetry packages ({error.name} is "
                "missing): pip install 'rollmesh[traces]'"
            ) from error

    def export(self, spans: Sequence[Any]) -> bool:
        """Sends spans as the SDK has them, and returns whether the receiver took them."""
        sent = False
        try:
            sent = bool(self._inner.export(spans).name == "SUCCESS")
        finally:
            self.handed += len(spans)
            self._count("sent" if sent else "failed", len(spans))
        return sent

    def shutdown(self) -> None:
        """Closes the connection."""
        self._inner.shutdown()


def _headers(config: TracesConfig) -> dict[str, str]:
    found: dict[str, str] = {}
    if not config.traces_headers_file:
        return found
    path = Path(config.traces_headers_file)
    text = read_secret("traces_headers_file", path).decode("utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        if (one := _FIELD.fullmatch(line)) is None:
            raise ConfigError(
                f"traces_headers_file: {path}, line {number}: is no header; give NAME: VALUE"
            )
        found[one[1]] = one[2]
    return found


class Encoder:
    """Makes the SDK's spans of ours."""

    def __init__(self, service: str) -> None:
        """Names the service. The packages must be there."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        self._event, self._span, self._link = Event, ReadableSpan, Link
        self._context, self._kinds, self._status = SpanContext, SpanKind, Status
        self._code, self._sampled = StatusCode, TraceFlags(TraceFlags.SAMPLED)
        self._scope = InstrumentationScope("rollmesh")
        self._resource = Resource.create(
            {"service.name": f"rollmesh-{service}", "service.namespace": "rollmesh"}
        )

    def __call__(self, span: Span) -> Any:
        """Returns the SDK's form of a span."""
        place, error = span.place, span.error
        parent = place._replace(span_id=span.parent_id)
        attributes = {**span.attributes, "error.type": error} if error else span.attributes
        return self._span(
            span.name,
            self._at(place),
            self._at(parent) if span.parent_id else None,
            self._resource,
            _clean(attributes),
            [self._event(name, _clean(values), at_ns) for name, at_ns, values in span.events],
            [self._link(self._at(one)) for one in span.links],
            self._kinds[span.kind.upper()],
            status=self._status(self._code.ERROR, error) if error else self._status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _at(self, place: Place) -> Any:
        return self._context(
            place.trace_id, place.span_id, is_remote=True, trace_flags=self._sampled
        )


def _clean(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


class _Recorder:
    """The queue of ended spans, and the thread that sends them."""

    def __init__(self, service: str, config: TracesConfig) -> None:
        self.ratio, self.with_content = config.traces_ratio, config.traces_content
        self._most = _MOST_WITH_CONTENT if self.with_content else _MOST_WAITING
        from rollmesh.runtime.telemetry.metrics import count_spans  # the SDK has no metrics

        self._count, self._exporter = count_spans, Exporter(config, count_spans)
        self._encode = Encoder(service)
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._most,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=_BATCH_WITH_CONTENT if self.with_content else _BATCH,
        )
        self._taken = 0

    def take(self, span: Span) -> None:
        """Adds an ended span to the queue, or drops it."""
        if self._taken - self._exporter.handed >= self._most:
            self._count("dropped", 1)
            return
        self._taken += 1
        try:
            self._processor.on_end(self._encode(span))
        except Exception:  # the edge: a trace must not stop a turn
            self._taken -= 1
            self._count("dropped", 1)
            _log.exception("span not encoded", extra=fields(span=span.name))

    def close(self) -> None:
        """Sends the rest of the queue within a second, whatever the receiver does."""
        ending = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_LAST_WORD_S)
        if left := self._taken - self._exporter.handed:
            _log.warning("%d spans were not sent before the stop", left)
