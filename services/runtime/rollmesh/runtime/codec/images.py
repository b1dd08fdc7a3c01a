"""Checks images from outside, and decodes them to the pixels that every part of the mesh sees."""

import hashlib
import io
import warnings
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from rollmesh.runtime.errors import InvalidImageError

MAX_BYTES = 20 * 1024 * 1024
"""Default limit of an image."""
MAX_PIXELS = 16 * 1024 * 1024
"""Default limit of width times height."""
_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
_OTHER_NAMES = {"image/jpg": "image/jpeg"}
_TRANSPARENT = frozenset({"RGBA", "LA", "PA", "La", "RGBa"})


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on one image."""

    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS
    """Product of width and height; decoding takes four bytes for each."""


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that can be decoded."""

    data: bytes
    """The bytes as they came."""
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
    """Returns an image after decoding it once; call it in a thread.

    The header is checked before anything is decoded, so a file that claims many pixels costs its
    bytes.

    Args:
        data: The bytes of a PNG, JPEG, WebP or GIF file of one frame.
        field: Names the image in errors.
        media_type: Media type that the sender gives; empty if it gives none.
        limits: Limits; None: the default ones.

    Raises:
        InvalidImageError: It is none of these, is broken, is too large, or has another media type.
    """
    limits = limits or ImageLimits()
    if len(data) > limits.max_bytes:
        raise InvalidImageError(
            field, f"has {len(data)} bytes; give at most {limits.max_bytes}, a smaller image"
        )
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


def check_media_type(media_type: str, found: str, field: str) -> None:
    """Checks the media type that a sender gives to an image; it may give none.

    Raises:
        InvalidImageError: The image is of another one.
    """
    said = _OTHER_NAMES.get(media_type.lower(), media_type.lower())
    if said not in {"", found}:
        raise InvalidImageError(field, f"is said to be {said} and is {found}; name its media type")


def decode_image(data: bytes) -> Image.Image:
    """Returns the pixels of a checked image, mode RGB.

    Transparency is shown over white. EXIF orientation is not applied, as Hugging Face's processors
    do not apply it.
    """
    with Image.open(io.BytesIO(data), formats=list(_TYPES)) as image:
        image.load()
        if image.mode in _TRANSPARENT or "transparency" in image.info:
            colours = image.convert("RGBA")
            white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, colours).convert("RGB")
        return image.convert("RGB")


def _check_header(
    image: Image.Image, found: str, field: str, media_type: str, limits: ImageLimits
) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise InvalidImageError(
            field,
            f"is {width} x {height} pixels; give at most {limits.max_pixels} pixels together",
        )
    check_media_type(media_type, found, field)
    if getattr(image, "n_frames", 1) > 1:
        raise InvalidImageError(field, "has several frames; send one of them")
