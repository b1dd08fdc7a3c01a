"""Batches without padding: all tokens concatenated, and the start of each trajectory."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.columns import TrajectoryColumns, trajectory_columns
from rollmesh.batches.images import ImageInputs, ImageProcessor, row_inputs
from rollmesh.batches.layouts import columns_of, filled
from rollmesh.batches.rows import LeftOut, Rows


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """B trajectories with T tokens in total."""

    token_ids: NDArray[np.int64]
    """int64 [T]."""
    position_ids: NDArray[np.int64]
    """int64 [T]: from 0 in each trajectory. int64 [3, T] if a processor was given whose model has
    multi-dimensional positions."""
    loss_mask: NDArray[np.bool_]
    """bool [T]: whether the token is trained."""
    logprobs: NDArray[np.float32]
    """float32 [T]: under the policy that sampled the token; 0.0 if it was not sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [T]: version that sampled the token; -1 if it was not sampled."""
    rewards: NDArray[np.float32]
    """float32 [T]: see `Row.rewards`."""
    offsets: NDArray[np.int64]
    """int64 [B + 1]: start of each trajectory, then T; the `cu_seqlens` of the batch."""
    trajectories: TrajectoryColumns
    """One value per trajectory."""
    left_out: tuple[LeftOut, ...]
    """Trajectories that are not in the batch."""
    images: tuple[ImageInputs, ...] = ()
    """What the model needs for the images of each of `trajectories`; none without a processor."""


def ragged(rows: Rows, *, processor: ImageProcessor | None = None) -> RaggedBatch:
    """Concatenates the trajectories in their order.

    Args:
        rows: Rows to train on.
        processor: Of the model, if it takes images.

    Raises:
        InvalidFieldError: As with `pad`.
    """
    inputs = row_inputs(rows.rows, processor)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    columns = filled((int(offsets[-1]),), 0, inputs)
    for given, (start, end) in zip(columns_of(rows.rows, inputs), pairwise(offsets), strict=True):
        for name, values in given.items():
            columns[name][..., start:end] = values
    return RaggedBatch(
        **columns,
        offsets=offsets,
        trajectories=trajectory_columns(rows.rows),
        left_out=rows.left_out,
        images=inputs,
    )
