"""Prometheus metrics of every service."""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics

from rollmesh.runtime.in_flight import BytesInFlight
from rollmesh.v1 import server_pb2

# They would double the series of each counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

RPCS = Counter("rollmesh_rpcs_total", "RPCs answered, by method and gRPC code.", ["method", "code"])
RPC_SECONDS = Histogram(
    "rollmesh_rpc_seconds",
    "Time from the arrival of an RPC to its end.",
    ["method"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600),
)

REFUSED_CALLS = Counter(
    "rollmesh_refused_calls_total",
    "Calls refused for their caller, by reason: no_token, unknown_token, wrong_role, or "
    "metrics for a scrape.",
    ["reason"],
)
BYTES_IN_FLIGHT = Gauge(
    "rollmesh_bytes_in_flight", "Bytes of the requests that are being received and answered."
)
DISK_FREE = Gauge(
    "rollmesh_disk_free_bytes", "Bytes free on the disk of the service's folder, 0 without one."
)
DISK_TOTAL = Gauge("rollmesh_disk_total_bytes", "Size of that disk, bytes, 0 without one.")
ALARM = Gauge(
    "rollmesh_alarm",
    "1 while an alarm is raised. docs/alarms.md says what to do.",
    ["name", "where"],
)

_SPANS = Counter(
    "rollmesh_trace_spans_total",
    "Spans of traces: sent, failed (the receiver refused them) or dropped (the queue was full).",
    ["end"],
)

_counter = lru_cache(RPCS.labels)  # looking children up takes a lock and longer than counting
_timer = lru_cache(RPC_SECONDS.labels)


def count_rpc(method: str, code: str, seconds: float) -> None:
    """Counts a completed RPC."""
    _counter(method, code).inc()
    _timer(method).observe(seconds)


def count_refused(reason: str) -> None:
    """Counts a call that was refused for its caller."""
    REFUSED_CALLS.labels(reason).inc()


def count_spans(end: str, number: int) -> None:
    """Counts spans that were sent, have failed, or were dropped."""
    _SPANS.labels(end).inc(number)


def watch_bytes(in_flight: BytesInFlight) -> None:
    """Makes the gauge read a limit."""
    BYTES_IN_FLIGHT.set_function(lambda: in_flight.held)


def watch_disk(folder: Path) -> None:
    """Makes the gauges read the disk of a folder. They are NaN while it cannot be read."""
    DISK_FREE.set_function(lambda: _disk(folder, lambda usage: usage.free))
    DISK_TOTAL.set_function(lambda: _disk(folder, lambda usage: usage.total))


def _disk(folder: Path, of: "Callable[[shutil._ntuple_diskusage], int]") -> float:
    with suppress(OSError):
        return of(shutil.disk_usage(folder))
    return math.nan


def show_alarms(raised: Iterable[tuple[str, str]], where: str = "") -> None:
    """Sets the gauge of alarms, and removes alarms that ended.

    Args:
        raised: Name of each alarm, and its server, consumer or session.
        where: Only alarms about this are removed. Empty removes any.
    """
    now = set(raised)
    for metric in list(ALARM.collect()):
        for one in metric.samples:
            key = (one.labels["name"], one.labels["where"])
            if key not in now and where in ("", key[1]):
                ALARM.remove(*key)
    for key in now:
        ALARM.labels(*key).set(1)


def samples(names: Set[str]) -> Iterator[server_pb2.MetricSample]:
    """Yields the samples of this process's metrics.

    Args:
        names: Their names. Empty means all of rollmesh's but the buckets of histograms.
    """
    for metric in REGISTRY.collect():
        if not (names or metric.name.startswith("rollmesh_")):
            continue
        for one in metric.samples:
            if one.name in names if names else not one.name.endswith("_bucket"):
                yield server_pb2.MetricSample(name=one.name, labels=one.labels, value=one.value)
