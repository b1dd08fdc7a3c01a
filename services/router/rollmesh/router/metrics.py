"""Metrics of the router, in addition to those of all services."""

from contextlib import suppress

from prometheus_client import Counter, Gauge, Histogram

from rollmesh.router.leases import LeaseTable
from rollmesh.runtime import run_of, version_of

LEASE_REQUESTS = Counter(
    "rollmesh_router_lease_requests_total",
    "Lease requests, by answer: granted, or the reason of the refusal.",
    ["answer"],
)
GRANTED = LEASE_REQUESTS.labels("granted")
QUEUE = Gauge("rollmesh_router_queue_length", "Requests that wait for a lease.")
WAITED_SECONDS = Histogram(
    "rollmesh_router_queue_seconds",
    "Time that requests waited in the queue, without requests that were answered at once.",
    buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
QUEUE_REFUSALS = Counter(
    "rollmesh_router_queue_refusals_total",
    "Requests that got no lease although they could wait, by reason: full (the queue), deadline.",
    ["reason"],
)
PROLONGED = Gauge(
    "rollmesh_router_prolonged_waits",
    "Waits that began again because every engine was paused, asleep or being updated.",
)
CIRCUITS = Counter(
    "rollmesh_router_circuit_changes_total",
    "Changes of the circuits of engines, by new state: open, half-open, closed.",
    ["state"],
)
FAULTS = Counter(
    "rollmesh_router_engine_faults_total", "Gateways' reports of impossible answers of engines."
)
ENGINES = Gauge("rollmesh_router_engines", "Registered engines.")
LEASES = Gauge("rollmesh_router_leases", "Held leases.")
SESSIONS = Gauge("rollmesh_router_sessions", "Sessions placed on an engine.")
OPEN_CIRCUITS = Gauge("rollmesh_router_open_circuits", "Engines whose circuit is open.")
TARGET_VERSION = Gauge(
    "rollmesh_router_target_policy_version",
    "Policy version that an engine must hold to be leased, within its run.",
    ["model"],
)
TARGET_RUN = Gauge("rollmesh_router_target_run", "Run of that policy version.", ["model"])


def show_target(model: str, policy_version: int) -> None:
    """Sets the gauges of the version that engines of a model must hold."""
    TARGET_VERSION.labels(model).set(version_of(policy_version))
    TARGET_RUN.labels(model).set(run_of(policy_version))


def forget_target(model: str) -> None:
    """Removes them."""
    for gauge in (TARGET_VERSION, TARGET_RUN):
        with suppress(KeyError):
            gauge.remove(model)


def watch(table: LeaseTable) -> None:
    """Makes the gauges read a lease table."""
    ENGINES.set_function(lambda: len(table.engines))
    LEASES.set_function(lambda: table.leases)
    SESSIONS.set_function(lambda: table.sessions)
    QUEUE.set_function(lambda: table.waiting)
    PROLONGED.set_function(lambda: table.prolonged)
    OPEN_CIRCUITS.set_function(lambda: len(table.fleet.opened))
