"""What a router counts, beside the RPCs."""

from prometheus_client import Counter, Gauge

from rollmesh.router.leases import LeaseTable

LEASE_REQUESTS = Counter(
    "rollmesh_router_lease_requests_total",
    "Requests for a lease: granted, or the reason of the refusal.",
    ["answer"],
)
FAULTS = Counter(
    "rollmesh_router_engine_faults_total", "Engines taken out of service for what they answered."
)
ENGINES = Gauge("rollmesh_router_engines", "Engines that are registered.")
LEASES = Gauge("rollmesh_router_leases", "Leases held.")
SESSIONS = Gauge("rollmesh_router_sessions", "Sessions that stick to an engine.")
TARGET_VERSION = Gauge(
    "rollmesh_router_target_policy_version",
    "Version that an engine must hold to be leased.",
    ["model"],
)


def watch(table: LeaseTable) -> None:
    """Lets the gauges look at a table whenever they are read."""
    ENGINES.set_function(lambda: len(table.engines))
    LEASES.set_function(lambda: sum(engine.leases for engine in table.engines.copy().values()))
    SESSIONS.set_function(
        lambda: sum(len(engine.sessions) for engine in table.engines.copy().values())
    )
