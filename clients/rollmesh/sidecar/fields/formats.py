"""The form of an answer's text: any text, a JSON object, or JSON of a schema."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import flag, string, to_json
from rollmesh.v1 import gateway_pb2

_MAX_SCHEMA_BYTES = 64 * 1024


def read_format(form: Any, field: str, schema_key: str = "") -> gateway_pb2.JsonFormat | None:
    """Returns the JSON format that a body asks for; None if the answer is text.

    Args:
        form: The value of the parameter; may be None.
        field: Name of the parameter.
        schema_key: Where it holds its schema with name and strictness; empty if in itself.

    Raises:
        InvalidFieldError: Names the field and what is wrong with it.
    """
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidFieldError(field, "is not an object")
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return gateway_pb2.JsonFormat()
        case "json_schema" if schema_key:
            return _schema_format(form.get(schema_key), f"{field}.{schema_key}")
        case "json_schema":
            return _schema_format(form, field)
        case _:
            raise InvalidFieldError(
                f"{field}.type", "is not served; give text, json_object or json_schema"
            )


def _schema_format(form: Any, field: str) -> gateway_pb2.JsonFormat:
    if not isinstance(form, dict):
        raise InvalidFieldError(field, "is not an object")
    if not string(form.get("name"), f"{field}.name"):
        raise InvalidFieldError(f"{field}.name", "is empty")
    schema = form.get("schema")
    if not isinstance(schema, dict | None):
        raise InvalidFieldError(f"{field}.schema", "is not an object")
    strict = flag(form, "strict", f"{field}.")
    if schema is None:
        return gateway_pb2.JsonFormat(strict=strict)
    return read_schema(schema, f"{field}.schema", strict=strict)


def read_schema(schema: dict[str, Any], field: str, *, strict: bool) -> gateway_pb2.JsonFormat:
    """Returns the JSON format of a schema.

    Args:
        schema: The schema.
        field: Its name.
        strict: Whether it is refused if a part of it cannot be enforced.

    Raises:
        InvalidFieldError: It is too large or nested too deeply.
    """
    text = to_json(schema, field)
    if (size := len(text.encode())) > _MAX_SCHEMA_BYTES:
        raise InvalidFieldError(field, f"has {size} bytes; give at most {_MAX_SCHEMA_BYTES}")
    return gateway_pb2.JsonFormat(schema_json=text, strict=strict)
