"""What filters keep back, as a table."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rollmesh.collector import Verdict, judge, trained_spans, usable
from rollmesh.v1 import collector_pb2 as pb, session_pb2, trajectory_pb2
from tests.collector.records import record, trajectory
from tests.costs import steps

LENGTH_CUT = trajectory_pb2.FIDELITY_REASON_LENGTH_CUT
MIXED = trajectory_pb2.FIDELITY_REASON_MIXED_VERSIONS
EXACT = trajectory_pb2.FIDELITY_REASON_EXACT


def judged(
    rules: pb.DeliveryFilter, version: int | None, heads: Sequence[session_pb2.SessionRecord]
) -> Verdict:
    """Judges a unit for a consumer of sessions."""
    return judge(pb.Consumer(filter=rules, policy_version=version), heads)


def session(*rewards: float | None, **fields: Any) -> session_pb2.SessionRecord:
    """One trajectory for each reward. None takes the session's."""
    made = record(fields.pop("session_id", "s"))
    made.ClearField("reward")
    if (reward := fields.pop("reward", None)) is not None:
        made.reward = reward
    del made.trajectories[:]
    for at, reward in enumerate(rewards or (None,)):
        one = trajectory("s")
        one.trajectory_id = f"t{at}"
        if reward is not None:
            one.reward = reward
        for name, value in fields.items():
            setattr(one, name, value)
        made.trajectories.append(one)
    return made


def reasons(*values: trajectory_pb2.FidelityReason.ValueType) -> session_pb2.SessionRecord:
    made = session()
    made.trajectories[0].ClearField("reasons")
    made.trajectories[0].reasons.extend(values)
    return made


def sampled_by(version: int) -> session_pb2.SessionRecord:
    made = session()
    made.trajectories[0].version_spans[0].policy_version = version
    return made


@pytest.mark.parametrize(
    ("rules", "version", "head", "reason"),
    [
        pytest.param({}, 9, session(), "UNSPECIFIED", id="no rules"),
        pytest.param({"max_policy_lag": 2}, 5, sampled_by(3), "UNSPECIFIED", id="lag at the bound"),
        pytest.param({"max_policy_lag": 2}, 5, sampled_by(2), "POLICY_LAG", id="lag above"),
        pytest.param({"max_policy_lag": 0}, 5, sampled_by(5), "UNSPECIFIED", id="on policy"),
        pytest.param({"max_policy_lag": 0}, 5, sampled_by(6), "UNSPECIFIED", id="ahead"),
        pytest.param({"max_policy_lag": 0}, None, sampled_by(0), "UNSPECIFIED", id="no version"),
        pytest.param({"max_tokens": 6}, None, session(), "UNSPECIFIED", id="tokens at the bound"),
        pytest.param({"max_tokens": 5}, None, session(), "TOKENS", id="tokens above"),
        pytest.param({"max_turns": 1}, None, session(turns=1), "UNSPECIFIED", id="turns at bound"),
        pytest.param({"max_turns": 1}, None, session(turns=2), "TURNS", id="turns above"),
        pytest.param({"lineages": [1]}, None, session(lineage=1), "UNSPECIFIED", id="lineage kept"),
        pytest.param({"lineages": [1]}, None, session(lineage=5), "LINEAGE", id="other lineage"),
        pytest.param({"allowed_reasons": [EXACT]}, None, reasons(EXACT), "UNSPECIFIED", id="exact"),
        pytest.param(
            {"allowed_reasons": [EXACT]}, None, reasons(LENGTH_CUT), "FIDELITY", id="not exact"
        ),
        pytest.param(
            {"allowed_reasons": [LENGTH_CUT]},
            None,
            reasons(LENGTH_CUT, MIXED),
            "FIDELITY",
            id="one reason too many",
        ),
        pytest.param(
            {"allowed_reasons": [LENGTH_CUT, MIXED]},
            None,
            reasons(LENGTH_CUT, MIXED),
            "UNSPECIFIED",
            id="all allowed",
        ),
    ],
)
def test_each_rule_removes_sessions_beyond_it(
    rules: dict[str, Any], version: int | None, head: session_pb2.SessionRecord, reason: str
) -> None:
    verdict = judged(pb.DeliveryFilter(**rules), version, [head])
    if reason == "UNSPECIFIED":
        assert not verdict.reason
        assert verdict.kept == [[0]]
        assert not verdict.removed
    else:
        assert verdict.reason == pb.FILTER_REASON_NOTHING_LEFT
        (removed,) = verdict.removed
        assert pb.FilterReason.Name(removed.reason) == f"FILTER_REASON_{reason}"
        assert (removed.session_id, removed.count) == ("s", 1)


