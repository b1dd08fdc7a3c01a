"""Prometheus metrics of every service."""

from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from rollmesh.runtime.in_flight import BytesInFlight

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

_counter = lru_cache(RPCS.labels)  # looking children up takes a lock and longer than counting
_timer = lru_cache(RPC_SECONDS.labels)


def count_rpc(method: str, code: str, seconds: float) -> None:
    """Counts a completed RPC."""
    _counter(method, code).inc()
    _timer(method).observe(seconds)


def count_refused(reason: str) -> None:
    """Counts a call that was refused for its caller."""
    REFUSED_CALLS.labels(reason).inc()


def watch_bytes(in_flight: BytesInFlight) -> None:
    """Makes the gauge read a limit."""
    BYTES_IN_FLIGHT.set_function(lambda: in_flight.held)
