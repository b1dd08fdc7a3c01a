from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from rollmesh.batches import (
    Batch,
    Row,
    Rows,
    TrajectoryTooLongError,
    pack,
    pad,
    ragged,
    rows_of,
)
from rollmesh.client import SessionResult
from tests.batches.records import linear, session
from tests.batches.strategies import sessions

_LENGTH = 60  # longer than any trajectory of `sessions`
_LAYOUTS = [
    pytest.param(pad, id="right"),
    pytest.param(lambda rows: pad(rows, side="left"), id="left"),
    pytest.param(lambda rows: pack(rows, _LENGTH), id="packed"),
]
_NAMES = ("token_ids", "position_ids", "loss_mask", "logprobs", "policy_versions", "rewards")


def _rows(*lengths: int) -> Rows:
    return rows_of(
        [session(f"s{at}", [linear(f"t{at}", 1, n - 1)]) for at, n in enumerate(lengths)]
    )


def token_columns(row: Row) -> dict[str, NDArray[Any]]:
    """The columns of a row, in the dtypes of a batch."""
    trajectory = row.trajectory
    return {
        "token_ids": trajectory.token_ids.astype(np.int64),
        "position_ids": np.arange(len(row), dtype=np.int64),
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "policy_versions": trajectory.policy_versions,
        "rewards": row.rewards,
    }


@pytest.mark.parametrize("layout", _LAYOUTS)
@given(delivered=sessions())
def test_unpacking_gives_back_every_column_of_every_trajectory(
    layout: Callable[[Rows], Batch], delivered: list[SessionResult]
) -> None:
    rows = rows_of(delivered, untrained="keep")
    batch = layout(rows)
    for name in _NAMES:
        laid_out: NDArray[Any] = getattr(batch, name)
        for row, found in zip(rows, batch.unpack(laid_out), strict=True):
            expected = token_columns(row)[name]
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
    assert batch.trajectories.trajectory_ids == tuple(row.trajectory.trajectory_id for row in rows)


@pytest.mark.parametrize("layout", [*_LAYOUTS, pytest.param(ragged, id="ragged")])
@given(delivered=sessions())
def test_every_trained_token_and_all_reward_is_there_exactly_once(
    layout: Callable[[Rows], Any], delivered: list[SessionResult]
) -> None:
    batch = layout(rows_of(delivered))
    everything = [one for result in delivered for one in result.trajectories]
    assert batch.loss_mask.sum() == sum(one.loss_mask.sum() for one in everything)
    totals = batch.trajectories.reward.sum(dtype=np.float64)
    assert np.isclose(batch.rewards.sum(dtype=np.float64), totals)
    assert len(batch.trajectories) + len(batch.left_out) == len(everything)


@given(delivered=sessions())
def test_padding_is_marked_and_says_nothing(delivered: list[SessionResult]) -> None:
    batch = pack(rows_of(delivered), _LENGTH, pad_id=5)
    nothing = ~batch.attention_mask
    assert batch.attention_mask.sum() == batch.trajectories.num_tokens.sum()
    assert np.all(batch.token_ids[nothing] == 5)
    assert not batch.loss_mask[nothing].any()
    assert np.all(batch.policy_versions[nothing] == -1)
    assert np.all(batch.segment_ids[nothing] == 0)
    assert not batch.rewards[nothing].any()
    assert not batch.logprobs[nothing].any()


@given(delivered=sessions(), length=st.integers(2, _LENGTH))
def test_packing_keeps_to_the_length_and_says_what_did_not_fit(
    delivered: list[SessionResult], length: int
) -> None:
    rows = rows_of(delivered, untrained="keep")
    batch = pack(rows, length, too_long="leave_out")
    assert batch.token_ids.shape[1] == length
    too_long = {row.trajectory.trajectory_id for row in rows if len(row) > length}
    assert {one.trajectory_id for one in batch.left_out} == too_long
    assert {one.reason for one in batch.left_out} <= {"TRAJECTORY_TOO_LONG"}
    trained = batch.loss_mask.sum() + sum(one.trained_tokens for one in batch.left_out)
    assert trained == sum(row.trajectory.loss_mask.sum() for row in rows)
    half_full = (batch.attention_mask.sum(1) * 2 <= length).sum()
    assert half_full <= 1  # two such rows would have become one


def test_the_longest_goes_first_and_each_to_the_first_row_with_room() -> None:
    batch = pack(_rows(3, 7, 2, 5, 3), 10)
    assert batch.row_index.tolist() == [0, 0, 1, 1, 1]
    assert batch.start.tolist() == [7, 0, 8, 0, 5]
    assert batch.segment_ids[0].tolist() == [1] * 7 + [2] * 3
    assert batch.cu_seqlens(0).tolist() == [0, 7, 10]
    assert batch.cu_seqlens(1).tolist() == [0, 5, 8, 10]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert batch.cu_seqlens(0).dtype == np.int32


def test_cu_seqlens_end_where_the_padding_begins() -> None:
    assert pack(_rows(3, 2), 10).cu_seqlens(0).tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("side", "mask"),
    [
        pytest.param("right", [[1, 1, 1, 0], [1, 1, 1, 1]], id="right"),
        pytest.param("left", [[0, 1, 1, 1], [1, 1, 1, 1]], id="left"),
    ],
)
def test_padding_goes_to_the_side_that_was_asked_for(
    side: Literal["left", "right"], mask: list[list[int]]
) -> None:
    assert pad(_rows(3, 4), side=side).attention_mask.astype(int).tolist() == mask
    assert pad(_rows(3, 4), side=side, length=9).token_ids.shape == (2, 9)


_TOO_LONG: list[Any] = [
    pytest.param(lambda rows, **how: pad(rows, length=5, **how), id="pad"),
    pytest.param(lambda rows, **how: pack(rows, 5, **how), id="pack"),
]


@pytest.mark.parametrize("layout", _TOO_LONG)
def test_a_trajectory_that_does_not_fit_is_refused_by_name(layout: Callable[..., Any]) -> None:
    said = "trajectory t0: its sequence has 6 tokens and 5 fit"
    with pytest.raises(TrajectoryTooLongError, match=said):
        layout(_rows(6))


@pytest.mark.parametrize("layout", _TOO_LONG)
def test_a_trajectory_that_does_not_fit_is_left_out_whole_when_that_is_asked_for(
    layout: Callable[..., Any],
) -> None:
    batch = layout(_rows(6), too_long="leave_out")
    assert len(batch.trajectories) == 0
    assert [(one.trajectory_id, one.trained_tokens) for one in batch.left_out] == [("t0", 5)]


@given(delivered=sessions())
def test_a_ragged_batch_is_the_trajectories_one_after_the_other(
    delivered: list[SessionResult],
) -> None:
    rows = rows_of(delivered, untrained="keep")
    batch = ragged(rows)
    for at, row in enumerate(rows):
        here = slice(batch.offsets[at], batch.offsets[at + 1])
        for name, expected in token_columns(row).items():
            found = getattr(batch, name)[here]
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("layout", [*_LAYOUTS, pytest.param(ragged, id="ragged")])
def test_a_batch_of_nothing_has_the_dtypes_of_any_other(layout: Callable[[Rows], Any]) -> None:
    empty, full = layout(rows_of([])), layout(_rows(3))
    assert len(empty.trajectories) == 0
    for name in _NAMES:
        if hasattr(full, name):
            assert getattr(empty, name).dtype == getattr(full, name).dtype
