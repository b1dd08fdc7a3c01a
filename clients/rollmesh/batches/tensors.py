"""Converts batches to torch tensors. PyTorch is imported on demand."""

import importlib
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.images import ImageInputs, ImageProcessor, row_inputs
from rollmesh.batches.layouts import Batch, lay_out
from rollmesh.batches.rows import (
    LeftOut,
    PackageMissingError,
    Rows,
    TrajectoryColumns,
    trajectory_columns,
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
