import math

import pytest
from hypothesis import given, strategies as st

from rollmesh.client import (
    Durations,
    GroupOutcome,
    GroupState,
    Outcome,
    RolloutSummary,
    SampleOutcome,
    needed_of,
)
from rollmesh.runtime.errors import InvalidFieldError

OUTCOMES: list[Outcome] = ["COMPLETED", "FAILED", "ABORTED"]


def outcome(index: int, how: Outcome = "COMPLETED", **fields: object) -> SampleOutcome:
    return SampleOutcome(group_id="g", sample_index=index, outcome=how, **fields)  # type: ignore[arg-type]


@given(ends=st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=12), data=st.data())
def test_a_group_is_whole_once_and_its_verdict_is_known_as_soon_as_it_cannot_change(
    ends: list[Outcome], data: st.DataObject
) -> None:
    size, needed = len(ends), data.draw(st.integers(0, len(ends)))
    group = GroupState("g", "sample", size, needed)
    whole: list[GroupOutcome] = []
    lost = 0
    for count, index in enumerate(data.draw(st.permutations(range(size))), 1):
        lost += ends[index] != "COMPLETED"
        found = group.add(outcome(index, ends[index]))
        assert group.failed == (size - lost < needed)
        assert (found is not None) == (count == size)
        whole += [found] if found else []
        with pytest.raises(ValueError, match="no open seat"):
            group.add(outcome(index))
    (result,) = whole
    assert [session.sample_index for session in result.sessions] == list(range(size))
    assert [session.outcome for session in result.sessions] == ends
    assert result.succeeded == (ends.count("COMPLETED") >= needed)
    assert result.succeeded != group.failed


@pytest.mark.parametrize("index", [-1, 2])
def test_a_place_that_the_group_does_not_have_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="no open seat"):
        GroupState("g", None, 2, 1).add(outcome(index))


@pytest.mark.parametrize(
    ("needed", "count"),
    [
        pytest.param("all", 4, id="any failed fails"),
        pytest.param("any", 1, id="one is enough"),
        pytest.param(3, 3, id="k"),
        pytest.param(0, 0, id="none"),
    ],
)
def test_a_group_needs_all_any_or_a_number(needed: str | int, count: int) -> None:
    assert needed_of(needed, 4) == count  # type: ignore[arg-type]


@pytest.mark.parametrize("needed", ["most", -1, 5])
def test_a_group_cannot_need_more_than_its_seats(needed: str | int) -> None:
    with pytest.raises(InvalidFieldError, match="needed"):
        needed_of(needed, 4)  # type: ignore[arg-type]


@given(st.lists(st.floats(0.001, 10_000), min_size=1), st.floats(0, 1))
def test_a_quantile_is_within_five_percent(seconds: list[float], share: float) -> None:
    durations = Durations()
    for each in seconds:
        durations.add(each)
    found = durations.quantile(share)
    exact = sorted(seconds)[max(math.ceil(share * len(seconds)) - 1, 0)]
    assert found is not None
    assert exact / 1.05 <= found <= exact * 1.05


def test_a_summary_stays_small_and_has_the_outcomes() -> None:
    summary = RolloutSummary()
    assert (summary.mean_reward, str(summary)) == (None, "")
    for at in range(100):
        summary.add(outcome(at, "FAILED", error_type=f"Error{at}", attempts=2))
    assert len(summary.errors) == 65
    assert summary.errors["other"] == 36
    summary.add(outcome(100, reward=0.5, session_id="s", seconds=2.0))
    assert summary.seconds.quantile(0.99) == pytest.approx(2, rel=0.05)
    assert (summary.counts["FAILED"], summary.retries, summary.mean_reward) == (100, 100, 0.5)
    assert str(summary).startswith(
        "completed 1, failed 100, seats lost 100, retries 100, reward 0.500, p50 "
    )
