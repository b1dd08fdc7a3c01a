"""Converts batches to torch tensors and TensorDicts. Both packages are imported on demand."""

import importlib
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.images import ImageInputs, ImageProcessor, row_inputs
from rollmesh.batches.layouts import Batch, lay_out
from rollmesh.batches.rows import (
    Handling,
    LeftOut,
    PackageMissingError,
    Row,
    Rows,
    TrajectoryColumns,
    TrajectoryTooLongError,
    TreeColumns,
    refuse_or_leave,
    trajectory_columns,
)
from rollmesh.batches.tree_batches import TreeBatch

# Batches split into prompts, padded on the left, and responses, padded on the right.


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """B trajectories. P columns before the first sampled token, R columns from it on."""

    prompt_ids: NDArray[np.int64]
    """int64 [B, P], padded on the left."""
    prompt_mask: NDArray[np.bool_]
    """bool [B, P]: whether there is a token."""
    response_ids: NDArray[np.int64]
    """int64 [B, R], padded on the right: sampled tokens and the context between them."""
    response_mask: NDArray[np.bool_]
    """bool [B, R]: whether there is a token."""
    position_ids: NDArray[np.int64]
    """int64 [B, P + R]: over prompt and response together. 0 at padding. int64 [B, 3, P + R] if a
    processor was given whose model has multi-dimensional positions."""
    loss_mask: NDArray[np.bool_]
    """bool [B, R]: whether the token is trained."""
    logprobs: NDArray[np.float32]
    """float32 [B, R]: under the policy that sampled the token. 0.0 if it was not sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [B, R]: version that sampled the token. -1 if it was not sampled."""
    rewards: NDArray[np.float32]
    """float32 [B, R]: see `Row.rewards`."""
    trajectories: TrajectoryColumns
    """One value per trajectory."""
    left_out: tuple[LeftOut, ...]
    """Trajectories that are not in the batch, including those left out earlier."""
    images: tuple[ImageInputs, ...] = ()
    """The model's inputs for the images of each of `trajectories`. None without a processor."""


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
        prompt_length: P. None uses the longest prompt.
        response_length: R. None uses the longest response.
        pad_id: Token id of the padding.
        too_long: Handling of trajectories with a part that does not fit.
        processor: Of the model, if it takes images.

    Raises:
        TrajectoryTooLongError: With "refuse". Names the trajectory and the part.
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
    shape = (len(fitting), middle + behind)
    places = [
        (at, ..., slice(middle - prompt, middle - prompt + len(row)))
        for at, (row, prompt) in enumerate(zip(fitting, prompts, strict=True))
    ]
    columns = lay_out(fitting, places, shape, pad_id, inputs)
    present = np.zeros(shape, np.bool_)
    for here in places:
        present[here] = True
    return SplitBatch(
        prompt_ids=columns["token_ids"][:, :middle],
        prompt_mask=present[:, :middle],
        response_ids=columns["token_ids"][:, middle:],
        response_mask=present[:, middle:],
        position_ids=columns["position_ids"],
        loss_mask=columns["loss_mask"][:, middle:],
        logprobs=columns["logprobs"][:, middle:],
        policy_versions=columns["policy_versions"][:, middle:],
        rewards=columns["rewards"][:, middle:],
        trajectories=trajectory_columns(fitting),
        left_out=tuple(left_out),
        images=inputs,
    )


def _misfit(
    row: Row, prompt_length: int | None, response_length: int | None
) -> TrajectoryTooLongError | None:
    prompt = row.trajectory.prompt_tokens
    parts = (("prompt", prompt, prompt_length), ("response", len(row) - prompt, response_length))
    for part, tokens, most in parts:
        if most is not None and tokens > most:
            return TrajectoryTooLongError(row.trajectory.trajectory_id, part, tokens, most)
    return None


# Batches without padding: all tokens concatenated, and the start of each trajectory.


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
    """float32 [T]: under the policy that sampled the token. 0.0 if it was not sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [T]: version that sampled the token. -1 if it was not sampled."""
    rewards: NDArray[np.float32]
    """float32 [T]: see `Row.rewards`."""
    offsets: NDArray[np.int64]
    """int64 [B + 1]: start of each trajectory, then T. The `cu_seqlens` of the batch."""
    trajectories: TrajectoryColumns
    """One value per trajectory."""
    left_out: tuple[LeftOut, ...]
    """Trajectories that are not in the batch."""
    images: tuple[ImageInputs, ...] = ()
    """The model's inputs for the images of each of `trajectories`. None without a processor."""


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
    places = [(..., slice(start, end)) for start, end in pairwise(offsets.tolist())]
    columns = lay_out(rows.rows, places, (int(offsets[-1]),), 0, inputs)
    return RaggedBatch(
        **columns,
        offsets=offsets,
        trajectories=trajectory_columns(rows.rows),
        left_out=rows.left_out,
        images=inputs,
    )


