"""The tools of a chat-completions body, and how the model may choose among them."""

from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.tools import list_tools
from rollmesh.sidecar.fields.values import string, to_json
from rollmesh.v1 import gateway_pb2

_TOOL_CHOICES = {
    None: gateway_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": gateway_pb2.TOOL_CHOICE_NONE,
    "auto": gateway_pb2.TOOL_CHOICE_AUTO,
    "required": gateway_pb2.TOOL_CHOICE_REQUIRED,
}


def read_tools(tools: Any) -> str:
    """Returns `tools` as JSON; empty if there are none.

    Raises:
        InvalidFieldError: Names the tool and what is wrong with it.
    """
    tools = list_tools(tools)
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidFieldError(
                f"tools[{at}].function.name", "is missing; only functions are supported"
            )
    return to_json(tools, "tools") if tools else ""


def read_tool_choice(choice: Any) -> tuple[gateway_pb2.ToolChoice.ValueType, str]:
    """Returns `tool_choice`, and the name of the tool if it names one.

    Raises:
        InvalidFieldError: The choice is not supported.
    """
    if isinstance(choice, str | None) and choice in _TOOL_CHOICES:
        return _TOOL_CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidFieldError(
            "tool_choice", "is not served; give none, auto, required, or a function by its name"
        )
    function = choice.get("function")
    if not isinstance(function, dict):
        raise InvalidFieldError("tool_choice.function", "is missing")
    return gateway_pb2.TOOL_CHOICE_NAMED, string(function.get("name"), "tool_choice.function.name")
