"""From delivered sessions to batches: NumPy arrays and torch tensors.

`rows_of` reads sessions. `pad`, `pack` and `ragged` lay them out. `to_torch` converts batches,
`image_tensors` has the tensors that the model needs for their images. `step_metrics` and
`logprob_metrics` have the numbers for `Client.report_step`. Nothing is truncated: a
trajectory that does not fit is refused, or left out and counted.

May import `client` and `runtime`.
"""

from rollmesh.batches.images import ImageInputs, ImageProcessor, grid_positions
from rollmesh.batches.layouts import (
    Batch,
    RaggedBatch,
    image_tensors,
    pack,
    pad,
    ragged,
    to_torch,
)
from rollmesh.batches.metrics import StepCounts, difference_metrics, logprob_metrics, step_metrics
from rollmesh.batches.rows import (
    LeftOut,
    MissingRewardError,
    PackageMissingError,
    Row,
    Rows,
    TextSessionError,
    TrajectoryColumns,
    TrajectoryTooLongError,
    group_advantages,
    rows_of,
)

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
    "StepCounts",
    "TextSessionError",
    "TrajectoryColumns",
    "TrajectoryTooLongError",
    "difference_metrics",
    "grid_positions",
    "group_advantages",
    "image_tensors",
    "logprob_metrics",
    "pack",
    "pad",
    "ragged",
    "rows_of",
    "step_metrics",
    "to_torch",
]
