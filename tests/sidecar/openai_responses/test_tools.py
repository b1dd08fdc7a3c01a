"""Tools of Responses are shown as functions, and called by the names that agents know."""

from typing import Any

import orjson
import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.openai_responses.tools import (
    AddedTools,
    ToolName,
    custom_input,
    given_tools,
    read_tool_choice,
    read_tools,
    toolbox_of,
)
from rollmesh.v1 import gateway_pb2

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
SPACE = {"type": "namespace", "name": "crew", "description": "Others.", "tools": [FUNCTION, CUSTOM]}


def shown(*tools: Any) -> list[Any]:
    return [one["function"] for one in orjson.loads(read_tools(list(tools)).tools_json)]


def test_a_function_is_shown_as_chat_completions_would() -> None:
    assert shown(FUNCTION) == [{"name": "f", "parameters": {"type": "object"}, "strict": True}]


def test_a_custom_tool_is_a_function_of_one_string_that_knows_its_grammar() -> None:
    (one,) = shown(CUSTOM)
    assert (one["name"], one["description"]) == ("patch", "Patches.")
    assert one["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: X" in one["parameters"]["properties"]["input"]["description"]


def test_tools_of_a_namespace_have_both_names() -> None:
    toolbox = read_tools([SPACE, FUNCTION])
    names = [one["name"] for one in shown(SPACE, FUNCTION)]
    assert names == ["crew__f", "crew__patch", "f"]
    assert toolbox.named("crew__f") == ToolName("f", "crew")
    assert toolbox.named("crew__patch") == ToolName("patch", "crew", is_custom=True)
    assert toolbox.named("f") == ToolName("f")


def test_web_search_is_dropped_because_codex_always_offers_it() -> None:
    offered = {"type": "web_search", "external_web_access": True}
    assert read_tools([offered]).tools_json == ""
    assert shown(FUNCTION, offered) == shown(FUNCTION)
    with pytest.raises(InvalidFieldError, match="web_search"):
        read_tool_choice({"type": "web_search"}, read_tools([offered]))


@pytest.mark.parametrize(
    "kind",
    ["file_search", "code_interpreter", "computer_use_preview", "image_generation", "mcp", "shell"],
)
def test_tools_that_would_run_on_a_server_are_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidFieldError, match=kind) as caught:
        read_tools([FUNCTION, {"type": kind}])
    assert caught.value.field == "tools[1].type"


def test_two_tools_that_the_model_could_not_tell_apart_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="crew__f"):
        read_tools([SPACE, {**FUNCTION, "name": "crew__f"}])


def test_tools_that_the_input_adds_follow_those_of_the_body() -> None:
    added = AddedTools("input[1].tools", [SPACE])
    toolbox = read_tools([FUNCTION], [added])
    names = [one["function"]["name"] for one in orjson.loads(toolbox.tools_json)]
    assert names == ["f", "crew__f", "crew__patch"]
    assert toolbox.named("crew__patch") == ToolName("patch", "crew", is_custom=True)
    assert read_tools([], [AddedTools("input[0].tools", None)]).tools_json == ""


def test_a_tool_that_is_added_again_takes_the_place_of_the_first() -> None:
    newer = {**FUNCTION, "description": "Newer."}
    added = [AddedTools(f"input[{at}].tools", tools) for at, tools in enumerate([[SPACE], [newer]])]
    toolbox = read_tools([FUNCTION, CUSTOM], added)
    functions = [one["function"] for one in orjson.loads(toolbox.tools_json)]
    assert [one["name"] for one in functions] == ["f", "patch", "crew__f", "crew__patch"]
    assert functions[0]["description"] == "Newer."


def test_what_is_wrong_with_an_added_tool_names_its_item() -> None:
    for tools, field in (
        ([{"type": "shell"}], r"input\[2\].tools\[0\].type"),
        ("f", r"\[2\].tools"),
    ):
        with pytest.raises(InvalidFieldError, match=field):
            read_tools([], [AddedTools("input[2].tools", tools)])
    many = [{**FUNCTION, "name": f"f{at}"} for at in range(1500)]
    other = [{**FUNCTION, "name": f"g{at}"} for at in range(1500)]
    with pytest.raises(InvalidFieldError, match="has 3000 tools"):
        read_tools(many, [AddedTools("input[0].tools", other)])


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (None, (gateway_pb2.TOOL_CHOICE_UNSPECIFIED, "")),
        ("required", (gateway_pb2.TOOL_CHOICE_REQUIRED, "")),
        ({"type": "function", "name": "g"}, (gateway_pb2.TOOL_CHOICE_NAMED, "g")),
        ({"type": "custom", "name": "patch"}, (gateway_pb2.TOOL_CHOICE_NAMED, "crew__patch")),
    ],
)
def test_a_choice_names_the_tool_as_the_model_knows_it(choice: Any, found: Any) -> None:
    assert read_tool_choice(choice, read_tools([SPACE])) == found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"input":  "a\\n"}', "a\n"),
        ('{"input": 1}', None),
        ('{"input": "a", "more": 1}', None),
        ('{"input": "a', None),
        ("[]", None),
    ],
)
def test_arguments_are_an_input_or_something_else(arguments: str, found: str | None) -> None:
    assert custom_input(arguments) == found


def test_the_tools_of_an_earlier_request_are_given_back() -> None:
    toolbox = toolbox_of(read_tools([FUNCTION, CUSTOM]).tools_json)
    assert toolbox.named("patch").is_custom
    assert given_tools(toolbox) == [
        FUNCTION,
        {"type": "custom", "name": "patch", "description": "Patches."},
    ]
    assert given_tools(toolbox_of("")) == []
