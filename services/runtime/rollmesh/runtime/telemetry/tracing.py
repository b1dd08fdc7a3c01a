"""Traces: spans of this process, sent to a receiver of OTLP by OpenTelemetry's exporters.

A place in a trace travels as the `traceparent` of W3C, in gRPC metadata and in messages of long
streams. Inside a process a context variable has it. A trace is sampled where it begins, and all
services keep to that. What sends spans is imported only if an endpoint is set. Without one, each
function here returns after one `if`.
"""

import contextlib
import contextvars
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rollmesh.runtime.config import TracesConfig
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry.logs import fields

if TYPE_CHECKING:
    from rollmesh.runtime.telemetry.otlp import Recorder

TRACEPARENT = "traceparent"
"""Name of the header, and of the entry of gRPC metadata."""
_HEADER = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
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
_recorder: "Recorder | None" = None


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
        attributes: The attributes known at its beginning.
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

    Raises:
        ConfigError: A package is missing, or a setting is wrong.
    """
    global _recorder
    if not config.traces_endpoint:
        yield
        return
    from rollmesh.runtime.telemetry.otlp import Recorder

    _recorder = Recorder(service, config)
    try:
        yield
    finally:
        recorder, _recorder = _recorder, None
        recorder.close()