def two(*heads: session_pb2.SessionRecord) -> list[session_pb2.SessionRecord]:
    return list(heads)


@pytest.mark.parametrize(
    ("heads", "dropped"),
    [
        pytest.param(two(session(reward=1), session(reward=1)), True, id="equal"),
        pytest.param(two(session(reward=0), session(reward=1)), False, id="different"),
        pytest.param(two(session(reward=1)), False, id="one session has no variance to lack"),
        pytest.param(two(session(reward=1), session()), False, id="unknown"),
        pytest.param(two(session(1.0, 2.0), session(reward=1)), False, id="by trajectory"),
        pytest.param(two(session(1.0, reward=2), session(reward=1)), True, id="trajectory's wins"),
        pytest.param(
            two(session(reward=1), session(reward=1, lineage=5)), False, id="one session is left"
        ),
    ],
)
def test_groups_of_equal_rewards_are_dropped(
    *, heads: list[session_pb2.SessionRecord], dropped: bool
) -> None:
    rules = pb.DeliveryFilter(drop_zero_variance=True, lineages=[trajectory_pb2.LINEAGE_MAIN])
    assert bool(judged(rules, None, heads).reason) == dropped
    assert not judged(pb.DeliveryFilter(), None, heads).reason


def test_a_group_rewarded_by_turns_only_is_dropped_if_all_its_rewards_are_equal() -> None:
    one, other = session(), session()
    for made in (one, other):
        made.trajectories[0].segments[1].reward = 0.5
    rules = pb.DeliveryFilter(drop_zero_variance=True)
    assert judged(rules, None, [one, other]).reason == pb.FILTER_REASON_ZERO_VARIANCE
    other.trajectories[0].segments[1].reward = 1.0
    assert not judged(rules, None, [one, other]).reason
    other.trajectories[0].segments[1].ClearField("reward")
    assert not judged(rules, None, [one, other]).reason


def test_sessions_with_other_metadata_are_removed() -> None:
    one = session()
    one.metadata.update({"task": "7", "split": "train"})
    rules = pb.DeliveryFilter(metadata={"task": "7", "split": "train"})
    assert not judged(rules, None, [one]).reason
    one.metadata["split"] = "test"
    assert judged(rules, None, [one]).reason == pb.FILTER_REASON_METADATA
    del one.metadata["split"]
    assert not usable(pb.Consumer(filter=rules), one)


def test_turn_rewards_are_variance_too() -> None:
    one, other = session(reward=1), session(reward=1)
    other.trajectories[0].segments[1].reward = 0.5
    assert not judged(pb.DeliveryFilter(drop_zero_variance=True), None, [one, other]).reason


def test_a_session_keeps_what_passes_and_says_what_did_not() -> None:
    mixed = session(None, None, None)
    mixed.trajectories[1].lineage = trajectory_pb2.LINEAGE_AUXILIARY
    verdict = judged(pb.DeliveryFilter(lineages=[trajectory_pb2.LINEAGE_MAIN]), None, [mixed])
    assert not verdict.reason
    assert verdict.kept == [[0, 2]]
    assert [(part.reason, part.count) for part in verdict.removed] == [
        (pb.FILTER_REASON_LINEAGE, 1)
    ]


def test_a_session_without_trajectories_is_delivered_as_it_is() -> None:
    empty = record("s")
    del empty.trajectories[:]
    assert not judged(
        pb.DeliveryFilter(lineages=[trajectory_pb2.LINEAGE_MAIN]), None, [empty]
    ).reason
    assert not usable(pb.Consumer(), empty)


def test_the_lag_counts_from_the_oldest_token_that_is_trained_here() -> None:
    one = trajectory("s", tokens=10)
    one.ClearField("version_spans")
    one.ClearField("segments")
    for version, start, end, trained in ((1, 2, 4, False), (4, 4, 8, True), (3, 8, 10, True)):
        one.version_spans.add(policy_version=version, start=start, end=end)
        one.segments.add(start=start, end=end, node_id=start, sampled=True, trained=trained)
    assert min(span.policy_version for span in trained_spans(one)) == 3
    for segment in one.segments:
        segment.trained = False
    assert list(trained_spans(one)) == []


def test_the_trained_spans_of_a_long_trajectory_are_found_in_one_pass() -> None:
    taken = dict[int, int]()
    for turns in (50, 500):
        one = trajectory("s", tokens=10)
        one.ClearField("version_spans")
        one.ClearField("segments")
        for at in range(0, 2 * turns, 2):
            one.segments.add(start=at, end=at + 1)
            one.segments.add(start=at + 1, end=at + 2, sampled=True, trained=at > 0)
            one.version_spans.add(start=at + 1, end=at + 2)
        assert [span.start for span in trained_spans(one)] == [*range(3, 2 * turns, 2)]
        taken[turns] = steps(partial(list, trained_spans(one)))
    assert taken[500] < 20 * taken[50]


