"""Images of one conversation, each held once."""

from collections.abc import Mapping
from typing import Any

from rollmesh.chat.messages import Image
from rollmesh.runtime.codec.data_urls import read_data_url
from rollmesh.runtime.codec.images import CheckedImage, ImageLimits, check_image
from rollmesh.runtime.errors import InvalidFieldError


class HeldImages:
    """Images by the hash of their bytes."""

    def __init__(self, limits: ImageLimits | None = None) -> None:
        """Starts empty."""
        self._limits = limits or ImageLimits()
        self._images: dict[str, CheckedImage] = {}

    def __getitem__(self, sha256: str) -> CheckedImage:
        """Returns an image by its hash.

        Raises:
            KeyError: There is no such image.
        """
        return self._images[sha256]

    def add(self, data: bytes, field: str, media_type: str = "") -> Image:
        """Returns an image, checked unless it is held already, at the beginning of a content.

        Args:
            data: The bytes of the file.
            field: Names the image in errors.
            media_type: Media type that the sender gives; empty if it gives none.

        Raises:
            InvalidImageError: It is broken, too large, or not an image.
        """
        checked = check_image(data, field, media_type, self._limits)
        held = self._images.setdefault(checked.sha256, checked)
        return Image(0, held.sha256, held.width, held.height)

    def read_part(self, field: str, part: Mapping[str, Any]) -> Image:
        """Returns the image of an OpenAI `image_url` part, which holds a data URL in base64.

        Raises:
            InvalidFieldError: The part has another form.
            InvalidImageError: The image is broken, too large, or not an image.
        """
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise InvalidFieldError(f"{field}.image_url", "has no url; give a data URL")
        media_type, data = read_data_url(url, f"{field}.image_url", self._limits.max_bytes)
        return self.add(data, f"{field}.image_url", media_type)
