"""Metrics of the router, in addition to those of all services."""

from prometheus_client import Counter, Gauge

from rollmesh.router.leases import LeaseTable

LEASE_REQUESTS = Counter(
    "rollmesh_router_lease_requests_total",
    "Lease requests, by answer: granted, or the reason of the refusal.",
    ["answer"],
)
FAULTS = Counter(
    "rollmesh_router_engine_faults_total", "Engines taken out of service for an impossible answer."
)
ENGINES = Gauge("rollmesh_router_engines", "Registered engines.")
LEASES = Gauge("rollmesh_router_leases", "Held leases.")
SESSIONS = Gauge("rollmesh_router_sessions", "Sessions placed on an engine.")
TARGET_VERSION = Gauge(
    "rollmesh_router_target_policy_version",
    "Policy version that an engine must hold to be leased.",
    ["model"],
)


def watch(table: LeaseTable) -> None:
    """Makes the gauges read a lease table."""
    ENGINES.set_function(lambda: len(table.engines))
    LEASES.set_function(lambda: sum(engine.leases for engine in table.engines.copy().values()))
    SESSIONS.set_function(
        lambda: sum(len(engine.sessions) for engine in table.engines.copy().values())
    )
