"""Batches split into prompts, padded on the left, and responses, padded on the right."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.columns import TrajectoryColumns, trajectory_columns
from rollmesh.batches.errors import TrajectoryTooLongError
from rollmesh.batches.images import ImageInputs, ImageProcessor, row_inputs
from rollmesh.batches.layouts import columns_of, filled
from rollmesh.batches.rows import Handling, LeftOut, Row, Rows, refuse_or_leave


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """B trajectories; P columns before the first sampled token, R columns from it on."""

    prompt_ids: NDArray[np.int64]
    """int64 [B, P], padded on the left."""
    prompt_mask: NDArray[np.bool_]
    """bool [B, P]: whether there is a token."""
    response_ids: NDArray[np.int64]
    """int64 [B, R], padded on the right: sampled tokens and the context between them."""
    response_mask: NDArray[np.bool_]
    """bool [B, R]: whether there is a token."""
    position_ids: NDArray[np.int64]
    """int64 [B, P + R]: over prompt and response together; 0 at padding. int64 [B, 3, P + R] if a
    processor was given whose model has multi-dimensional positions."""
    loss_mask: NDArray[np.bool_]
    """bool [B, R]: whether the token is trained."""
    logprobs: NDArray[np.float32]
    """float32 [B, R]: under the policy that sampled the token; 0.0 if it was not sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [B, R]: version that sampled the token; -1 if it was not sampled."""
    rewards: NDArray[np.float32]
    """float32 [B, R]: see `Row.rewards`."""
    trajectories: TrajectoryColumns
    """One value per trajectory."""
    left_out: tuple[LeftOut, ...]
    """Trajectories that are not in the batch, including those left out earlier."""
    images: tuple[ImageInputs, ...] = ()
    """What the model needs for the images of each of `trajectories`; none without a processor."""


def split(
    rows: Rows,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_id: int = 0,
    too_long: Handling = "refuse",
    processor: ImageProcessor | None = None,
) -> SplitBatch:
    """Lays out prompts and responses side by side.

    Args:
        rows: Rows to train on.
        prompt_length: P; None uses the longest prompt.
        response_length: R; None uses the longest response.
        pad_id: Token id of the padding.
        too_long: Handling of trajectories with a part that does not fit.
        processor: Of the model, if it takes images.

    Raises:
        TrajectoryTooLongError: With "refuse"; names the trajectory and the part.
        InvalidFieldError: As with `pad`.
    """
    fitting: list[Row] = []
    left_out = list(rows.left_out)
    for row in rows:
        error = _misfit(row, prompt_length, response_length)
        if error is None:
            fitting.append(row)
        else:
            left_out.append(refuse_or_leave(row.trajectory, error, too_long))
    inputs = row_inputs(fitting, processor)
    prompts = [row.trajectory.prompt_tokens for row in fitting]
    responses = [len(row) - prompt for row, prompt in zip(fitting, prompts, strict=True)]
    middle = max(prompts, default=0) if prompt_length is None else prompt_length
    behind = max(responses, default=0) if response_length is None else response_length
    columns = filled((len(fitting), middle + behind), pad_id, inputs)
    present = np.zeros((len(fitting), middle + behind), np.bool_)
    for at, (given, prompt) in enumerate(zip(columns_of(fitting, inputs), prompts, strict=True)):
        start = middle - prompt
        here = (at, ..., slice(start, start + len(given["token_ids"])))
        present[here] = True
        for name, values in given.items():
            columns[name][here] = values
    return SplitBatch(
        prompt_ids=columns["token_ids"][:, :middle],
        prompt_mask=present[:, :middle],
        response_ids=columns["token_ids"][:, middle:],
        response_mask=present[:, middle:],
        position_ids=columns["position_ids"],
        **_behind(columns, middle),
        trajectories=trajectory_columns(fitting),
        left_out=tuple(left_out),
        images=inputs,
    )


def _behind(columns: dict[str, NDArray[Any]], middle: int) -> dict[str, NDArray[Any]]:
    names = ("loss_mask", "logprobs", "policy_versions", "rewards")
    return {name: columns[name][:, middle:] for name in names}


def _misfit(
    row: Row, prompt_length: int | None, response_length: int | None
) -> TrajectoryTooLongError | None:
    prompt = row.trajectory.prompt_tokens
    parts = (("prompt", prompt, prompt_length), ("response", len(row) - prompt, response_length))
    for part, tokens, most in parts:
        if most is not None and tokens > most:
            return TrajectoryTooLongError(row.trajectory.trajectory_id, part, tokens, most)
    return None
