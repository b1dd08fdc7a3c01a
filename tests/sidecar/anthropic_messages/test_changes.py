"""Tools that Claude Code defers are told to the model where they are named."""

from typing import Any

import orjson
import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.requests import read_request
from rollmesh.v1 import gateway_pb2

SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}
EDIT = {"name": "Edit", "description": "Edits.", "input_schema": {"type": "object"}}
FUNCTION = {
    "type": "function",
    "function": {"name": "Edit", "description": "Edits.", "parameters": {"type": "object"}},
}
DEFERRED = {**EDIT, "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "Edit"}
NAMED = {"type": "tool_reference", "name": "Edit"}
DEFINED = {"type": "tool_definition", "definition": EDIT}


def read(*tools: Any, results: Any = (), system: Any = ()) -> gateway_pb2.ChatRequest:
    """A conversation with the result of a search, and a system message after it."""
    use = {"type": "tool_use", "id": "abc", "name": "ToolSearch", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "abc", "content": list(results)}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        *([{"role": "system", "content": list(system)}] if system else []),
    ]
    return read_request({"max_tokens": 9, "messages": messages, "tools": list(tools)}, "rmk-5e-s")


def last(request: gateway_pb2.ChatRequest) -> str:
    return "".join(part.text for part in request.messages[-1].content)


def test_a_deferred_tool_is_not_among_those_that_the_template_prints() -> None:
    assert read(SEARCH, DEFERRED).tools_json == read(SEARCH).tools_json
    assert read(DEFERRED).tools_json == ""
    assert orjson.loads(read(SEARCH, DEFERRED).deferred_tools_json) == [FUNCTION]
    assert read(SEARCH).deferred_tools_json == ""
    assert "Edit" in read({**EDIT, "defer_loading": False}).tools_json


def test_a_reference_in_a_result_is_the_definition_of_its_tool() -> None:
    request = read(SEARCH, DEFERRED, results=[REFERENCE, REFERENCE])
    assert [orjson.loads(line) for line in last(request).splitlines()] == [FUNCTION, FUNCTION]
    assert last(read(SEARCH, results=[REFERENCE])) == "Edit\n"


def test_system_messages_add_and_remove_tools() -> None:
    for tool in (NAMED, DEFINED):
        added = read(SEARCH, DEFERRED, system=[{"type": "tool_addition", "tool": tool}])
        assert orjson.loads(last(added)) == FUNCTION
        assert orjson.loads(added.deferred_tools_json) == [FUNCTION]
    removed = read(SEARCH, system=[{"type": "tool_removal", "tool": NAMED}])
    assert last(removed) == "Edit is no longer available.\n"


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        pytest.param({"results": [{"type": "tool_reference"}]}, "tool_name", id="no name"),
        pytest.param({"system": [{"type": "tool_addition"}]}, "tool.type", id="no tool"),
        pytest.param(
            {"system": [{"type": "tool_removal", "tool": DEFINED}]}, "tool.type", id="definition"
        ),
        pytest.param(
            {"system": [{"type": "tool_addition", "tool": {**DEFINED, "definition": 1}}]},
            "tool.definition",
            id="no definition",
        ),
    ],
)
def test_what_is_wrong_with_such_a_block_is_named(blocks: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(SEARCH, **blocks)
    assert caught.value.field.endswith(field)
