"""Every parameter of the two APIs has a place in the table, and the table is what happens."""

from typing import Any

import pytest
from openai.types.responses import response_create_params

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_responses.parameters import REFUSED, SERVED, UNUSED
from rollmesh.sidecar.openai_responses.protocol import ResponsesCall
from rollmesh.v1 import gateway_pb2
from tests.paths import ROOT
from tests.sidecar.parameters import documented, fields_of_sdk, fields_of_vllm, ignored

TABLE = SERVED | REFUSED.keys() | UNUSED.keys()
DOCUMENT = ROOT / "docs" / "responses.md"
VALUES: dict[str, Any] = {"include_reasoning": False}
"""What asks for something, where 1 does not."""


def read(**fields: Any) -> gateway_pb2.ChatRequest:
    return ResponsesCall({"model": "m", "input": "Hi", **fields}, "rmk-1-secret").chat


def test_a_parameter_has_one_place() -> None:
    assert len(TABLE) == len(SERVED) + len(REFUSED) + len(UNUSED)


def test_every_parameter_of_the_openai_sdk_is_in_the_table() -> None:
    fields = fields_of_sdk(response_create_params, "ResponseCreateParams")
    assert len(fields) > 25
    assert fields <= TABLE


@pytest.mark.vllm
def test_every_parameter_of_vllm_is_in_the_table() -> None:
    fields = fields_of_vllm("entrypoints/openai/responses/protocol.py", "ResponsesRequest")
    assert len(fields) > 40
    assert fields <= TABLE


def test_the_document_has_the_table() -> None:
    assert documented(DOCUMENT) >= TABLE


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_served_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**{name: VALUES.get(name, 1)})
    assert caught.value.field == name
    assert REFUSED[name] in caught.value.message


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_asks_for_nothing_is_not_refused(name: str) -> None:
    neutral = not VALUES[name] if name in VALUES else False
    assert read(**{name: neutral}) == read(**{name: None}) == read()


@pytest.mark.parametrize("name", sorted(UNUSED))
def test_what_changes_nothing_is_accepted_and_counted(name: str) -> None:
    before = ignored(name)
    assert read(**{name: 1}) == read()
    assert ignored(name) == before + 1


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
