"""The tools of a Messages body, and how the model may choose among them."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.parameters import COUNTED
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.fields.tools import list_tools
from rollmesh.sidecar.fields.values import excerpt, flag, string, to_json
from rollmesh.v1 import gateway_pb2

_CHOICES = {
    "auto": gateway_pb2.TOOL_CHOICE_AUTO,
    "any": gateway_pb2.TOOL_CHOICE_REQUIRED,
    "none": gateway_pb2.TOOL_CHOICE_NONE,
    "tool": gateway_pb2.TOOL_CHOICE_NAMED,
}
_READ = ("type", "name", "description", "input_schema", "strict", "defer_loading")


def read_tools(tools: Any) -> str:
    """Returns `tools` as the JSON that chat completions have for them; empty if there are none.

    Deferred tools are left out: blocks of the conversation name them.

    Raises:
        InvalidFieldError: Names the tool and what is wrong with it.
    """
    given = [(tool, f"tools[{at}]") for at, tool in enumerate(list_tools(tools))]
    read = [(tool, field, read_tool(tool, field)) for tool, field in given]
    found = [one for tool, field, one in read if not flag(tool, "defer_loading", f"{field}.")]
    return to_json(found, "tools") if found else ""


def read_tool(tool: Any, field: str) -> dict[str, Any]:
    """Returns a tool as chat completions have it.

    Raises:
        InvalidFieldError: Names what is wrong with it.
    """
    if not isinstance(tool, dict):
        raise InvalidFieldError(field, "is not an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidFieldError(
            f"{field}.type",
            f"{excerpt(kind)} is a tool of Anthropic's service; give a tool of the agent's own "
            "with its name and input_schema",
        )
    count_ignored(tool, _READ, COUNTED)
    function: dict[str, Any] = {"name": string(tool.get("name"), f"{field}.name")}
    if tool.get("description") is not None:
        function["description"] = string(tool["description"], f"{field}.description")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidFieldError(f"{field}.input_schema", "is not an object")
    function["parameters"] = schema
    if flag(tool, "strict", f"{field}."):
        function["strict"] = True
    return {"type": "function", "function": function}


def read_tool_choice(choice: Any) -> tuple[gateway_pb2.ToolChoice.ValueType, str, bool | None]:
    """Returns `tool_choice`, the name of the tool if it names one, and whether calls are parallel.

    Raises:
        InvalidFieldError: The choice is not supported.
    """
    if choice is None:
        return gateway_pb2.TOOL_CHOICE_UNSPECIFIED, "", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidFieldError(
            "tool_choice.type", f"is {excerpt(kind)}; give one of {', '.join(_CHOICES)}"
        )
    name = string(choice.get("name"), "tool_choice.name") if kind == "tool" else ""
    one_call = flag(choice, "disable_parallel_tool_use", "tool_choice.")
    return _CHOICES[kind], name, False if one_call else None
