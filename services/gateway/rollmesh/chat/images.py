"""How the processors of vision models represent an image: the run of ids that stands for it.

A run depends on the width and height of the image only. The rules are arithmetic over the files of
the model, so no pixels are needed, and neither torch nor transformers.
"""

import base64
import hashlib
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollmesh.chat.messages import Image, InvalidInputError
from rollmesh.chat.tokenizer import ModelFilesError, ModelTokenizer, TokenIds, read_config

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
    """A model cannot take an image. The message says why."""


@dataclass(frozen=True, slots=True)
class ImageRule(ABC):
    """How the processor of one model represents images."""

    printed_id: int
    """Id of the token that the chat template prints for an image."""
    reserved_ids: tuple[int, ...]
    """Ids that stand for images, video and sound, and for nothing else."""

    def run(self, width: int, height: int) -> TokenIds:
        """Returns the ids that stand for an image of a size in pixels. Uint32 [K].

        Raises:
            ImageRefusedError: The model cannot take an image of that size.
        """
        return np.full(self.length_of(width, height), self.printed_id, np.uint32)

    @abstractmethod
    def length_of(self, width: int, height: int) -> int:
        """Returns the number of ids that stand for an image of a size in pixels.

        Raises:
            ImageRefusedError: The model cannot take an image of that size.
        """


@dataclass(frozen=True, slots=True)
class GridRule(ImageRule):
    """Qwen-VL: one id for each square of merged patches, after resizing to fit the limits.

    The arithmetic is that of `Qwen2VLImageProcessor` in transformers 5.19, floats included.
    """

    square: int
    """Edge of a square of merged patches, pixels."""
    min_pixels: int
    max_pixels: int

    def length_of(self, width: int, height: int) -> int:
        """Returns the number of squares. A side may be 200 times the other."""
        if max(width, height) / min(width, height) > _MAX_ASPECT:
            raise ImageRefusedError(
                f"is {width} x {height} pixels; a side may be {_MAX_ASPECT} times the other"
            )
        square = self.square
        rows, columns = round(height / square), round(width / square)
        pixels = rows * columns * square * square
        if pixels > self.max_pixels:
            factor = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / factor / square))
            columns = max(1, math.floor(width / factor / square))
        elif pixels < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(edge * factor / square) for edge in (height, width))
        return rows * columns


@dataclass(frozen=True, slots=True)
class ConstantRule(ImageRule):
    """LLaVA: every image is cut to one size and has as many ids."""

    length: int

    def length_of(self, width: int, height: int) -> int:
        """Returns the number of ids, which is the same for every image."""
        return self.length


