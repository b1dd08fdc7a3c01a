"""Validates constraints as far as possible without a grammar library."""

import json
from typing import Any

from rollmesh.engine.backend import Constraint, Sampling
from rollmesh.engine.requests.schema_cost import most_optional, tag_schemas
from rollmesh.runtime.errors import InvalidConstraintError, InvalidSamplingError
from rollmesh.v1 import engine_pb2

# vLLM's client parses a tag on the event loop in time superlinear in its depth. These limits keep
# that below about 0.1 s.
_MAX_BYTES = 128 * 1024
_MAX_NESTING = 64
_MAX_OPTIONAL = 256  # 80 ms of every step for a vocabulary of 150,000 tokens
_FIELD = "constraint.structural_tag_json"


def read_constraint(request: engine_pb2.GenerateRequest, sampling: Sampling) -> Constraint | None:
    """Returns the validated constraint of a request; None if it has none.

    Raises:
        InvalidConstraintError: It is not a structural tag, or it is too large.
        InvalidSamplingError: A sampling parameter conflicts with it.
    """
    if not request.HasField("constraint"):
        return None
    text = request.constraint.structural_tag_json
    if len(text.encode()) > _MAX_BYTES:
        raise InvalidConstraintError(_FIELD, f"has more than {_MAX_BYTES} bytes; simplify it")
    try:
        tag: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConstraintError(_FIELD, f"is not JSON: {error}") from error
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise InvalidConstraintError(_FIELD, "has no format; send a structural tag")
    if _is_deeper(tag, _MAX_NESTING):
        raise InvalidConstraintError(_FIELD, f"is nested deeper than {_MAX_NESTING} levels")
    optional = max((most_optional(schema) for schema, _ in tag_schemas(tag)), default=0)
    if optional > _MAX_OPTIONAL:
        raise InvalidConstraintError(
            _FIELD,
            f"has a JSON schema with {optional} optional properties in one object or its "
            f"alternatives; give at most {_MAX_OPTIONAL}: require some, or nest them",
        )
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_sequences"):
        if getattr(sampling, name):  # after the end of the tag only an end token is allowed
            raise InvalidSamplingError(f"sampling.{name}", "cannot be combined with a constraint")
    return Constraint(text, request.constraint.strict)


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in value)
