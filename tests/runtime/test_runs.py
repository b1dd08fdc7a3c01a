"""Which policy versions belong to a run of a trainer, as tables."""

import pytest

from rollmesh.runtime import (
    MOST_ANCESTORS,
    STRIDE,
    belongs,
    check_current,
    check_run,
    is_stale,
    number_of,
    opened,
    run_of,
    start_of,
    told,
    version_of,
)
from rollmesh.runtime.errors import InvalidFieldError, RunAbandonedError
from rollmesh.v1.sampling_pb2 import PolicyRun, VersionSpan

FIRST = PolicyRun(model="policy")
SECOND = opened(FIRST, 5, 0)
THIRD = opened(SECOND, 8, 1)


def test_versions_of_the_first_run_are_the_numbers_of_the_trainer() -> None:
    assert number_of(0, 7) == 7
    assert (run_of(7), version_of(7)) == (0, 7)
    assert told(7) == "version 7"


def test_a_later_run_is_above_all_versions_of_earlier_ones() -> None:
    assert number_of(1, 0) > number_of(0, STRIDE - 1)
    assert told(number_of(2, 6)) == "version 6 of run 2"
    assert number_of(1, number_of(2, 6)) == number_of(2, 6)  # it is a policy version already


def test_a_run_begins_at_the_version_of_its_checkpoint() -> None:
    assert start_of(FIRST) == 0
    assert start_of(THIRD) == number_of(2, 8)
    assert (THIRD.model, list(THIRD.ancestors)) == ("policy", [5, number_of(1, 8)])


@pytest.mark.parametrize(
    ("run", "sampled", "belonging"),
    [
        (FIRST, (0, 9), True),
        (FIRST, (1, 9), False),  # of a trainer that replaced this one
        (SECOND, (0, 5), True),
        (SECOND, (0, 6), False),
        (SECOND, (1, 99), True),
        (THIRD, (0, 5), True),
        (THIRD, (0, 6), False),
        (THIRD, (1, 8), True),
        (THIRD, (1, 9), False),
        (opened(FIRST, 5, 1), (1, 5), False),  # both go back to the first run
        (opened(FIRST, 5, 1), (0, 5), True),
        (opened(SECOND, 3, 1), (0, 3), True),  # before the second run began
        (opened(SECOND, 3, 1), (0, 4), False),
    ],
)
def test_an_earlier_run_belongs_up_to_the_version_at_which_it_was_left(
    run: PolicyRun, sampled: tuple[int, int], belonging: bool
) -> None:
    assert belongs(run, number_of(*sampled)) is belonging


def test_a_new_run_has_a_number_that_nobody_uses() -> None:
    assert opened(FIRST, 5, 0).number == 1
    assert opened(FIRST, 5, 7).number == 8
    assert opened(THIRD, 9, 0).number == 3


def test_only_tokens_of_the_own_policy_are_stale() -> None:
    assert is_stale(SECOND, VersionSpan(policy_version=6))
    assert not is_stale(SECOND, VersionSpan(policy_version=6, adapter="other"))
    assert not is_stale(None, VersionSpan(policy_version=6))


def test_a_run_keeps_its_newest_ancestors() -> None:
    run = FIRST
    for version in range(MOST_ANCESTORS + 2):
        run = opened(run, version, 0)
    assert len(run.ancestors) == MOST_ANCESTORS
    assert not belongs(run, 0)
    assert belongs(run, run.ancestors[0])
    check_run("run", run)


def test_a_trainer_of_an_earlier_run_is_told_the_current_one() -> None:
    check_current("hello.run", 2, THIRD)
    with pytest.raises(RunAbandonedError, match=r"hello\.run: run 1 is .* run 2 .* version 8"):
        check_current("hello.run", 1, THIRD)


@pytest.mark.parametrize(
    "ancestors", [[-1], [number_of(1, 3)], [2, 3], [number_of(2, 0), 1], list(range(1001))]
)
def test_ancestors_that_are_no_earlier_runs_are_refused(ancestors: list[int]) -> None:
    with pytest.raises(InvalidFieldError, match=r"run\.ancestors"):
        check_run("run", PolicyRun(number=1, ancestors=ancestors))
