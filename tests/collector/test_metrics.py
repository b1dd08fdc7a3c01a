"""What is counted of consumers."""

from prometheus_client import REGISTRY

from rollmesh.collector import metrics
from rollmesh.collector.log import Verdict
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
        metrics.DELIVERIES.labels(name, "first").inc()
        metrics.DELIVERIES.labels(name, "again").inc()
        metrics.ACKNOWLEDGED.labels(name).inc()
        metrics.READY.labels(name).set(1)
        metrics.LEASED.labels(name).set(1)
        metrics.count_filtered(name, Verdict(pb.FILTER_REASON_NOTHING_LEFT, [], [removed]))
    before = labelled("gone")
    assert len(before) >= 5
    metrics.forget("gone")
    metrics.forget("never-there")
    assert labelled("gone") == set()
    assert labelled("here") == before
