"""Checks images from outside, and decodes them to the pixels that every part of the mesh sees."""

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollmesh.runtime.errors import InvalidImageError

if TYPE_CHECKING:  # a sidecar reads addresses of images, and has no Pillow
    from PIL import Image

MAX_BYTES = 20 * 1024 * 1024
"""Default limit of an image."""
MAX_PIXELS = 16 * 1024 * 1024
"""Default limit of width times height."""
_TYPES = {name: f"image/{name.lower()}" for name in ("PNG", "JPEG", "WEBP", "GIF")}
_OTHER_NAMES = {"image/jpg": "image/jpeg"}
_MAX_SCANS = 32
"""Scans of a progressive JPEG. Encoders make about ten. Each costs time for all pixels."""
_MAX_PARTS = 16_384
"""Segments of a JPEG, chunks of a PNG or WebP, blocks of a GIF before its pixels."""
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_TRANSPARENT = frozenset({"RGBA", "LA", "PA", "La", "RGBa"})


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on one image."""

    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS
    """Product of width and height. Decoding takes four bytes for each."""


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that can be decoded."""

    data: bytes
    """The bytes as received."""
    sha256: str
    """SHA-256 of the bytes, hexadecimal."""
    media_type: str
    """Media type that the bytes have."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""


def check_image(
    data: bytes, field: str, media_type: str = "", limits: ImageLimits | None = None
) -> CheckedImage:
    """Returns an image after decoding it once. Call it in a thread, or in a process that may die.

    The header and the parts of the file are checked before anything is decoded, so a file that
    claims many pixels costs its bytes, and a small file that is decoded many times is refused.

    Args:
        data: The bytes of a PNG, JPEG, WebP or GIF file of one frame.
        field: Names the image in errors.
        media_type: Media type that the sender gives, empty if it gives none.
        limits: Limits. None means the default limits.

    Raises:
        InvalidImageError: It is none of these, is broken, is too large, or has another media type.
    """
    from PIL import Image, UnidentifiedImageError

    limits = limits or ImageLimits()
    check_size(data, field, limits)
    check_parts(data, field)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of sizes that are checked here
        try:
            with Image.open(io.BytesIO(data), formats=list(_TYPES)) as image:
                found = _TYPES[image.format or ""]
                _check_header(image, found, field, media_type, limits)
                width, height = image.size
                image.load()
        except UnidentifiedImageError as error:
            raise InvalidImageError(
                field, "is not a PNG, JPEG, WebP or GIF file; send one of these"
            ) from error
        except Image.DecompressionBombError as error:
            raise InvalidImageError(field, f"is too large: {error}") from error
        except (InvalidImageError, MemoryError):
            raise
        except Exception as error:  # Pillow's plugins raise whatever a damaged file makes of them
            raise InvalidImageError(
                field, f"is broken: {error or type(error).__name__}; send the complete file"
            ) from error
    return CheckedImage(data, hashlib.sha256(data).hexdigest(), found, width, height)


def check_size(data: bytes, field: str, limits: ImageLimits) -> None:
    """Checks the size of a file.

    Raises:
        InvalidImageError: It is too large.
    """
    if len(data) > limits.max_bytes:
        raise InvalidImageError(
            field, f"has {len(data)} bytes; give at most {limits.max_bytes}, a smaller image"
        )


def check_parts(data: bytes, field: str) -> None:
    """Checks how many parts a file has that cost time whatever its size in pixels.

    A file with broken parts passes, and decoding it raises the error.

    Raises:
        InvalidImageError: It has too many.
    """
    scans = 0
    for at, part in enumerate(_parts(data)):
        scans += part == _START_OF_SCAN
        if scans > _MAX_SCANS:
            raise InvalidImageError(
                field,
                f"is a progressive JPEG of more than {_MAX_SCANS} scans; send one with fewer, "
                "or one that is not progressive",
            )
        if at >= _MAX_PARTS:
            raise InvalidImageError(
                field,
                f"has more than {_MAX_PARTS} segments, chunks or blocks; send it without metadata",
            )


def _parts(data: bytes) -> Iterator[int]:
    """Yields the segments, chunks or blocks of a file: markers of a JPEG, and 0 for others."""
    if data[:2] == b"\xff\xd8":
        return _jpeg_markers(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return _chunks(data, 8, "big", around=12, before=0, align=1)
    if data[:4] == b"RIFF":
        return _chunks(data, 12, "little", around=8, before=4, align=2)
    if data[:4] == b"GIF8":
        return _gif_blocks(data)
    return iter(())


def _jpeg_markers(data: bytes) -> Iterator[int]:
    at = 2
    while (found := _JPEG_MARKER.search(data, at)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == _END_OF_IMAGE:
            return
        yield marker
        at += int.from_bytes(data[at : at + 2], "big")


def _chunks(
    data: bytes, at: int, order: Literal["big", "little"], *, around: int, before: int, align: int
) -> Iterator[int]:
    """Yields the chunks of a file. `before` bytes of their heads precede the size."""
    while at + around <= len(data):
        yield 0
        size = int.from_bytes(data[at + before : at + before + 4], order)
        at += around + -(-size // align) * align


def _gif_blocks(data: bytes) -> Iterator[int]:
    """Yields the sub-blocks of the extensions before the first image."""
    flags = data[10] if len(data) > 10 else 0
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while data[at : at + 1] == b"!":
        at += 2
        while data[at : at + 1] not in {b"", b"\0"}:
            yield 0
            at += 1 + data[at]
        yield 0
        at += 1


def check_media_type(media_type: str, found: str, field: str) -> None:
    """Checks the media type that a sender gives to an image. It may give none.

    Raises:
        InvalidImageError: The image is of another one.
    """
    said = _OTHER_NAMES.get(media_type.lower(), media_type.lower())
    if said not in {"", found}:
        raise InvalidImageError(field, f"is said to be {said} and is {found}; name its media type")


def decode_image(data: bytes) -> "Image.Image":
    """Returns the pixels of a checked image, mode RGB.

    Transparency is shown over white. EXIF orientation is not applied, as Hugging Face's processors
    do not apply it.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=list(_TYPES)) as image:
        image.load()
        if image.mode in _TRANSPARENT or "transparency" in image.info:
            colours = image.convert("RGBA")
            white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, colours).convert("RGB")
        return image.convert("RGB")


