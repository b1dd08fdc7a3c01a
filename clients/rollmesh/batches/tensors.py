"""Converts batches to torch tensors and TensorDicts; both packages are imported on demand."""

import importlib
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.columns import TrajectoryColumns, TreeColumns
from rollmesh.batches.errors import PackageMissingError
from rollmesh.batches.layouts import Batch
from rollmesh.batches.ragged import RaggedBatch
from rollmesh.batches.split import SplitBatch
from rollmesh.batches.tree_batches import TreeBatch

Layout: TypeAlias = Batch | RaggedBatch | SplitBatch | TreeBatch


def to_torch(batch: Layout, device: Any = None) -> dict[str, Any]:
    """Returns the arrays of a batch, per token and per trajectory, as tensors with the same names.

    Per-token tensors of a `RaggedBatch` are nested tensors with the jagged layout: [B, j], where j
    is the length of each trajectory; multi-dimensional positions are [B, 3, j]. The inputs for
    images are apart: see `image_tensors`.

    Args:
        batch: A batch of any layout.
        device: Device of the tensors; None leaves them on the CPU, where they share the arrays'
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
        torch tensors by the names of the model's arguments (`pixel_values`, `image_grid_thw`, ...);
        empty if the batch has no images.

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
