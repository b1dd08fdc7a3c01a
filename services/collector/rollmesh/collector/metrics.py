"""What a collector counts, beside the RPCs."""

from prometheus_client import Counter, Gauge

from rollmesh.collector.delivery import Consumer

SESSIONS = Counter(
    "rollmesh_collector_sessions_total", "Sessions that came: stored, or repeats.", ["kind"]
)
DELIVERIES = Counter(
    "rollmesh_collector_deliveries_total",
    "Units sent to consumers: the first time, or again.",
    ["consumer", "attempt"],
)
ACKNOWLEDGED = Counter(
    "rollmesh_collector_acknowledged_total", "Units that consumers have taken.", ["consumer"]
)
READY = Gauge("rollmesh_collector_ready", "Units that wait for a credit.", ["consumer"])
LEASED = Gauge("rollmesh_collector_leased", "Units sent and not acknowledged.", ["consumer"])


def watch(consumer: Consumer) -> None:
    """Lets the gauges look at a consumer whenever they are read."""
    READY.labels(consumer.name).set_function(lambda: consumer.ready)
    LEASED.labels(consumer.name).set_function(lambda: consumer.leased)
