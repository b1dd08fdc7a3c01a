"""How the processors of vision models represent an image: the run of ids that stands for it.

A run depends on the width and height of the image only. The rules are arithmetic over the files of
the model, so no pixels are needed, and neither torch nor transformers.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollmesh.chat.tokenizer import ModelFilesError, ModelTokenizer, read_json
from rollmesh.runtime.codec.arrays import TokenIds

_ID_NAMES = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
_GRID_TYPES = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
)
_MAX_ASPECT = 200
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


class ImageRefusedError(Exception):
    """A model cannot take an image; the message says why."""


class ImageRule(Protocol):
    """How the processor of one model represents images."""

    @property
    def printed_id(self) -> int:
        """Id of the token that the chat template prints for an image."""
        ...

    @property
    def reserved_ids(self) -> tuple[int, ...]:
        """Ids that stand for images, video and sound, and for nothing else."""
        ...

    def run(self, width: int, height: int) -> TokenIds:
        """Returns the ids that stand for an image of a size in pixels; uint32 [K].

        Raises:
            ImageRefusedError: The model cannot take an image of that size.
        """
        ...


@dataclass(frozen=True, slots=True)
class GridRule:
    """Qwen-VL: one id for each square of merged patches, after resizing to fit the limits.

    The arithmetic is that of `Qwen2VLImageProcessor` in transformers 5.19, floats included.
    """

    printed_id: int
    reserved_ids: tuple[int, ...]
    square: int
    """Edge of a square of merged patches, pixels."""
    min_pixels: int
    max_pixels: int

    def run(self, width: int, height: int) -> TokenIds:
        """Returns the ids that stand for an image of a size in pixels; uint32 [K].

        Raises:
            ImageRefusedError: The image is more than 200 times as long as it is wide.
        """
        rows, columns = self._grid(width, height)
        return np.full(rows * columns, self.printed_id, np.uint32)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns the number of rows and of columns of squares."""
        if max(width, height) / min(width, height) > _MAX_ASPECT:
            raise ImageRefusedError(
                f"is {width} x {height} pixels; a side may be {_MAX_ASPECT} times the other"
            )
        square = self.square
        rows, columns = round(height / square), round(width / square)
        pixels = rows * columns * square * square
        if pixels > self.max_pixels:
            factor = math.sqrt((height * width) / self.max_pixels)
            return (
                max(1, math.floor(height / factor / square)),
                max(1, math.floor(width / factor / square)),
            )
        if pixels < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * factor / square), math.ceil(width * factor / square)
        return rows, columns


@dataclass(frozen=True, slots=True)
class ConstantRule:
    """LLaVA: every image is cut to one size and has as many ids."""

    printed_id: int
    reserved_ids: tuple[int, ...]
    length: int

    def run(self, width: int, height: int) -> TokenIds:  # noqa: ARG002 - of the protocol
        """Returns the ids that stand for an image; uint32 [K]."""
        return np.full(self.length, self.printed_id, np.uint32)


def load_rule(model_path: Path) -> ImageRule | None:
    """Returns the rule of a model directory; None if its model takes no images that are served.

    Raises:
        ModelFilesError: A file cannot be read, or lacks a number that the rule needs.
    """
    config = _read(model_path / "config.json")
    reserved = reserved_ids(config)
    printed = config.get("image_token_id", config.get("image_token_index"))
    model_type = config.get("model_type")
    if printed is None or model_type not in {*_GRID_TYPES, "llava"}:
        return None
    combined = _read(model_path / "processor_config.json")
    nested = combined.get("image_processor")
    processor = nested if nested else _read(model_path / "preprocessor_config.json")
    if not processor:
        return None  # only text is served without a processor
    try:
        if model_type in _GRID_TYPES:
            return _grid_rule(int(printed), reserved, processor)
        return _constant_rule(int(printed), reserved, processor, combined)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(
            f"{model_path}: the image processor's config is not that of {model_type}: {error!r}"
        ) from error


def reserved_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids that a model's config names for images, video and sound, ascending."""
    named = (config.get(name) for name in _ID_NAMES)
    return tuple(sorted({one for one in named if isinstance(one, int)}))


def load_reserved_ids(model_path: Path) -> tuple[int, ...]:
    """Returns the ids that a model directory names for images, video and sound, ascending.

    Raises:
        ModelFilesError: The model's config cannot be read.
    """
    return reserved_ids(_read(model_path / "config.json"))


def reserved_texts(ids: Collection[int], tokenizer: ModelTokenizer) -> tuple[str, ...]:
    """Returns the texts that spell reserved ids."""
    return tuple(text for text in tokenizer.added_texts if tokenizer.special_id(text) in ids)


def _grid_rule(
    printed_id: int, reserved: tuple[int, ...], processor: Mapping[str, Any]
) -> GridRule:
    size = processor.get("size") or {}
    least = processor.get("min_pixels")
    most = processor.get("max_pixels")
    return GridRule(
        printed_id,
        reserved,
        int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2)),
        int(size.get("shortest_edge", _MIN_PIXELS) if least is None else least),
        int(size.get("longest_edge", _MAX_PIXELS) if most is None else most),
    )


def _constant_rule(
    printed_id: int,
    reserved: tuple[int, ...],
    processor: Mapping[str, Any],
    combined: Mapping[str, Any],
) -> ConstantRule:
    crop, patch = processor["crop_size"], int(combined["patch_size"])
    height, width = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
    length = (int(height) // patch) * (int(width) // patch)
    length += int(combined.get("num_additional_image_tokens", 0))
    if combined.get("vision_feature_select_strategy") == "default":
        length -= 1
    return ConstantRule(printed_id, reserved, length)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
