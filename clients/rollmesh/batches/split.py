"""Batches cut into prompt and response: prompts padded on the left, responses on the right."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.errors import TrajectoryTooLongError
from rollmesh.batches.heads import Heads, heads_of
from rollmesh.batches.layouts import filled, token_columns
from rollmesh.batches.rows import Handling, LeftOut, Row, Rows, refuse_or_leave


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """B trajectories; P columns before the first sampled token, R from it on."""

    prompt_ids: NDArray[np.int64]
    """int64 [B, P], padded on the left."""
    prompt_mask: NDArray[np.bool_]
    """bool [B, P]: whether there is a token."""
    response_ids: NDArray[np.int64]
    """int64 [B, R], padded on the right: what was sampled, and the context between."""
    response_mask: NDArray[np.bool_]
    """bool [B, R]: whether there is a token."""
    position_ids: NDArray[np.int64]
    """int64 [B, P + R]: of prompt and response together; 0 where nothing is."""
    loss_mask: NDArray[np.bool_]
    """bool [B, R]: whether the token is trained."""
    logprobs: NDArray[np.float32]
    """float32 [B, R]: under the policy that sampled; 0.0 where nothing was sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [B, R]: version that sampled the token; -1 where nothing was sampled."""
    rewards: NDArray[np.float32]
    """float32 [B, R]: see `Row.rewards`."""
    heads: Heads
    """One value per trajectory."""
    left_out: tuple[LeftOut, ...]
    """Trajectories that are not in the batch, also those left out before."""


def split(
    rows: Rows,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_id: int = 0,
    too_long: Handling = "refuse",
) -> SplitBatch:
    """Lays out prompts and responses side by side.

    Args:
        rows: What is trained.
        prompt_length: P; None takes the longest prompt.
        response_length: R; None takes the longest response.
        pad_id: Token id of the padding.
        too_long: For trajectories with a part that does not fit.

    Raises:
        TrajectoryTooLongError: Under "refuse"; names the trajectory and the part.
    """
    fitting: list[Row] = []
    left_out = list(rows.left_out)
    for row in rows:
        error = _misfit(row, prompt_length, response_length)
        if error is None:
            fitting.append(row)
        else:
            left_out.append(refuse_or_leave(row.trajectory, error, too_long))
    prompts = [row.trajectory.prompt_tokens for row in fitting]
    responses = [len(row) - prompt for row, prompt in zip(fitting, prompts, strict=True)]
    middle = max(prompts, default=0) if prompt_length is None else prompt_length
    behind = max(responses, default=0) if response_length is None else response_length
    columns = filled((len(fitting), middle + behind), pad_id)
    present = np.zeros((len(fitting), middle + behind), np.bool_)
    for at, (row, prompt) in enumerate(zip(fitting, prompts, strict=True)):
        here = (at, slice(middle - prompt, middle - prompt + len(row)))
        present[here] = True
        for name, values in token_columns(row).items():
            columns[name][here] = values
    return SplitBatch(
        prompt_ids=columns["token_ids"][:, :middle],
        prompt_mask=present[:, :middle],
        response_ids=columns["token_ids"][:, middle:],
        response_mask=present[:, middle:],
        position_ids=columns["position_ids"],
        **_behind(columns, middle),
        heads=heads_of(fitting),
        left_out=tuple(left_out),
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
