"""What the parameters of the protocol do; `tests/sidecar/test_parameters` has its whole table."""

from typing import Any

import pytest
from openai.types.responses import response_create_params

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_responses.parameters import REFUSED, SERVED, UNUSED
from rollmesh.sidecar.openai_responses.protocol import ResponsesCall
from rollmesh.v1 import gateway_pb2
from tests.sidecar.parameters import fields_of_sdk, ignored

TABLE = SERVED | REFUSED.keys() | UNUSED.keys()


def read(**fields: Any) -> gateway_pb2.ChatRequest:
    return ResponsesCall({"model": "m", "input": "Hi", **fields}, "rmk-1-secret").chat


def test_every_parameter_of_the_openai_sdk_is_in_the_table() -> None:
    fields = fields_of_sdk(response_create_params, "ResponseCreateParams")
    assert len(fields) > 25
    assert fields <= TABLE


def test_web_search_is_counted_where_it_is_dropped() -> None:
    before = ignored("tools.web_search")
    assert read(tools=[{"type": "web_search"}]) == read()
    assert ignored("tools.web_search") == before + 1


def test_served_parameters_arrive() -> None:
    request = read(
        max_output_tokens=7,
        temperature=0.5,
        truncation="disabled",
        parallel_tool_calls=False,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        instructions="Be.",
    )
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.5)
    assert request.parallel_tool_calls is False
    assert request.template_options_json == '{"enable_thinking":false,"reasoning_effort":"none"}'
    assert request.json_format.schema_json == '{"type":"object"}'
    assert [one.content[0].text for one in request.messages] == ["Be.", "Hi"]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("include", {"include": "reasoning.encrypted_content"}),
        ("metadata", {"metadata": {"a": 1}}),
        ("reasoning", {"reasoning": "high"}),
        ("reasoning.effort", {"reasoning": {"effort": 1}}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "name": ""}}}),
        ("instructions", {"instructions": ["Be."]}),
        ("previous_response_id", {"previous_response_id": 1}),
        ("input", {"input": None}),
        ("tools", {"tools": {}}),
    ],
)
def test_parameters_with_a_fault_are_refused_by_name(field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**more)
    assert caught.value.field == field
