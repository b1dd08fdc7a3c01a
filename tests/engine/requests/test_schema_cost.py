"""Schemas whose every step would be slow are refused before vLLM sees them."""

import itertools
import json
from typing import Any

import pytest

from rollmesh.engine import check_constraint, most_optional
from rollmesh.runtime.errors import InvalidConstraintError
from rollmesh.v1 import engine_pb2


def wide(count: int, required: int = 0) -> dict[str, Any]:
    names = [f"p{at}" for at in range(count)]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names[:required]}


def holding(schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        pytest.param(wide(9), 9, id="all"),
        pytest.param(wide(9, 7), 2, id="some"),
        pytest.param(wide(9, 9), 0, id="none"),
        pytest.param(wide(9) | {"required": ["p1", "p1", "gone", 3, {}]}, 8, id="odd names"),
        pytest.param([{"$ref": "#/a"}, wide(2)], 2, id="a reference into a list"),
        pytest.param(holding(wide(5)), 5, id="nested"),
        pytest.param({"type": "array", "items": wide(5)}, 5, id="items"),
        pytest.param({"anyOf": [wide(5), holding(wide(4)), wide(3, 3)]}, 9, id="alternatives"),
        pytest.param({"properties": {"a": wide(5), "b": wide(4)}}, 5, id="one after another"),
        pytest.param({"$ref": "#/$defs/w", "$defs": {"w": wide(6)}}, 6, id="reference"),
        pytest.param(
            {"anyOf": [{"$ref": "#/$defs/w"}, {"$ref": "#/$defs/w"}], "$defs": {"w": wide(6)}},
            12,
            id="referred twice",
        ),
        pytest.param({"$ref": "#"}, 0, id="itself"),
        pytest.param({"properties": {"next": {"$ref": "#"}, "v": {}}}, 2, id="recursive"),
        pytest.param({"anyOf": [wide(1), {"$ref": "#"}]}, 1, id="an alternative of itself"),
        pytest.param({"$ref": "#/properties/a/x", "properties": {"a": 3}}, 1, id="no such place"),
        pytest.param({"const": wide(9)}, 0, id="a value"),
        pytest.param({"properties": {"const": wide(9)}}, 9, id="a property named const"),
        pytest.param(True, 0, id="anything"),
    ],
)
def test_optional_properties_that_may_come_next_are_counted(schema: object, count: int) -> None:
    assert most_optional(schema) == count


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda schema: {"type": "json_schema", "json_schema": schema}, id="alone"),
        pytest.param(
            lambda schema: {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "<tool_call>"},
                    {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"},
                ],
            },
            id="in a call",
        ),
    ],
)
def test_too_many_are_refused_with_the_field_and_their_number(form: Any) -> None:
    def request(schema: object) -> engine_pb2.GenerateRequest:
        tag = json.dumps({"type": "structural_tag", "format": form(schema)})
        return engine_pb2.GenerateRequest(constraint=engine_pb2.Constraint(structural_tag_json=tag))

    for schema in (wide(256), wide(1000, 744)):
        check_constraint(request(schema))
    for schema in (wide(257), wide(1000, 743)):
        with pytest.raises(InvalidConstraintError, match="257 optional properties") as caught:
            check_constraint(request(schema))
        assert caught.value.field == "constraint.structural_tag_json"


def branched(levels: int, branches: int = 1) -> dict[str, Any]:
    schema: dict[str, Any] = wide(1)
    for _ in range(levels):
        schema = {"anyOf": [schema] * branches}
    return schema


class Visited(dict[str, Any]):
    """A part of a schema that counts how often its keywords are read."""

    visits = 0

    def items(self) -> Any:
        self.visits += 1
        return super().items()


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_each_part_of_nested_alternatives_is_visited_once(keyword: str) -> None:
    parts = [Visited(wide(1))]
    for _ in range(28):
        parts.append(Visited({keyword: [parts[-1], {"type": "null"}]}))
    assert most_optional(parts[-1]) == 1
    assert {part.visits for part in parts} == {1}


def test_branches_that_repeat_add_up_without_being_visited_again() -> None:
    assert most_optional(branched(20, 3)) == 3**20


def test_a_chain_of_references_is_visited_once() -> None:
    names = [f"d{at}" for at in range(60)]
    defs: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} | {"title": name}
        for name, after in itertools.pairwise(names)
    }
    defs[names[40]] = wide(1)
    assert most_optional({"$ref": "#/$defs/d0", "$defs": defs}) == 2**40
    defs[names[40]] = {"$ref": "#/$defs/d41"}
    defs[names[-1]] = wide(1)
    with pytest.raises(ValueError, match="references nest deeper than 128"):
        most_optional({"$ref": "#/$defs/d0", "$defs": defs})


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"anyOf": [{} for _ in range(16_384)]}, id="alternatives"),
        pytest.param({"prefixItems": [[] for _ in range(16_384)]}, id="lists"),
        pytest.param({"$defs": {f"d{at}": {} for at in range(16_384)}}, id="definitions"),
    ],
)
def test_a_schema_of_too_many_parts_is_refused(schema: object) -> None:
    with pytest.raises(ValueError, match="more than 16384 objects and lists"):
        most_optional(schema)
