"""The `response_format` of a chat-completions body."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_chat.values import string, to_json
from rollmesh.v1 import gateway_pb2

_MAX_SCHEMA_BYTES = 64 * 1024


def read_response_format(form: Any) -> gateway_pb2.JsonFormat | None:
    """Returns the JSON format of a `response_format`; None if the answer is text.

    Raises:
        InvalidFieldError: Names the field and what is wrong with it.
    """
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidFieldError("response_format", "is not an object")
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return gateway_pb2.JsonFormat()
        case "json_schema":
            return _schema_format(form.get("json_schema"), "response_format.json_schema")
        case _:
            raise InvalidFieldError(
                "response_format.type", "is not served; give text, json_object or json_schema"
            )


def _schema_format(form: Any, field: str) -> gateway_pb2.JsonFormat:
    if not isinstance(form, dict):
        raise InvalidFieldError(field, "is not an object")
    if not string(form.get("name"), f"{field}.name"):
        raise InvalidFieldError(f"{field}.name", "is empty")
    schema = form.get("schema")
    if not isinstance(schema, dict | None):
        raise InvalidFieldError(f"{field}.schema", "is not an object")
    strict = form.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidFieldError(f"{field}.strict", "must be true or false")
    text = "" if schema is None else to_json(schema, f"{field}.schema")
    if (size := len(text.encode())) > _MAX_SCHEMA_BYTES:
        raise InvalidFieldError(
            f"{field}.schema", f"has {size} bytes; give at most {_MAX_SCHEMA_BYTES}"
        )
    return gateway_pb2.JsonFormat(schema_json=text, strict=bool(strict))
