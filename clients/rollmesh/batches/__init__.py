"""From delivered sessions to batches: NumPy arrays, torch tensors, TensorDicts.

`rows_of` reads sessions. `pad`, `pack`, `ragged` and `split` lay them out. `pack_trees` lays out
complete trees. `to_torch` and `to_tensordict` convert batches, `image_tensors` has the tensors
that the model needs for their images. Nothing is truncated: a trajectory that does not fit is
refused, or left out and counted.

May import `client` and `runtime`.
"""

from rollmesh.batches.images import ImageInputs, ImageProcessor
from rollmesh.batches.layouts import Batch, pack, pad
from rollmesh.batches.rows import (
    LeftOut,
    MissingRewardError,
    PackageMissingError,
    Row,
    Rows,
    TrajectoryColumns,
    TrajectoryTooLongError,
    TreeColumns,
    group_advantages,
    rows_of,
)
from rollmesh.batches.tensors import (
    RaggedBatch,
    SplitBatch,
    image_tensors,
    ragged,
    split,
    to_tensordict,
    to_torch,
)
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
