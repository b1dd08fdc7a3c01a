"""Spans on their way to a receiver of OTLP, by OpenTelemetry's SDK and exporters.

A receiver never delays a call: ended spans wait in a bounded queue, and a thread sends them.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollmesh.runtime.access.tls import read_secret
from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.runtime.telemetry.metrics import count_spans
from rollmesh.runtime.telemetry.tracing import Attributes, Place, Span

_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([\x20-\x7e]*)")
_MOST_WAITING, _MOST_WITH_CONTENT = 4_096, 256
"""Ended spans that wait to be sent. Further ones are dropped. One has up to 192 KiB of content."""
_BATCH, _BATCH_WITH_CONTENT = 512, 16
"""Spans in a message, which receivers of gRPC refuse above 4 MiB."""
_DELAY_MS = 1_000
_EXPORT_S = 10.0
_LAST_WORD_S = 1.0
"""Time for the last spans when the process stops. The others are lost."""
_log = logging.getLogger(__name__)


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


class Recorder:
    """The queue of ended spans, and the thread that sends them."""

    def __init__(self, service: str, config: TracesConfig) -> None:
        """Begins to send.

        Raises:
            ConfigError: A package is missing, or a setting is wrong.
        """
        self.ratio, self.with_content = config.traces_ratio, config.traces_content
        self._most = _MOST_WITH_CONTENT if self.with_content else _MOST_WAITING
        self._exporter = Exporter(config, count_spans)  # the SDK has no metrics
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
            count_spans("dropped", 1)
            return
        self._taken += 1
        try:
            self._processor.on_end(self._encode(span))
        except Exception:  # the edge: a trace must not stop a turn
            self._taken -= 1
            count_spans("dropped", 1)
            _log.exception("span not encoded", extra=fields(span=span.name))

    def close(self) -> None:
        """Sends the rest of the queue within a second, whatever the receiver does."""
        ending = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_LAST_WORD_S)
        if left := self._taken - self._exporter.handed:
            _log.warning("%d spans were not sent before the stop", left)
