"""Estimates how much the JSON schemas of a structural tag slow down each sampling step.

Any of an object's optional properties may come next. xgrammar merges the allowed tokens of all of
them over the full vocabulary, within the step in which vLLM samples for all requests. This costs
0.3 ms per property at 150,000 tokens. Alternatives with a common prefix add up.
"""

from collections.abc import Iterator
from typing import Any

_MOST_LEVELS = 64
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_VALUES = {"const", "enum", "default", "examples"}
"""Schema keywords whose contents are values, not schemas."""


def tag_schemas(value: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields the JSON schemas in a structural tag, each with the format that holds it."""
    if isinstance(value, list):
        for one in value:
            yield from tag_schemas(one)
    elif isinstance(value, dict) and value.get("type") == "json_schema":
        yield value.get("json_schema"), value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tag_schemas(one)


def subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yields the direct subschemas of a JSON schema."""
    for key, one in schema.items():
        if key not in _VALUES:
            yield one


def most_optional(schema: Any) -> int:
    """Returns the largest number of optional properties that may come next at any position."""
    return _Counter(schema).count(schema, 0)


class _Counter:
    """Counts within one schema; references point into the same schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, int] = {}

    def count(self, schema: Any, level: int) -> int:
        if level > _MOST_LEVELS:
            return 0
        if isinstance(schema, list):
            return max((self.count(one, level + 1) for one in schema), default=0)
        if not isinstance(schema, dict):
            return 0
        counts = [_own(schema), self._referred(schema.get("$ref"), level)]
        groups = [schema[key] for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
        counts += [sum(self.count(one, level + 1) for one in branches) for branches in groups]
        counts += [self.count(one, level + 1) for one in subschemas(schema)]
        return max(counts)

    def _referred(self, reference: Any, level: int) -> int:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return 0
        if reference not in self._known:
            self._known[reference] = 0  # a recursive reference adds nothing
            self._known[reference] = self.count(self._at(reference), level + 1)
        return self._known[reference]

    def _at(self, reference: str) -> Any:
        part = self._root
        for key in reference.removeprefix("#").split("/")[1:]:
            part = part.get(key.replace("~1", "/").replace("~0", "~"), {})
            if not isinstance(part, dict):
                return {}
        return part


def _own(schema: dict[str, Any]) -> int:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    names = filter(properties.__contains__, _texts(required))
    return len(properties) - len(set(names))


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
