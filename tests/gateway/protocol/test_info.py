"""What a gateway says of its template and its formats, against the names of the contract."""

import pytest

from rollmesh.chat.parsing import CHANNELS, REASONING_TAGS, UNKNOWN, AnswerFormat
from rollmesh.chat.templates import Finding, Kind, RefusedOrder, TemplateProfile
from rollmesh.gateway import (
    write_finding,
    write_kind,
    write_reasoning,
    write_template,
    write_tool_calls,
)
from rollmesh.v1 import chat_pb2, gateway_pb2, template_pb2


def test_every_kind_and_every_finding_has_a_number_of_its_own_and_there_is_no_other() -> None:
    assert sorted(map(write_kind, Kind)) == template_pb2.TemplateKind.values()[1:]
    assert sorted(map(write_finding, Finding)) == template_pb2.TemplateFinding.values()[1:]


def test_every_format_of_reasoning_has_a_number_of_its_own_and_there_is_no_other() -> None:
    formats = [AnswerFormat(name, reasoning=False) for name in (*CHANNELS, "none")]
    formats += [
        AnswerFormat("none", reasoning=True, reasoning_tags=tags)
        for tags in REASONING_TAGS.values()
    ]
    found = sorted(map(write_reasoning, formats))
    assert found == gateway_pb2.ReasoningFormat.values()[1:]


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("none", gateway_pb2.TOOL_CALL_PARSING_TEXT),
        (UNKNOWN, gateway_pb2.TOOL_CALL_PARSING_UNKNOWN),
        ("hermes", gateway_pb2.TOOL_CALL_PARSING_PARSED),
        ("vllm:granite", gateway_pb2.TOOL_CALL_PARSING_PARSED),
    ],
)
def test_tool_calls_are_parsed_unless_the_template_shows_none_or_an_unknown_format(
    tools: str, said: gateway_pb2.ToolCallParsing.ValueType
) -> None:
    assert write_tool_calls(AnswerFormat(tools, reasoning=False)) == said


def test_a_refused_order_names_its_place_and_the_message_that_cannot_follow() -> None:
    profile = TemplateProfile(
        Kind.APPEND_ONLY,
        "<end>",
        refused={
            RefusedOrder("first system", "assistant", with_tools=True): "no",
            RefusedOrder("tool", None): "neither",
        },
    )
    greeting, answer = write_template(profile, "ab").refused_orders
    assert greeting == template_pb2.RefusedOrder(
        place=template_pb2.MESSAGE_PLACE_FIRST_SYSTEM,
        role=chat_pb2.ROLE_ASSISTANT,
        with_tools=True,
        explanation="no",
    )
    assert answer == template_pb2.RefusedOrder(
        place=template_pb2.MESSAGE_PLACE_TOOL, explanation="neither"
    )