def _check_header(
    image: "Image.Image", found: str, field: str, media_type: str, limits: ImageLimits
) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise InvalidImageError(
            field,
            f"is {width} x {height} pixels; give at most {limits.max_pixels} pixels together",
        )
    check_media_type(media_type, found, field)
    if getattr(image, "is_animated", False):  # it looks for a second frame, not for all of them
        raise InvalidImageError(field, "has several frames; send one of them")


# Data URLs, in which agents send images.

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*+)(?P<options>[^,]*+),", re.ASCII)


def read_data_url(url: str, field: str, max_bytes: int | None = None) -> tuple[str, bytes]:
    """Returns the media type and the bytes of a data URL in base64.

    Raises:
        InvalidImageError: It is no such URL, or has more bytes.
    """
    found = _DATA_URL.match(url)
    if found is None or "base64" not in found["options"]:
        raise InvalidImageError(field, "is not a data URL in base64; send the image itself")
    encoded = len(url) - found.end()
    if max_bytes is not None and encoded // 4 * 3 > max_bytes + 2:
        raise InvalidImageError(field, f"has more than {max_bytes} bytes; send a smaller image")
    return found["type"], read_base64(url[found.end() :], field)


def read_base64(text: str, field: str) -> bytes:
    """Returns the bytes of base64.

    Raises:
        InvalidImageError: It is malformed.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImageError(field, f"is not base64: {error}") from error
