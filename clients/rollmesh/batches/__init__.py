"""From delivered sessions to batches: NumPy arrays, torch tensors, TensorDicts.

`rows_of` reads sessions; `pad`, `pack`, `ragged` and `split` lay them out; `pack_trees` lays out
complete trees; `to_torch` and `to_tensordict` convert batches, `image_tensors` has what the model
needs for their images. Nothing is truncated: a trajectory
that does not fit is refused, or left out and counted.

May import `client` and `runtime`.
"""

from rollmesh.batches.columns import TrajectoryColumns, TreeColumns, group_advantages
from rollmesh.batches.errors import (
    MissingRewardError,
    PackageMissingError,
    TrajectoryTooLongError,
)
from rollmesh.batches.images import ImageInputs, ImageProcessor
from rollmesh.batches.layouts import Batch, pack, pad
from rollmesh.batches.ragged import RaggedBatch, ragged
from rollmesh.batches.rows import LeftOut, Row, Rows, rows_of
from rollmesh.batches.split import SplitBatch, split
from rollmesh.batches.tensors import image_tensors, to_tensordict, to_torch
from rollmesh.batches.tree_batches import TreeBatch, pack_trees

__all__ = [
    "Batch",
    "ImageInputs",
    "ImageProcessor",
    "LeftOut",
    "MissingRewardError",
    "PackageMissingError",
    "RaggedBatch",
    "Row",
    "Rows",
    "SplitBatch",
    "TrajectoryColumns",
    "TrajectoryTooLongError",
    "TreeBatch",
    "TreeColumns",
    "group_advantages",
    "image_tensors",
    "pack",
    "pack_trees",
    "pad",
    "ragged",
    "rows_of",
    "split",
    "to_tensordict",
    "to_torch",
]