def test_usable_sessions_do_not_depend_on_the_lag() -> None:
    rules = pb.DeliveryFilter(max_policy_lag=0, max_tokens=6)
    assert usable(pb.Consumer(filter=rules), sampled_by(0))
    assert not usable(pb.Consumer(filter=pb.DeliveryFilter(max_tokens=5)), session())


@pytest.mark.parametrize("trajectories", [0, 1], ids=["empty", "with a trajectory"])
def test_sessions_of_another_model_are_not_delivered_even_without_trajectories(
    trajectories: int,
) -> None:
    made = session()
    made.model = "judge"
    del made.trajectories[trajectories:]
    for model, delivers in (("", True), ("judge", True), ("policy", False)):
        rules = pb.DeliveryFilter(model=model)
        verdict = judged(rules, None, [made])
        assert (not verdict.reason) is delivers
        assert usable(pb.Consumer(filter=rules), made) is (delivers and bool(trajectories))
    assert verdict.reason == pb.FILTER_REASON_MODEL


@pytest.mark.parametrize(
    ("allowed", "kept"),
    [
        pytest.param([], True, id="any"),
        pytest.param(["a", "b"], True, id="both"),
        pytest.param(["a"], False, id="one of two"),
        pytest.param(["c"], False, id="none"),
    ],
)
def test_a_filter_may_demand_the_numerics_of_trained_tokens(allowed: list[str], kept: bool) -> None:
    one = trajectory("s", tokens=10)
    one.ClearField("version_spans")
    one.ClearField("segments")
    for numerics, start, end, trained in (
        ("x", 0, 2, False),
        ("a", 2, 4, True),
        ("b", 4, 10, True),
    ):
        one.version_spans.add(numerics_id=numerics, start=start, end=end)
        one.segments.add(start=start, end=end, node_id=start, sampled=True, trained=trained)
    record = session_pb2.SessionRecord(session_id="s", trajectories=[one])
    verdict = judge(pb.Consumer(filter=pb.DeliveryFilter(numerics_ids=allowed)), [record])
    why = [] if kept else [pb.FILTER_REASON_NUMERICS]
    assert [removed.reason for removed in verdict.removed] == why


TEXT, LOGPROBS = session_pb2.CAPTURE_TEXT, session_pb2.CAPTURE_LOGPROBS
UNSET = session_pb2.CAPTURE_UNSPECIFIED


def captured(capture: session_pb2.Capture.ValueType) -> session_pb2.SessionRecord:
    made = session()
    made.capture = capture
    return made


@pytest.mark.parametrize(
    ("captures", "kept"),
    [
        pytest.param([], [True, True, False, False], id="as consumers of the last release"),
        pytest.param([session_pb2.CAPTURE_TOKENS], [True, True, False, False], id="tokens"),
        pytest.param([TEXT], [False, False, False, True], id="text"),
        pytest.param([LOGPROBS, TEXT], [False, False, True, True], id="text and more"),
    ],
)
def test_a_consumer_gets_the_captures_that_it_takes(
    captures: list[session_pb2.Capture.ValueType], kept: list[bool]
) -> None:
    rules = pb.DeliveryFilter(captures=captures)
    for capture, is_kept in zip(
        (UNSET, session_pb2.CAPTURE_TOKENS, LOGPROBS, TEXT), kept, strict=True
    ):
        head = captured(capture)
        reason = pb.FILTER_REASON_UNSPECIFIED if is_kept else pb.FILTER_REASON_CAPTURE
        assert judged(rules, None, [head]).reason == reason
        assert usable(pb.Consumer(filter=rules), head) == is_kept


def test_a_group_with_a_session_of_another_capture_is_not_delivered_at_all() -> None:
    group = [captured(UNSET), captured(TEXT)]
    for captures in ([], [TEXT]):
        verdict = judged(pb.DeliveryFilter(captures=captures), None, group)
        assert verdict.reason == pb.FILTER_REASON_CAPTURE
    both = pb.DeliveryFilter(captures=[session_pb2.CAPTURE_TOKENS, TEXT])
    assert not judged(both, None, group).reason


def test_an_abandoned_seat_has_no_capture_of_its_own() -> None:
    seat = session_pb2.SessionRecord(abandoned="away", outcome=session_pb2.SESSION_OUTCOME_LOST)
    verdict = judged(pb.DeliveryFilter(captures=[TEXT]), None, [captured(TEXT), seat])
    assert not verdict.reason
