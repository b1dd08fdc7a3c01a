"""Metrics of the engine alone, beside the metrics of all services."""

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from rollmesh.engine.backend import Backend
from rollmesh.runtime import run_of, version_of
from rollmesh.runtime.codec import name_of
from rollmesh.v1 import engine_pb2, sampling_pb2

GENERATIONS = Counter(
    "rollmesh_engine_generations_total", "Requests that ended: stop, length, abort, score.", ["end"]
)
TOKENS = Counter(
    "rollmesh_engine_tokens_total", "Tokens: prompt, cached, sampled, scored.", ["kind"]
)
GENERATING = Counter(
    "rollmesh_engine_generating_seconds_total",
    "Time from the beginning of each generation to its end, those that wait included.",
)
RUNNING = Gauge("rollmesh_engine_running", "Requests being sampled.")
WAITING = Gauge("rollmesh_engine_waiting", "Requests waiting to be sampled.")
POLICY_VERSION = Gauge(
    "rollmesh_engine_policy_version", "Policy version of the current weights, within its run."
)
RUN = Gauge("rollmesh_engine_run", "Run of that policy version.")
REGISTERED = Gauge("rollmesh_engine_registered", "Whether the engine is registered.")
PAUSED_SECONDS = Histogram(
    "rollmesh_engine_update_paused_seconds",
    "Time that a weight update kept the engine from sampling.",
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)


_tokens = {kind: TOKENS.labels(kind) for kind in ("prompt", "cached", "sampled")}


@cache
def _generations(end: sampling_pb2.FinishReason.ValueType) -> Counter:
    return GENERATIONS.labels(name_of(sampling_pb2.FinishReason.DESCRIPTOR, end).lower())


def watch(backend: Backend) -> None:
    """Makes the gauges read a backend."""
    RUNNING.set_function(lambda: backend.load().running)
    WAITING.set_function(lambda: backend.load().waiting)
    POLICY_VERSION.set_function(lambda: version_of(backend.load().policy_version))
    RUN.set_function(lambda: run_of(backend.load().policy_version))


def scored(positions: int) -> None:
    """Counts a scored sequence."""
    GENERATIONS.labels("score").inc()
    TOKENS.labels("scored").inc(positions)


def finished(finish: engine_pb2.GenerateFinish, seconds: float) -> None:
    """Counts a finished generation and its time."""
    GENERATING.inc(seconds)
    _generations(finish.reason).inc()
    _tokens["prompt"].inc(finish.prompt_tokens)
    _tokens["cached"].inc(finish.cached_tokens)
    _tokens["sampled"].inc(finish.version_spans[-1].end if finish.version_spans else 0)
