"""Images in the bodies of requests: their bytes, or the URLs of hosts that serve them."""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rollmesh.runtime.codec.data_urls import read_base64, read_data_url
from rollmesh.runtime.errors import InvalidImageError
from rollmesh.sidecar.fields.values import string
from rollmesh.v1 import chat_pb2

_HTTP = re.compile("https?://", re.ASCII | re.IGNORECASE)


def image_of_url(url: Any, field: str) -> chat_pb2.ContentPart:
    """Returns the part of an image that is given by a URL: a data URL, or one to be fetched.

    Args:
        url: The URL.
        field: Names it in errors, those of the gateway too.

    Raises:
        InvalidFieldError: It is not a string.
        InvalidImageError: It is neither a data URL in base64 nor one of http or https.
    """
    text = string(url, field)
    if _HTTP.match(text):
        return chat_pb2.ContentPart(image=chat_pb2.Media(uri=text, field=field))
    media_type, data = read_data_url(text, field)
    return chat_pb2.ContentPart(image=chat_pb2.Media(media_type=media_type, data=data, field=field))


def image_of_base64(encoded: Any, media_type: str, field: str) -> chat_pb2.ContentPart:
    """Returns the part of an image that is given as base64.

    Raises:
        InvalidFieldError: It is not a string.
        InvalidImageError: It is not base64, or empty.
    """
    data = read_base64(string(encoded, field), field)
    if not data:
        raise InvalidImageError(field, "is empty; send the bytes of the image")
    return chat_pb2.ContentPart(image=chat_pb2.Media(media_type=media_type, data=data, field=field))


def joined(parts: Iterable[chat_pb2.ContentPart]) -> list[chat_pb2.ContentPart]:
    """Returns the parts of a content, neighbouring texts joined: one text has one form."""
    found: list[chat_pb2.ContentPart] = []
    for is_text, run in groupby(parts, lambda part: part.HasField("text")):
        if is_text:
            text = "".join(part.text for part in run)
            found += [chat_pb2.ContentPart(text=text)] if text else []
        else:
            found += run
    return found