Layout: TypeAlias = Batch | RaggedBatch | SplitBatch | TreeBatch


def to_torch(batch: Layout, device: Any = None) -> dict[str, Any]:
    """Returns the arrays of a batch, per token and per trajectory, as tensors with the same names.

    Per-token tensors of a `RaggedBatch` are nested tensors with the jagged layout: [B, j], where j
    is the length of each trajectory. Multi-dimensional positions are [B, 3, j]. The inputs for
    images are apart: see `image_tensors`.

    Args:
        batch: A batch of any layout.
        device: Device of the tensors. None leaves them on the CPU, where they share the arrays'
            memory.

    Raises:
        PackageMissingError: torch is not installed.
    """
    torch = _imported("torch", "a batch of tensors")
    arrays = _arrays(batch) | _arrays(_per_trajectory(batch))
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if isinstance(batch, RaggedBatch):
        offsets = found.pop("offsets")
        for name in _arrays(batch).keys() - {"offsets"}:
            values = found[name]
            found[name] = torch.nested.nested_tensor_from_jagged(
                values, offsets, jagged_dim=values.ndim
            )
    if device is not None:
        found = {name: tensor.to(device) for name, tensor in found.items()}
    return found


def image_tensors(batch: Layout) -> dict[str, Any]:
    """Returns the model's inputs for all images of a batch, in the order of their tokens.

    Args:
        batch: A batch that was laid out with an `ImageProcessor`.

    Returns:
        torch tensors by the names of the model's arguments (`pixel_values`, `image_grid_thw`, ...).
        Empty if the batch has no images.

    Raises:
        PackageMissingError: torch is not installed.
    """
    torch = _imported("torch", "a batch of tensors")
    order = np.arange(len(batch.images))
    if isinstance(batch, Batch):
        order = np.lexsort((batch.start, batch.row_index))[: len(order)]
    shown = [batch.images[at].tensors for at in order if batch.images[at].tensors]
    return {name: torch.cat([one[name] for one in shown]) for name in (shown[0] if shown else ())}


def to_tensordict(batch: Layout, device: Any = None) -> Any:
    """Returns a `TensorDict` of batch size [B] with the tensors and the ids of each trajectory.

    If rows are not trajectories (a packed batch), it has batch size [] and two entries: `rows` of
    batch size [R] with the per-token tensors, and `trajectories` of batch size [B]. For a
    `TreeBatch` it has batch size [] and a flat list of entries.

    Raises:
        PackageMissingError: torch or tensordict is not installed.
    """
    tensordict = _imported("tensordict", "a TensorDict")
    tensors = to_torch(batch, device)
    columns = _per_trajectory(batch)
    count = len(columns)
    texts = {
        field.name: tensordict.NonTensorStack(*value)
        for field in fields(columns)
        if isinstance(value := getattr(columns, field.name), tuple) and count
    }
    if isinstance(batch, TreeBatch):
        return tensordict.TensorDict(tensors | texts, batch_size=[], device=device)
    if not isinstance(batch, Batch) or _is_row_each(batch):
        return tensordict.TensorDict(tensors | texts, batch_size=[count], device=device)
    rows = {name: tensors.pop(name) for name, array in _arrays(batch).items() if array.ndim > 1}
    return tensordict.TensorDict(
        {
            "rows": tensordict.TensorDict(rows, batch_size=[len(batch.token_ids)]),
            "trajectories": tensordict.TensorDict(tensors | texts, batch_size=[count]),
        },
        batch_size=[],
        device=device,
    )


def _per_trajectory(batch: Layout) -> TrajectoryColumns | TreeColumns:
    return batch.trees if isinstance(batch, TreeBatch) else batch.trajectories


def _arrays(holder: Any) -> dict[str, NDArray[Any]]:
    found = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def _is_row_each(batch: Batch) -> bool:
    """Returns whether row i is trajectory i for every i."""
    count = len(batch.trajectories)
    return len(batch.token_ids) == count and np.array_equal(batch.row_index, np.arange(count))


def _imported(package: str, wanted: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise PackageMissingError(package, wanted) from error
