"""What the parameters of the protocol do; `tests/sidecar/test_parameters` has its whole table."""

from typing import Any

import orjson
import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.parameters import REFUSED, SERVED, UNUSED
from rollmesh.sidecar.anthropic_messages.requests import read_request
from rollmesh.v1 import gateway_pb2
from tests.sidecar.parameters import fields_of_sdk

ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "Hi"}],
}
TABLE = SERVED | REFUSED.keys() | UNUSED.keys()


def read(**more: Any) -> gateway_pb2.ChatRequest:
    return read_request(ASK | more, "rmk-1-key")


def test_every_parameter_of_the_anthropic_sdk_is_in_the_table() -> None:
    from anthropic.types import (  # noqa: PLC0415 - it is large
        message_count_tokens_params,
        message_create_params,
    )
    from anthropic.types.beta import (  # noqa: PLC0415
        message_create_params as beta_params,
    )

    fields: set[str] = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    for module in (message_create_params, beta_params):
        fields |= fields_of_sdk(module, "MessageCreateParams")
    assert len(fields) > 20
    assert fields <= TABLE


@pytest.mark.parametrize(
    ("more", "options"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}, id="adaptive"),
        pytest.param(
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"enable_thinking": True, "reasoning_effort": "high"},
            id="adaptive with effort",
        ),
        pytest.param(
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True},
            id="enabled",
        ),
        pytest.param(
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"enable_thinking": False, "reasoning_effort": "none"},
            id="disabled",
        ),
        pytest.param(
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            id="the template's own option wins",
        ),
    ],
)
def test_thinking_and_effort_are_options_of_the_template(
    more: dict[str, Any], options: dict[str, Any] | None
) -> None:
    found = read(**more).template_options_json
    assert (orjson.loads(found) if found else None) == options


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param({"type": "auto"}, (gateway_pb2.TOOL_CHOICE_AUTO, "", None), id="auto"),
        pytest.param({"type": "any"}, (gateway_pb2.TOOL_CHOICE_REQUIRED, "", None), id="any"),
        pytest.param({"type": "none"}, (gateway_pb2.TOOL_CHOICE_NONE, "", None), id="none"),
        pytest.param(
            {"type": "tool", "name": "t"}, (gateway_pb2.TOOL_CHOICE_NAMED, "t", None), id="tool"
        ),
        pytest.param(
            {"type": "auto", "disable_parallel_tool_use": True},
            (gateway_pb2.TOOL_CHOICE_AUTO, "", False),
            id="one call",
        ),
    ],
)
def test_a_tool_choice_is_that_of_the_gateway(
    choice: dict[str, Any], expected: tuple[int, str, bool | None]
) -> None:
    request = read(tool_choice=choice)
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    assert (request.tool_choice, request.tool_name, parallel) == expected


def test_tools_have_the_form_that_chat_completions_have_for_them() -> None:
    tool = {"name": "t", "description": "d", "input_schema": {"type": "object"}}
    more = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    request = read(tools=[tool | more, {"type": "custom", **tool, "strict": True}])
    function = {"name": "t", "description": "d", "parameters": {"type": "object"}}
    assert orjson.loads(request.tools_json) == [
        {"type": "function", "function": function},
        {"type": "function", "function": function | {"strict": True}},
    ]


def test_a_format_constrains_the_answer_strictly() -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    request = read(output_config={"format": form})
    assert orjson.loads(request.json_format.schema_json) == schema
    assert request.json_format.strict
    assert read(output_format=form) == request


@pytest.mark.parametrize(
    ("field", "more"),
    [
        pytest.param("messages", {"messages": []}, id="no messages"),
        pytest.param("messages[0].role", {"messages": [{"role": "tool"}]}, id="role"),
        pytest.param(
            "messages[0].role", {"messages": [{"role": "assistant", "content": "I"}]}, id="prefill"
        ),
        pytest.param(
            "messages",
            {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1"}]},
            id="nothing said",
        ),
        pytest.param("system[0].type", {"system": [{"type": "image"}]}, id="an image as system"),
        pytest.param("tools[0].type", {"tools": [{"type": "bash_20250124"}]}, id="server tool"),
        pytest.param("tools[0].input_schema", {"tools": [{"name": "t"}]}, id="no schema"),
        pytest.param("tool_choice.type", {"tool_choice": {"type": "all"}}, id="tool choice"),
        pytest.param("tool_choice.name", {"tool_choice": {"type": "tool"}}, id="no tool's name"),
        pytest.param("thinking.type", {"thinking": {"type": "deep"}}, id="thinking"),
        pytest.param("output_config", {"output_config": 1}, id="output_config"),
        pytest.param(
            "output_config.format.type", {"output_config": {"format": {"type": "xml"}}}, id="format"
        ),
        pytest.param("stop_sequences", {"stop_sequences": [""]}, id="empty stop sequence"),
        pytest.param("max_tokens", {"max_tokens": 0}, id="max_tokens"),
        pytest.param("temperature", {"temperature": "1"}, id="temperature"),
        pytest.param(
            "context_management.edits[1]",
            {
                "context_management": {
                    "edits": [
                        {"type": "clear_thinking_20251015", "keep": "all"},
                        {"type": "clear_tool_uses_20250919"},
                    ]
                }
            },
            id="an edit of the context",
        ),
    ],
)
def test_a_parameter_with_a_fault_is_refused_by_name(field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**more)
    assert caught.value.field == field
