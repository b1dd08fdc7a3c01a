"""Collector metrics besides those of the RPCs."""

from prometheus_client import Counter, Gauge, Summary

from rollmesh.collector.log import Verdict
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.telemetry import show_alarms
from rollmesh.v1 import collector_pb2 as pb, session_pb2

SESSIONS = Counter(
    "rollmesh_collector_sessions_total", "Sessions received: stored, or repeats.", ["kind"]
)
DELIVERIES = Counter(
    "rollmesh_collector_deliveries_total",
    "Units sent to consumers: for the first time, or redelivered.",
    ["consumer", "attempt"],
)
ACKNOWLEDGED = Counter(
    "rollmesh_collector_acknowledged_total", "Units that consumers acknowledged.", ["consumer"]
)
FILTERED = Counter(
    "rollmesh_collector_filtered_total",
    "What filters removed: units, or trajectories of units.",
    ["consumer", "reason", "what"],
)
ABANDONED_SEATS = Counter(
    "rollmesh_collector_abandoned_seats_total", "Seats of groups that no session took."
)
REWARDS = Counter(
    "rollmesh_collector_late_rewards_total",
    "Rewards set after their session.",
    ["kind"],
)
SESSION_REWARDS = Summary(
    "rollmesh_collector_session_rewards",
    "Rewards of sessions as they were stored, or set later.",
    ["model", "purpose"],
)
SCORES = Counter(
    "rollmesh_collector_scores_total",
    "Sessions scored or given up, and tries that failed.",
    ["outcome"],
)
TEACHER_SCORES = Counter(
    "rollmesh_collector_teacher_scores_total",
    "Trajectories that teachers scored or refused, and tries that failed.",
    ["outcome"],
)
REMOVED = Counter(
    "rollmesh_collector_removed_sessions_total", "Sessions removed after all had settled them."
)
EXPIRED = Counter(
    "rollmesh_collector_expired_consumers_total",
    "Consumers deleted because they had no stream for consumer_ttl_ms.",
)
STORE_ERRORS = Counter(
    "rollmesh_collector_store_errors_total", "Work that the store refused or failed.", ["reason"]
)
READY = Gauge(
    "rollmesh_collector_ready", "Units fetched from the store that wait for a credit.", ["consumer"]
)
REGISTERED = Gauge("rollmesh_collector_registered", "1 while the collector is registered.")
LEASED = Gauge("rollmesh_collector_leased", "Units sent and not acknowledged.", ["consumer"])
UNSCORED = Gauge(
    "rollmesh_collector_unscored", "Units that wait for the scores of a teacher.", ["consumer"]
)


def forget(name: str) -> None:
    """Removes the series of a deleted consumer."""
    for metric in (READY, LEASED, UNSCORED, DELIVERIES, ACKNOWLEDGED, FILTERED):
        metric.remove_by_labels({"consumer": name})
    show_alarms((), name)


def count_filtered(consumer: str, verdict: Verdict) -> None:
    """Counts the units that a settled verdict filtered for a consumer."""
    for part in verdict.removed:
        name = reason_name(part.reason)
        FILTERED.labels(consumer, name, "trajectory").inc(part.count)
    if verdict.reason:
        FILTERED.labels(consumer, reason_name(verdict.reason), "unit").inc()


def reason_name(reason: pb.FilterReason.ValueType) -> str:
    """Returns the name of a reason as used in metrics and logs, such as "policy_lag"."""
    return name_of(pb.FilterReason.DESCRIPTOR, reason).lower()


def observe_reward(session: session_pb2.SessionRecord, reward: float) -> None:
    """Observes the reward of a session."""
    purpose = session.purpose or session_pb2.SESSION_PURPOSE_TRAIN
    name = name_of(session_pb2.SessionPurpose.DESCRIPTOR, purpose).lower()
    SESSION_REWARDS.labels(session.model, name).observe(reward)
