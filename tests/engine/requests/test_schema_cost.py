"""Schemas whose every step would be slow are refused before vLLM sees them."""

import json
from typing import Any

import pytest

from rollmesh.engine.requests.constraint import read_constraint
from rollmesh.engine.requests.sampling import read_sampling
from rollmesh.engine.requests.schema_cost import most_optional
from rollmesh.runtime.errors import InvalidConstraintError
from rollmesh.v1 import engine_pb2, sampling_pb2


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
        pytest.param({"anyOf": [wide(1), {"$ref": "#"}]}, 2, id="an alternative of itself"),
        pytest.param({"$ref": "#/properties/a/x", "properties": {"a": 3}}, 1, id="no such place"),
        pytest.param({"const": wide(9)}, 0, id="a value"),
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

    sampling = read_sampling(sampling_pb2.SamplingParams(max_tokens=1), 8, 100)
    for schema in (wide(256), wide(1000, 744)):
        assert read_constraint(request(schema), sampling) is not None
    for schema in (wide(257), wide(1000, 743)):
        with pytest.raises(InvalidConstraintError, match="257 optional properties") as caught:
            read_constraint(request(schema), sampling)
        assert caught.value.field == "constraint.structural_tag_json"
