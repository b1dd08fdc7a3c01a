"""Content blocks: text and images of a message or of a tool's result."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.parameters import COUNTED
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.fields.values import excerpt, string
from rollmesh.sidecar.turns.images import image_of_base64, image_of_url
from rollmesh.v1 import chat_pb2

Reader: TypeAlias = Callable[[dict[str, Any], str], chat_pb2.ContentPart | None]
_BILLING = "x-anthropic-billing-header"
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def read_parts(content: Any, field: str, readers: Mapping[str, Reader]) -> list[Any]:
    """Returns the parts of a content: a string, or a list of blocks; empty text is left out.

    Args:
        content: The content; None is empty.
        field: Its name.
        readers: What reads a block, by its type.

    Raises:
        InvalidFieldError: Names the block and what is wrong with it.
    """
    if content is None or isinstance(content, str):
        return [chat_pb2.ContentPart(text=content)] if content else []
    parts = (reader(block, at) for block, at, reader in each_block(content, field, readers))
    return [part for part in parts if part is not None]


def each_block(
    content: Any, field: str, readers: Mapping[str, Any]
) -> list[tuple[dict[str, Any], str, Any]]:
    """Returns the blocks of a list with their names and what reads them.

    Raises:
        InvalidFieldError: It is no list, or a block is of another type.
    """
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string or a list of content blocks")
    found = []
    for at, block in enumerate(content):
        name = f"{field}[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        reader = readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            served = ", ".join(sorted(readers))
            raise InvalidFieldError(
                f"{name}.type", f"{excerpt(kind)} is not served here; give one of {served}"
            )
        found.append((block, name, reader))
    return found


def read_text(block: dict[str, Any], field: str) -> chat_pb2.ContentPart | None:
    """Returns a text block as a part; None if it is empty.

    Raises:
        InvalidFieldError: It has no text.
    """
    count_ignored(block, ("type", "text"), COUNTED)
    text = string(block.get("text"), f"{field}.text")
    return chat_pb2.ContentPart(text=text) if text else None


def read_image(block: dict[str, Any], field: str) -> chat_pb2.ContentPart:
    """Returns an image block as a part.

    Raises:
        InvalidFieldError: Its source is not served or malformed.
    """
    count_ignored(block, ("type", "source"), COUNTED)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise InvalidFieldError(
            f"{field}.source", "is not served; give type base64 with data, or type url"
        )
    if kind == "url":
        return image_of_url(source.get("url"), f"{field}.source.url")
    media_type = string(source.get("media_type"), f"{field}.source.media_type")
    if media_type not in _IMAGES:
        raise InvalidFieldError(
            f"{field}.source.media_type",
            f"is {excerpt(media_type)}; give one of {', '.join(_IMAGES)}",
        )
    return image_of_base64(source.get("data"), media_type, f"{field}.source.data")


def is_billing_header(text: str) -> bool:
    """Returns whether a text of the system prompt is Claude Code's note to Anthropic's billing.

    It has another value for each prompt and is not meant for the model, which never sees it.
    """
    return text.startswith(_BILLING)
