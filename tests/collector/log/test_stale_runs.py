"""What a consumer of a run gets of the sessions that earlier runs sampled, as a table."""

import pytest

from rollmesh.collector import judge, usable
from rollmesh.runtime import number_of, opened
from rollmesh.v1 import collector_pb2 as pb, session_pb2
from rollmesh.v1.sampling_pb2 import PolicyRun, VersionSpan
from tests.collector.records import record

SECOND = opened(PolicyRun(), 5, 0)
OF_MATH = opened(PolicyRun(adapter="math"), 5, 0)
STALE, FRESH = number_of(0, 6), number_of(1, 6)


def session(*versions: int, adapter: str = "", model: str = "") -> session_pb2.SessionRecord:
    """A session whose context was sampled by the first versions, and its last token by the last."""
    made = record("s")
    made.model = model
    (row,) = made.trajectories
    del row.version_spans[:]
    for at, version in enumerate(versions):
        start = 6 - len(versions) + at
        row.version_spans.append(
            VersionSpan(policy_version=version, start=start, end=start + 1, adapter=adapter)
        )
    return made


@pytest.mark.parametrize(
    ("run", "head", "reason"),
    [
        pytest.param(PolicyRun(), session(STALE), 0, id="no run"),
        pytest.param(SECOND, session(STALE), pb.FILTER_REASON_STALE_RUN, id="abandoned"),
        pytest.param(SECOND, session(5), 0, id="the version of the checkpoint"),
        pytest.param(SECOND, session(STALE, FRESH), pb.FILTER_REASON_STALE_RUN, id="in part"),
        pytest.param(SECOND, session(4, FRESH), 0, id="goes on from before the checkpoint"),
        pytest.param(SECOND, session(STALE, adapter="math"), 0, id="another policy"),
        pytest.param(
            OF_MATH, session(STALE, adapter="math"), pb.FILTER_REASON_STALE_RUN, id="an adapter"
        ),
        pytest.param(OF_MATH, session(STALE), 0, id="the base model of an adapter"),
    ],
)
def test_a_trajectory_with_an_abandoned_token_is_removed(
    run: PolicyRun, head: session_pb2.SessionRecord, reason: int
) -> None:
    consumer = pb.Consumer()
    if run.number:
        consumer.policy_run.CopyFrom(run)
    verdict = judge(consumer, [head])
    assert [one.reason for one in verdict.removed] == [reason] * bool(reason)
    assert usable(consumer, head) is not bool(reason)
    consumer.filter.stale_runs = pb.STALE_RUNS_KEEP
    assert not judge(consumer, [head]).removed


def test_tokens_of_context_count_as_well() -> None:
    head = session(STALE, FRESH)
    head.trajectories[0].segments[1].trained = False
    (removed,) = judge(pb.Consumer(policy_run=SECOND), [head]).removed
    assert removed.reason == pb.FILTER_REASON_STALE_RUN


def test_a_run_says_nothing_about_sessions_of_other_models() -> None:
    run = opened(PolicyRun(model="policy"), 5, 0)
    consumer = pb.Consumer(policy_run=run)
    assert judge(consumer, [session(STALE, model="policy")]).removed
    assert not judge(consumer, [session(STALE, model="judge")]).removed


def test_a_group_keeps_the_samples_that_belong_to_the_run() -> None:
    consumer = pb.Consumer(unit=pb.DELIVERY_UNIT_GROUP, policy_run=SECOND)
    heads = [session(5), session(STALE), session(FRESH)]
    verdict = judge(consumer, heads)
    assert not verdict.reason
    assert verdict.kept == [[0], [], [0]]


def test_abandoned_tokens_that_are_kept_have_no_lag() -> None:
    rules = pb.DeliveryFilter(max_policy_lag=1, stale_runs=pb.STALE_RUNS_KEEP)
    consumer = pb.Consumer(policy_run=SECOND, policy_version=number_of(1, 8), filter=rules)
    assert not judge(consumer, [session(STALE)]).removed
    (removed,) = judge(consumer, [session(FRESH)]).removed
    assert removed.reason == pb.FILTER_REASON_POLICY_LAG
