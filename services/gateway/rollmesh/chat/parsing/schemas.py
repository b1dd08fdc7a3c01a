"""The kinds of values by the JSON schema of a tool, for formats without types."""

from collections.abc import Iterable, Mapping
from typing import Any

from rollmesh.chat.json_values import read_json

_MOST_VISITED = 1000  # subschemas that are looked at for one value
_MOST_DEPTH = 64  # of references and combinations inside each other
_NAMES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),  # first: it is an int too
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"integer", "number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
)
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords by the kind of value that they speak of, where a schema has no `type`."""
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""


class Schema:
    """A part of a tool's JSON schema. `$ref` is looked up in the whole of it."""

    def __init__(self, part: object, root: object = None) -> None:
        """Takes a part of a schema, and the whole. Without `root` the part is the whole."""
        self._part = part
        self._root = part if root is None else root

    def member(self, name: str) -> "Schema":
        """Returns the schema of an object's property. That of any value if it has none."""
        for one in self._all():
            properties = one.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return Schema(properties[name], self._root)
        return Schema(None, self._root)

    @property
    def items(self) -> "Schema":
        """The schema of an array's items. That of any value if it has none."""
        found = (one["items"] for one in self._all() if "items" in one)
        return Schema(next(found, None), self._root)

    def kinds(self) -> frozenset[str]:
        """Returns the types that are allowed. Empty if none is named, or it is no schema."""
        return self._kinds_of(self._part, {}, 0)

    def _kinds_of(
        self, schema: object, known: dict[int, frozenset[str]], depth: int
    ) -> frozenset[str]:
        """Returns the kinds of one value. Each subschema is visited once. A circle says nothing."""
        if not isinstance(schema, Mapping):
            return frozenset()
        if (key := id(schema)) in known:
            return known[key]
        known[key] = frozenset()
        if depth >= _MOST_DEPTH or len(known) >= _MOST_VISITED:
            return frozenset()
        kind, values = schema.get("type"), _list(schema, "enum")
        values = [*values, schema["const"]] if "const" in schema else values
        named = kind if isinstance(kind, list) else [kind]
        said = [
            frozenset(one for one in named if isinstance(one, str)),
            frozenset[str]().union(*map(kind_of, values)),
        ]
        for keyword in ("anyOf", "oneOf"):
            options = [self._kinds_of(one, known, depth + 1) for one in _list(schema, keyword)]
            said.append(frozenset[str]().union(*options))
        both = (*_list(schema, "allOf"), _referred(schema, self._root))
        said += [self._kinds_of(one, known, depth + 1) for one in both]
        if said := list(filter(None, said)):
            # What contradicts itself is read as whatever fits.
            known[key] = frozenset.intersection(*said) or frozenset.union(*said)
        else:
            known[key] = frozenset(
                kind for kind, keys in _KEYWORDS.items() if any(key in schema for key in keys)
            )
        return known[key]

    def typed(self, text: str) -> Any:
        """Converts a value's text as the schema says. Returns the text if it does not fit."""
        allowed = self.kinds()
        if not allowed or allowed == {"string"}:
            return text
        try:
            value = read_json(text)
        except ValueError:
            spelled = {"true": True, "false": False, "none": None, "null": None}
            word = text.strip().lower()
            if word not in spelled:
                return text
            value = spelled[word]
        return value if kind_of(value) & allowed else text

    def _all(self) -> Iterable[Mapping[str, Any]]:
        """Yields the schema and those that hold, or may hold, beside it, each once."""
        seen: set[int] = set()
        left = [self._part]
        while left and len(seen) < _MOST_VISITED:
            one = left.pop()
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            parts = [part for key in ("oneOf", "anyOf", "allOf") for part in _list(one, key)]
            left += (*parts[::-1], _referred(one, self._root))


def kind_of(value: object) -> frozenset[str]:
    """Returns the JSON schema type names of a value."""
    if isinstance(value, float) and not value.is_integer():
        return frozenset({"number"})
    found = (names for kind, names in _NAMES if isinstance(value, kind))
    return next(found, frozenset({"null"}))


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _referred(schema: Mapping[str, Any], root: object) -> object:
    """Returns what `$ref` names by its path in the whole schema. None if nothing is there."""
    path = schema.get("$ref")
    if not isinstance(path, str) or not path.startswith("#"):
        return None
    found = root
    for step in path[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found
