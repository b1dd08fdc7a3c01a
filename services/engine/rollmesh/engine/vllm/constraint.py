"""Constraints in vLLM: whether the model supports them, and whether xgrammar accepts one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xgrammar
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from rollmesh.engine.backend import Constraint
from rollmesh.engine.requests.schema_cost import subschemas, tag_schemas
from rollmesh.runtime.errors import InvalidConstraintError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_FIELD = "constraint.structural_tag_json"


def has_tokenizer(model_path: Path) -> bool:
    """Returns whether a model's directory has the tokenizer that constraints need."""
    return any((model_path / name).exists() for name in _TOKENIZERS)


def compilable(constraint: Constraint) -> str:
    """Returns the structural tag for vLLM. This may take tenths of a second: call it in a thread.

    Raises:
        InvalidConstraintError: xgrammar rejects it, or it is strict and xgrammar would ignore
            a part of a JSON schema.
    """
    tag = json.loads(constraint.structural_tag)
    for schema, takes_patterns in _schemas(tag):
        bounds = list(_bounded_strings(schema))
        unsupported = has_xgrammar_unsupported_json_features(schema)
        if constraint.strict and (unsupported or (bounds and not takes_patterns)):
            raise InvalidConstraintError(
                _FIELD,
                "has a JSON schema with a keyword that cannot be enforced (multipleOf, "
                "uniqueItems, contains, allOf of several, unusual formats, lengths of strings that "
                "may not contain the format's delimiters, ...); remove the keyword, or strict",
            )
        for string in bounds if takes_patterns else ():
            _bound_by_pattern(string)
    text = json.dumps(tag, ensure_ascii=False)
    try:
        xgrammar.Grammar.from_structural_tag(text)
    except Exception as error:
        raise InvalidConstraintError(_FIELD, f"cannot be compiled: {_reason(error)}") from error
    return text


def _schemas(value: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yields the JSON schemas in a structural tag, and whether patterns can bound their strings.

    They cannot inside tags or where text is excluded: xgrammar ignores exclusions in patterns.
    """
    for schema, form in tag_schemas(value):
        if isinstance(schema, dict):
            yield schema, form.get("style", "json") == "json" and not form.get("excludes")


def _bounded_strings(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a JSON schema that are strings bounded only by their length."""
    if isinstance(schema, list):
        for one in schema:
            yield from _bounded_strings(one)
    if not isinstance(schema, dict):
        return
    bounds = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    is_bounded = bounds and all(type(bound) is int for bound in bounds.values())
    if schema.get("type") == "string" and is_bounded and not _is_narrower(schema):
        yield schema
    for one in subschemas(schema):
        yield from _bounded_strings(one)


def _bound_by_pattern(string: dict[str, Any]) -> None:
    """Turns the length bounds of a string into a pattern.

    With length bounds, xgrammar 0.2.8 allows control characters, which are invalid in JSON
    strings; with a pattern it does not.
    """
    least, most = string.pop("minLength", 0), string.pop("maxLength", "")
    string["pattern"] = f"^.{{{least},{most}}}$"


def _is_narrower(schema: dict[str, Any]) -> bool:
    """Returns whether a string also has other bounds, which xgrammar cannot combine."""
    return not schema.keys().isdisjoint({"pattern", "format", "const", "enum"})


def _reason(error: Exception) -> str:
    """Returns the first line of the library's message, without its source location."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition(".cc:")[2].partition(": ")[2] or lines[0]
