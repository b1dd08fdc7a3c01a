"""Data URLs, in which agents send images."""

import base64
import binascii
import re

from rollmesh.runtime.errors import InvalidImageError

_DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(?P<options>[^,]*),", re.ASCII)


def read_data_url(url: str, field: str, max_bytes: int | None = None) -> tuple[str, bytes]:
    """Returns the media type and the bytes of a data URL in base64.

    Args:
        url: The URL.
        field: Names it in errors.
        max_bytes: Most bytes that it may have; None: any number.

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
