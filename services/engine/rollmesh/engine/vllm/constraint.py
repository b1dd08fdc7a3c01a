"""Constraints in vLLM: whether the model supports them, and how a constraint is given to it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    has_xgrammar_unsupported_json_features,
)

from rollmesh.engine.requests import subschemas, tag_schemas
from rollmesh.engine.vllm.grammars import length_pattern
from rollmesh.runtime.errors import InvalidConstraintError
from rollmesh.v1 import engine_pb2

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_COMBINED = {"pattern", "format", "const", "enum"}
"""Other bounds of a string, which xgrammar cannot combine with its length."""
_FIELD = "constraint.structural_tag_json"


def has_tokenizer(model_path: Path) -> bool:
    """Returns whether a model's directory has the tokenizer that constraints need."""
    return any((model_path / name).exists() for name in _TOKENIZERS)


def vocabulary_of(llm: Any) -> bytes:
    """Returns the tokens of an `AsyncLLM` as vLLM gives them to xgrammar. Call it in a thread."""
    backend = XgrammarBackend(
        llm.vllm_config,
        tokenizer=llm.renderer.tokenizer,
        vocab_size=llm.vllm_config.model_config.get_vocab_size(),
    )
    compiled = backend.compiler.compile_regex("a")
    return str(compiled.tokenizer_info.serialize_json()).encode()


def written(constraint: engine_pb2.Constraint) -> str:
    """Returns the structural tag for vLLM. Call it in a thread.

    Raises:
        InvalidConstraintError: It is strict, and xgrammar would ignore a part of a JSON schema.
    """
    tag = json.loads(constraint.structural_tag_json)
    for schema, form in tag_schemas(tag):
        if not isinstance(schema, dict):
            continue
        # Patterns cannot bound strings inside tags or where text is excluded: xgrammar ignores
        # exclusions in patterns.
        takes_patterns = form.get("style", "json") == "json" and not form.get("excludes")
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
            # With length bounds, xgrammar 0.2.8 allows control characters, which are invalid in
            # JSON strings. With a pattern it does not.
            least, most = string.pop("minLength", 0), string.pop("maxLength", None)
            string["pattern"] = length_pattern(least, most)
    text = json.dumps(tag, ensure_ascii=False)
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidConstraintError(_FIELD, "has a lone surrogate; write whole characters")
    return text


def _bounded_strings(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a JSON schema that are strings bounded only by their length."""
    if isinstance(schema, list):
        for one in schema:
            yield from _bounded_strings(one)
    if not isinstance(schema, dict):
        return
    bounds = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    is_bounded = bounds and all(type(bound) is int for bound in bounds.values())
    alone = schema.keys().isdisjoint(_NOT_COMBINED)
    if schema.get("type") == "string" and is_bounded and alone:
        yield schema
    for one in subschemas(schema):
        yield from _bounded_strings(one)
