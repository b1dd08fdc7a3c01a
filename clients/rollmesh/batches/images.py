"""Inputs of a vision model beside the tokens of a row: images as its processor makes them."""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.batches.rows import PackageMissingError, Row
from rollmesh.client import SessionResult, Trajectory
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2

_GRID = "image_grid_thw"


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The inputs of a model for one row of N tokens, beside its token ids."""

    tensors: dict[str, Any]
    """The output of the model's image processor for the images, in order: torch tensors by the
    names of the model's arguments (`pixel_values`, `image_grid_thw`, ...). Empty without images."""
    position_ids: NDArray[np.int64]
    """int64 [3, N] if the model has multi-dimensional positions: temporal, height, width. Otherwise
    int64 [N]."""
    token_types: NDArray[np.int64]
    """int64 [N]: 1 for a token that stands for an image, otherwise 0. Transformers' name for it is
    `mm_token_type_ids`."""


class ImageProcessor:
    """The image processor of a model, from transformers.

    It sees the pixels that the engine saw: files are decoded by the same function.
    """

    def __init__(self, model_path: str | Path) -> None:
        """Loads the processor from the model's folder.

        Raises:
            PackageMissingError: transformers or Pillow is not installed.
            InvalidFieldError: The folder has no image processor.
        """
        try:
            transformers: Any = importlib.import_module("transformers")
            self._decode = importlib.import_module("rollmesh.runtime.codec.images").decode_image
        except ImportError as error:
            raise PackageMissingError(str(error.name), "an image processor") from error
        try:
            self._processor = transformers.AutoImageProcessor.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise InvalidFieldError(
                "model_path", f"{model_path} has no image processor: {error}"
            ) from error
        config = json.loads((Path(model_path) / "config.json").read_bytes())
        self.has_grid_positions = _has_sections(config) or _has_sections(config.get("text_config"))
        """Whether the model has multi-dimensional positions (M-RoPE)."""

    def inputs(self, row: Row) -> ImageInputs:
        """Returns the inputs of a row.

        Raises:
            InvalidFieldError: The session lacks the file of an image, or the processor represents
                one by another number of tokens than the trajectory has.
        """
        return self.inputs_of(row.session, row.trajectory)

    def inputs_of(self, session: SessionResult, trajectory: Trajectory) -> ImageInputs:
        """Returns the inputs of a trajectory of a session. Raises as `inputs` does."""
        count, images = len(trajectory.token_ids), trajectory.images
        tensors: dict[str, Any] = {}
        if images:
            if missing := sorted({one.sha256 for one in images} - session.images.keys()):
                problem = f"session {session.session_id} lacks the files of {', '.join(missing)}"
                raise InvalidFieldError("images", problem)
            files = {one.sha256: session.images[one.sha256].data for one in images}
            pixels = {sha256: self._decode(data) for sha256, data in files.items()}
            shown = [pixels[one.sha256] for one in images]
            tensors = dict(self._processor(images=shown, return_tensors="pt"))
        grids = self._grids(tensors, images, f"trajectory {trajectory.trajectory_id}")
        positions = np.arange(count, dtype=np.int64)
        if self.has_grid_positions:
            positions = grid_positions(count, images, grids)
        token_types = np.zeros(count, np.int64)
        for image in images:
            token_types[image.start : image.start + image.tokens] = 1
        return ImageInputs(tensors, positions, token_types)

    def _grids(
        self,
        tensors: Mapping[str, Any],
        images: Sequence[trajectory_pb2.TrajectoryImage],
        name: str,
    ) -> list[tuple[int, int]]:
        """Returns the rows and columns of tokens of each image. None if the model has no grids."""
        if _GRID not in tensors:
            return []
        merge = int(self._processor.merge_size)
        grids = [(int(h) // merge, int(w) // merge) for _, h, w in tensors[_GRID].tolist()]
        for image, (height, width) in zip(images, grids, strict=True):
            if image.tokens != height * width:
                raise InvalidFieldError(
                    "images",
                    f"{name} has {image.tokens} tokens for an image and the processor makes "
                    f"{height * width}; give the model_path of the gateway",
                )
        return grids


def row_inputs(rows: Sequence[Row], processor: ImageProcessor | None) -> tuple[ImageInputs, ...]:
    """Returns the inputs of each row. None without a processor.

    Raises:
        InvalidFieldError: A row has images and there is no processor, or as `inputs`.
    """
    if processor is not None:
        return tuple(map(processor.inputs, rows))
    for row in rows:
        if row.trajectory.images:  # positions may depend on their sizes
            raise InvalidFieldError(
                "processor",
                f"trajectory {row.trajectory.trajectory_id} has images; "
                "give ImageProcessor(model_path) of the model",
            )
    return ()


def grid_positions(
    count: int,
    images: Sequence[trajectory_pb2.TrajectoryImage],
    grids: Sequence[tuple[int, int]],
) -> NDArray[np.int64]:
    """Returns positions of three dimensions, as Qwen-VL models count them.

    A token of text has the same position in all three. The tokens of an image share one temporal
    position and count rows and columns from there. The next token follows the largest of them.

    Args:
        count: Number of tokens N.
        images: The images, by ascending start.
        grids: Rows and columns of each image's tokens.

    Returns:
        int64 [3, N]: temporal, height, width.
    """
    positions = np.empty((3, count), np.int64)
    at = position = 0
    for image, (height, width) in zip(images, grids, strict=True):
        text = image.start - at
        positions[:, at : image.start] = np.arange(position, position + text)
        position += text
        at = image.start + image.tokens
        rows, columns = np.divmod(np.arange(image.tokens), width)
        positions[:, image.start : at] = np.stack([np.zeros_like(rows), rows, columns]) + position
        position += max(height, width)
    positions[:, at:] = np.arange(position, position + count - at)
    return positions


def _has_sections(config: object) -> bool:
    if not isinstance(config, dict):
        return False
    ropes = (config.get(name) for name in ("rope_parameters", "rope_scaling"))
    return any(isinstance(rope, dict) and "mrope_section" in rope for rope in ropes)