def load_rule(model_path: Path) -> ImageRule | None:
    """Returns the rule of a model directory. None if its model takes no images that are served.

    Raises:
        ModelFilesError: A file cannot be read, or lacks a number that the rule needs.
    """
    config, reserved = _read(model_path / "config.json"), load_reserved_ids(model_path)
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
            size = processor.get("size") or {}
            least, most = processor.get("min_pixels"), processor.get("max_pixels")
            return GridRule(
                int(printed),
                reserved,
                int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2)),
                int(size.get("shortest_edge", _MIN_PIXELS) if least is None else least),
                int(size.get("longest_edge", _MAX_PIXELS) if most is None else most),
            )
        crop, patch = processor["crop_size"], int(combined["patch_size"])
        height, width = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
        length = (int(height) // patch) * (int(width) // patch)
        length += int(combined.get("num_additional_image_tokens", 0))
        if combined.get("vision_feature_select_strategy") == "default":
            length -= 1
        return ConstantRule(int(printed), reserved, length)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(
            f"{model_path}: the image processor's config is not that of {model_type}: {error!r}"
        ) from error


def load_reserved_ids(model_path: Path) -> tuple[int, ...]:
    """Returns the ids that a model directory names for images, video and sound, ascending.

    Raises:
        ModelFilesError: The model's config cannot be read.
    """
    named = map(_read(model_path / "config.json").get, _ID_NAMES)
    return tuple(sorted({one for one in named if isinstance(one, int)}))


def reserved_texts(ids: Collection[int], tokenizer: ModelTokenizer) -> tuple[str, ...]:
    """Returns the texts that spell reserved ids."""
    return tuple(text for text in tokenizer.added_texts if tokenizer.special_id(text) in ids)


def _read(path: Path) -> dict[str, Any]:
    return read_config(path) if path.exists() else {}


# Images of messages in OpenAI's form.

_FORMATS = {name: f"image/{name.lower()}" for name in ("PNG", "JPEG", "WEBP", "GIF")}
_DATA_URL = re.compile(r"data:(?P<type>[^;,]*+)[^,]*;base64,", re.ASCII)
_MOST_FILE_BYTES, _MOST_FILE_PIXELS = 20 * 1024 * 1024, 16 * 1024 * 1024
_MOST_SCANS = 32
"""Scans of a progressive JPEG. Encoders make about ten. Each costs time for all pixels."""
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


def read_image(field: str, part: Mapping[str, Any]) -> tuple[Image, bytes]:
    """Returns the image of an `image_url` part and the bytes of its file.

    The image is at the beginning of a content. Its file is decoded once.

    Raises:
        InvalidInputError: The part has another form, or the file is not a PNG, JPEG, WebP or GIF of
            one frame, at most 20 MiB, 16 Mi pixels and 32 scans.
    """
    given, field = part.get("image_url"), f"{field}.image_url"
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise InvalidInputError(field, "has no url; give a data URL")
    found = _DATA_URL.match(url)
    if found is None:
        raise InvalidInputError(field, "is not a data URL in base64; send the image itself")
    if (len(url) - found.end()) // 4 * 3 > _MOST_FILE_BYTES + 2:
        problem = f"has more than {_MOST_FILE_BYTES} bytes; send a smaller image"
        raise InvalidInputError(field, problem)
    try:
        data = base64.b64decode(url[found.end() :], validate=True)
    except ValueError as error:
        raise InvalidInputError(field, f"is not base64: {error}") from error
    width, height = _decoded_size(field, data, found["type"].lower().replace("/jpg", "/jpeg"))
    return Image(0, hashlib.sha256(data).hexdigest(), width, height), data


def _decoded_size(field: str, data: bytes, media_type: str) -> tuple[int, int]:
    from PIL import Image as Pictures

    try:
        with Pictures.open(io.BytesIO(data), formats=list(_FORMATS)) as picture:
            width, height = picture.size
            kind = _FORMATS[picture.format or ""]
            problem = ""
            if width * height > _MOST_FILE_PIXELS:
                problem = f"is {width} x {height} pixels; give at most {_MOST_FILE_PIXELS} together"
            elif media_type not in {"", kind}:
                problem = f"is said to be {media_type} and is {kind}; name its media type"
            elif getattr(picture, "is_animated", False):
                problem = "has several frames; send one of them"
            elif kind == _FORMATS["JPEG"] and _has_many_scans(data):
                problem = (
                    f"is a progressive JPEG of more than {_MOST_SCANS} scans; send one with fewer, "
                    "or one that is not progressive"
                )
            else:
                picture.load()
    except Exception as error:  # Pillow's plugins raise whatever a damaged file makes of them
        problem = f"is broken, or no PNG, JPEG, WebP or GIF: {error}; send the complete file"
        raise InvalidInputError(field, problem) from error
    if problem:
        raise InvalidInputError(field, problem)
    return width, height


def _has_many_scans(data: bytes) -> bool:
    """Returns whether a JPEG has more scans than the limit. Metadata may hold others."""
    scans, at = 0, 2
    while scans <= _MOST_SCANS and (found := _JPEG_MARKER.search(data, at)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == _END_OF_IMAGE:
            break
        scans += marker == _START_OF_SCAN
        at += int.from_bytes(data[at : at + 2], "big")
    return scans > _MOST_SCANS


# Puts the runs of images into ids, and finds them there.


class PlacementError(Exception):
    """The placeholders in ids are not those of the images. The message says how they differ."""


class Placeholder(NamedTuple):
    """The ids that stand for one image."""

    sha256: str
    """SHA-256 of the image's bytes, hexadecimal."""
    offset: int
    """Index of the first id."""
    length: int
    """Number of ids."""


def expand(ids: TokenIds, images: Sequence[Image], rule: ImageRule) -> TokenIds:
    """Returns ids with the run of each image in place of its placeholder.

    Ids have one placeholder for each image, in order. Uint32 [N].

    Raises:
        PlacementError: There are more or fewer placeholders than images.
        ImageRefusedError: The model cannot take an image of that size.
    """
    at = np.flatnonzero(np.isin(ids, rule.reserved_ids))
    if len(at) != len(images) or not (ids[at] == rule.printed_id).all():
        raise PlacementError(
            f"the chat template prints {len(at)} placeholders for {len(images)} images"
        )
    parts: list[TokenIds] = []
    begin = 0
    for index, image in zip(at.tolist(), images, strict=True):
        parts += (ids[begin:index], rule.run(image.width, image.height))
        begin = index + 1
    return np.concatenate([*parts, ids[begin:]])


def locate(ids: TokenIds, images: Sequence[Image], rule: ImageRule) -> list[Placeholder]:
    """Returns where the runs of images are in expanded ids.

    The ids, uint32 [N], are what `expand` returned, or contain it. The images are all of theirs, in
    order.

    Raises:
        PlacementError: The ids do not hold exactly the runs of these images.
    """
    reserved = np.isin(ids, rule.reserved_ids)
    found: list[Placeholder] = []
    end = 0
    for image in images:
        run = rule.run(image.width, image.height)
        offset = end + int(np.argmax(reserved[end:])) if reserved[end:].any() else len(ids)
        end = offset + len(run)
        if not np.array_equal(ids[offset:end], run):
            raise PlacementError(f"the ids hold no run of {len(run)} ids for image {image.sha256}")
        found.append(Placeholder(image.sha256, offset, len(run)))
    if reserved[end:].any():
        raise PlacementError("the ids hold placeholders without an image")
    return found
