"""What is counted of consumers."""

from prometheus_client import REGISTRY

from rollmesh.collector import (
    ACKNOWLEDGED,
    DELIVERIES,
    LEASED,
    READY,
    Verdict,
    count_filtered,
    forget,
)
from rollmesh.v1 import collector_pb2 as pb


def labelled(consumer: str) -> set[str]:
    """Names of the samples that are labelled with a consumer."""
    return {
        sample.name
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.labels.get("consumer") == consumer
    }


def test_nothing_is_kept_of_a_consumer_that_is_deleted() -> None:
    removed = pb.RemovedTrajectories(session_id="s", reason=pb.FILTER_REASON_TURNS, count=2)
    for name in ("gone", "here"):
        DELIVERIES.labels(name, "first").inc()
        DELIVERIES.labels(name, "again").inc()
        ACKNOWLEDGED.labels(name).inc()
        READY.labels(name).set(1)
        LEASED.labels(name).set(1)
        count_filtered(name, Verdict(pb.FILTER_REASON_NOTHING_LEFT, [], [removed]))
    before = labelled("gone")
    assert len(before) >= 5
    forget("gone")
    forget("never-there")
    assert labelled("gone") == set()
    assert labelled("here") == before
