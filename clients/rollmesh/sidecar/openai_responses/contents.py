"""The content of a message or of a tool's output: a string, or a list of parts."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import excerpt, string
from rollmesh.sidecar.turns.images import image_of_url, joined
from rollmesh.v1 import chat_pb2

_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "encrypted_content": "encrypted_content",
}
"""Parts that are text, and the key that holds it. What an agent of Codex writes to another comes as
`encrypted_content`; OpenAI's servers encrypt it, and here it is as the model wrote it."""


def read_content(content: Any, field: str) -> list[chat_pb2.ContentPart]:
    """Returns the parts of a content, texts and images; empty text is left out.

    Raises:
        InvalidFieldError: Names the part and what is wrong with it.
    """
    if not isinstance(content, list):
        return text_parts(read_text(content, field))
    return joined(_part(part, f"{field}[{at}]") for at, part in enumerate(content))


def _part(part: Any, field: str) -> chat_pb2.ContentPart:
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return chat_pb2.ContentPart(text=_text(part, field, "text and input_image"))
    if part.get("file_id") is not None:
        raise InvalidFieldError(
            f"{field}.file_id", "is not served: no files are stored here; give image_url"
        )
    return image_of_url(part.get("image_url"), f"{field}.image_url")


def read_text(content: Any, field: str) -> str:
    """Returns the text of a content, joined from its parts.

    Raises:
        InvalidFieldError: Names the part and what is wrong with it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string or a list of text parts")
    return "".join(_text(part, f"{field}[{at}]", "text") for at, part in enumerate(content))


def _text(part: Any, field: str, served: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidFieldError(
            field, f"is {excerpt(kind)}, not a text part; only {served} is supported here"
        )
    return string(part.get(key), f"{field}.{key}")


def text_parts(text: str) -> list[chat_pb2.ContentPart]:
    """Returns a text as the parts of a message."""
    return [chat_pb2.ContentPart(text=text)] if text else []
