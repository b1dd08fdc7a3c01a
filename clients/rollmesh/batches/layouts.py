"""Batches: padded or packed into rows, or ragged, and the torch tensors of them.

PyTorch is imported on demand.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.images import ImageInputs, ImageProcessor, row_inputs
from rollmesh.batches.rows import (
    Handling,
    LeftOut,
    PackageMissingError,
    Row,
    Rows,
    TrajectoryColumns,
    TrajectoryTooLongError,
    refuse_or_leave,
    trajectory_columns,
)

# Batches of fixed shape: padded or packed.

Cell: TypeAlias = tuple[int, int]
"""Row of the batch and column of the first token."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B trajectories in R rows of L tokens."""

    token_ids: NDArray[np.int64]
    """int64 [R, L]. The padding id at padding."""
    attention_mask: NDArray[np.bool_]
    """bool [R, L]: whether there is a token."""
    segment_ids: NDArray[np.int32]
    """int32 [R, L]: number of the trajectory in the row, from 1. 0 at padding. A token may attend
    to earlier tokens with the same number."""
    position_ids: NDArray[np.int64]
    """int64 [R, L]: from 0 in each trajectory. 0 at padding. int64 [R, 3, L] if a processor was
    given whose model has multi-dimensional positions."""
    loss_mask: NDArray[np.bool_]
    """bool [R, L]: whether the token is trained."""
    logprobs: NDArray[np.float32]
    """float32 [R, L]: under the policy that sampled the token. 0.0 if it was not sampled."""
    policy_versions: NDArray[np.int64]
    """int64 [R, L]: version that sampled the token. -1 if it was not sampled."""
    rewards: NDArray[np.float32]
    """float32 [R, L]: see `Row.rewards`."""
    row_index: NDArray[np.int64]
    """int64 [B]: row of each trajectory."""
    start: NDArray[np.int64]
    """int64 [B]: column of the trajectory's first token."""
    trajectories: TrajectoryColumns
    """One value per trajectory, in the order of the input rows."""
    left_out: tuple[LeftOut, ...]
    """Trajectories that are not in the batch, including those left out earlier."""
    images: tuple[ImageInputs, ...] = ()
    """The model's inputs for the images of each of `trajectories`. None without a processor."""

    def unpack(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Splits any [R, L, ...] into one [N, ...] for each of `trajectories`, in their order."""
        cells = zip(self.row_index, self.start, self.trajectories.num_tokens, strict=True)
        return [values[row, start : start + tokens] for row, start, tokens in cells]

    def cu_seqlens(self, row: int) -> NDArray[np.int32]:
        """Returns the start of each trajectory of a row, and the end of the last. Int32 [S + 1]."""
        ids = self.segment_ids[row]
        return np.searchsorted(ids[ids > 0], np.arange(1, ids.max() + 2)).astype(np.int32)


def pad(
    rows: Rows,
    *,
    side: Literal["right", "left"] = "right",
    length: int | None = None,
    pad_id: int = 0,
    too_long: Handling = "refuse",
    processor: ImageProcessor | None = None,
) -> Batch:
    """Lays out one trajectory per row.

    Args:
        rows: Rows to train on.
        side: Side of the padding.
        length: Tokens per row (L). None uses the longest trajectory.
        pad_id: Token id of the padding.
        too_long: Handling of trajectories with more than `length` tokens.
        processor: Of the model, if it takes images.

    Raises:
        TrajectoryTooLongError: With "refuse". Names the trajectory.
        InvalidFieldError: A trajectory has images and there is no processor, or as
            `ImageProcessor.inputs`.
    """
    fitting, left_out = fit(rows, length, too_long)
    longest = max(map(len, fitting), default=0) if length is None else length
    cells = [(at, 0 if side == "right" else longest - len(row)) for at, row in enumerate(fitting)]
    inputs = row_inputs(fitting, processor)
    return _lay_out(fitting, inputs, cells, (len(fitting), longest), pad_id, left_out)


def pack(
    rows: Rows,
    length: int,
    *,
    pad_id: int = 0,
    too_long: Handling = "refuse",
    processor: ImageProcessor | None = None,
) -> Batch:
    """Packs several trajectories per row: longest first, each into the first row with room.

    Args:
        rows: Rows to train on.
        length: Tokens per row (L).
        pad_id: Token id of the padding at the end of rows.
        too_long: Handling of trajectories with more than `length` tokens.
        processor: Of the model, if it takes images.

    Raises:
        TrajectoryTooLongError: With "refuse". Names the trajectory.
        InvalidFieldError: As with `pad`.
    """
    fitting, left_out = fit(rows, length, too_long)
    cells: list[Cell] = [(0, 0)] * len(fitting)
    used: list[int] = []
    for at in sorted(range(len(fitting)), key=lambda at: -len(fitting[at])):
        tokens = len(fitting[at])
        row = next((row for row, full in enumerate(used) if full + tokens <= length), len(used))
        if row == len(used):
            used.append(0)
        cells[at] = (row, used[row])
        used[row] += tokens
    inputs = row_inputs(fitting, processor)
    return _lay_out(fitting, inputs, cells, (len(used), length), pad_id, left_out)


def fit(
    rows: Rows, length: int | None, too_long: Handling
) -> tuple[list[Row], tuple[LeftOut, ...]]:
    """Returns the rows of at most `length` tokens, and all trajectories that are left out.

    Raises:
        TrajectoryTooLongError: With "refuse". Names the trajectory.
    """
    fitting: list[Row] = []
    left_out = list(rows.left_out)
    for row in rows:
        if length is None or len(row) <= length:
            fitting.append(row)
            continue
        error = TrajectoryTooLongError(row.trajectory.trajectory_id, len(row), length)
        left_out.append(refuse_or_leave(row.trajectory, error, too_long))
    return fitting, tuple(left_out)


def lay_out(
    rows: Sequence[Row],
    places: Sequence[tuple[Any, ...]],
    shape: tuple[int, ...],
    pad_id: int,
    inputs: Sequence[ImageInputs] = (),
) -> dict[str, NDArray[Any]]:
    """Returns the columns of `shape`, [..., L], with each row copied to its place, once.

    Positions have the shape [..., 3, L] if those of the inputs are multi-dimensional.

    Args:
        rows: The rows.
        places: Index of each in a column.
        shape: Shape of the columns.
        pad_id: Token id of the padding.
        inputs: Those of the images of each row, which have its positions, or none at all.
    """
    axes = inputs[0].position_ids.shape[:-1] if inputs else ()
    token_ids = np.full(shape, pad_id, np.int64)
    position_ids = np.zeros((*shape[:-1], *axes, shape[-1]), np.int64)
    loss_mask = np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    policy_versions = np.full(shape, -1, np.int64)
    rewards = np.zeros(shape, np.float32)
    counting = np.arange(max(map(len, rows), default=0))
    for at, (row, here) in enumerate(zip(rows, places, strict=True)):
        trajectory = row.trajectory
        token_ids[here] = trajectory.token_ids
        position_ids[here] = inputs[at].position_ids if inputs else counting[: len(row)]
        loss_mask[here] = trajectory.loss_mask
        logprobs[here] = trajectory.logprobs
        policy_versions[here] = trajectory.policy_versions
        rewards[here] = row.rewards
    return {
        "token_ids": token_ids,
        "position_ids": position_ids,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "policy_versions": policy_versions,
        "rewards": rewards,
    }


def _lay_out(
    rows: Sequence[Row],
    inputs: tuple[ImageInputs, ...],
    cells: Sequence[Cell],
    shape: tuple[int, int],
    pad_id: int,
    left_out: Iterable[LeftOut],
) -> Batch:
    places = [
        (at, ..., slice(start, start + len(row)))
        for row, (at, start) in zip(rows, cells, strict=True)
    ]
    columns = lay_out(rows, places, shape, pad_id, inputs)
    segment_ids = np.zeros(shape, np.int32)
    in_row: dict[int, int] = {}  # number of trajectories so far, by row
    for (row, _), here in sorted(zip(cells, places, strict=True), key=itemgetter(0)):
        in_row[row] = segment_ids[here] = in_row.get(row, 0) + 1
    return Batch(
        **columns,
        attention_mask=segment_ids > 0,
        segment_ids=segment_ids,
        row_index=np.array([at for at, _ in cells], np.int64),
        start=np.array([start for _, start in cells], np.int64),
        trajectories=trajectory_columns(rows),
        left_out=tuple(left_out),
        images=inputs,
    )


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


# Torch tensors.

Layout: TypeAlias = Batch | RaggedBatch


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
    torch = _torch()
    arrays = _arrays(batch) | _arrays(batch.trajectories)
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
    torch = _torch()
    order = np.arange(len(batch.images))
    if isinstance(batch, Batch):
        order = np.lexsort((batch.start, batch.row_index))[: len(order)]
    shown = [batch.images[at].tensors for at in order if batch.images[at].tensors]
    return {name: torch.cat([one[name] for one in shown]) for name in (shown[0] if shown else ())}


def _arrays(holder: Any) -> dict[str, NDArray[Any]]:
    found = {field.name: getattr(holder, field.name) for field in fields(holder)}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise PackageMissingError("torch", "a batch of tensors") from error
