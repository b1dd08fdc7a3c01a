"""The tools of a Responses body, as the functions that chat templates print.

A function keeps its fields, so that the same tools in a chat-completions body print the same
prompt. A custom (freeform) tool becomes a function with one string. A function of a namespace is
shown as `namespace__name`. Both as in vLLM 0.32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.tools import check_number, list_tools
from rollmesh.sidecar.fields.values import excerpt, string, to_json
from rollmesh.sidecar.openai_responses.parameters import count_dropped_tool
from rollmesh.v1 import gateway_pb2

_SEPARATOR = "__"
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_INPUT = "input"
_CUSTOM_DESCRIPTION = "The freeform text payload for this tool."
_DROPPED = {"web_search", "web_search_preview", "web_search_2025_08_26"}
"""Tools that agents offer by default although nobody asked for them: Codex offers web_search."""
_CHOICES = {
    None: gateway_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": gateway_pb2.TOOL_CHOICE_NONE,
    "auto": gateway_pb2.TOOL_CHOICE_AUTO,
    "required": gateway_pb2.TOOL_CHOICE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the agent knows it."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class AddedTools:
    """Tools that an item of the input adds to those of the body."""

    field: str
    """Name of the list."""
    tools: Any
    """The list, as the item has it."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request."""

    tools_json: str = ""
    """What the template prints, in the form of chat completions; empty if there are none."""
    names: Mapping[str, ToolName] = field(default_factory=dict)
    """The tools that are not plain functions, by the name that the model uses."""

    def named(self, name: str) -> ToolName:
        """Returns the tool that the model calls by a name."""
        return self.names.get(name) or ToolName(name)


def shown_name(name: str, namespace: str) -> str:
    """Returns the name by which the model calls a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """Returns the arguments of a call of a custom tool with this input."""
    return orjson.dumps({_CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str | None:
    """Returns the input of a call of a custom tool; None if its arguments are something else."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or value.keys() != {_CUSTOM_INPUT}:
        return None
    text = value[_CUSTOM_INPUT]
    return text if isinstance(text, str) else None


def read_tools(tools: Any, added: Sequence[AddedTools] = ()) -> Toolbox:
    """Returns the tools of a request.

    A chat template prints all tools in one place, wherever the input adds them. A tool that is
    added under a name that is known takes the place of the earlier one.

    Args:
        tools: The `tools` of the body.
        added: What the items of its input add, in order.

    Raises:
        InvalidFieldError: Names the tool and what is wrong with it.
    """
    names: dict[str, ToolName] = {}
    functions: dict[str, dict[str, Any]] = {}
    for field_name, given in [("tools", tools), *((one.field, one.tools) for one in added)]:
        known = functions.copy()
        for at, tool in enumerate(list_tools(given, field_name)):
            for function, name in _shown(tool, f"{field_name}[{at}]", ""):
                shown = function["name"]
                if shown in functions and known.pop(shown, None) is None:
                    raise InvalidFieldError(
                        f"{field_name}[{at}]", f"the name {excerpt(shown)} is taken; give another"
                    )
                names[shown], functions[shown] = name, function
    check_number(len(functions))  # a namespace has several
    others = {shown: one for shown, one in names.items() if one.is_custom or one.namespace}
    printed = [{"type": "function", "function": one} for one in functions.values()]
    return Toolbox(to_json(printed, "tools") if printed else "", others)


def _shown(tool: Any, field_name: str, namespace: str) -> Iterator[tuple[dict[str, Any], ToolName]]:
    """Yields the functions by which a tool is shown to the model, each with its name."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    match kind:
        case "function" | "custom":
            name = string(tool.get("name"), f"{field_name}.name")
            shown = {key: tool[key] for key in _FUNCTION_FIELDS if tool.get(key) is not None}
            if kind == "custom":
                shown = {key: shown[key] for key in ("name", "description") if key in shown}
                shown["parameters"] = _custom_parameters(tool.get("format"), field_name)
            shown["name"] = shown_name(name, namespace)
            yield shown, ToolName(name, namespace, kind == "custom")
        case "namespace" if not namespace:
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise InvalidFieldError(f"{field_name}.tools", "must be a list")
            space = string(tool.get("name"), f"{field_name}.name")
            for at, one in enumerate(inner):
                yield from _shown(one, f"{field_name}.tools[{at}]", space)
        case str() if kind in _DROPPED:
            count_dropped_tool(kind)
        case _:
            raise InvalidFieldError(
                f"{field_name}.type",
                f"{excerpt(kind)} is not served: nothing runs tools here; give functions, custom "
                "tools and namespaces of them",
            )


def _custom_parameters(form: Any, field_name: str) -> dict[str, Any]:
    """Returns the parameters of the function that stands for a custom tool."""
    description = _CUSTOM_DESCRIPTION
    if form is not None and not isinstance(form, dict):
        raise InvalidFieldError(f"{field_name}.format", "is not an object")
    if form and form.get("type") == "grammar":  # told to the model, not enforced
        syntax = string(form.get("syntax"), f"{field_name}.format.syntax")
        grammar = string(form.get("definition"), f"{field_name}.format.definition")
        description += f" It matches this {syntax} grammar:\n{grammar}"
    return {
        "type": "object",
        "properties": {_CUSTOM_INPUT: {"type": "string", "description": description}},
        "required": [_CUSTOM_INPUT],
        "additionalProperties": False,
    }


def toolbox_of(tools_json: str) -> Toolbox:
    """Returns the tools of an earlier request; functions of namespaces are plain functions here."""
    functions = [tool["function"] for tool in orjson.loads(tools_json)] if tools_json else []
    customs = [one["name"] for one in functions if _is_custom(one.get("parameters"))]
    return Toolbox(tools_json, {name: ToolName(name, is_custom=True) for name in customs})


def given_tools(toolbox: Toolbox) -> list[dict[str, Any]]:
    """Returns the tools of an earlier request as a Responses body would give them."""
    functions = orjson.loads(toolbox.tools_json) if toolbox.tools_json else []
    found: list[dict[str, Any]] = []
    for tool in functions:
        shown = tool["function"]
        if toolbox.named(shown["name"]).is_custom:
            keys = shown.keys() & {"name", "description"}
            found.append({"type": "custom", **{key: shown[key] for key in sorted(keys)}})
        else:
            found.append({"type": "function", "parameters": None, "strict": None, **shown})
    return found


def _is_custom(parameters: Any) -> bool:
    """Returns whether parameters are those of a function that stands for a custom tool."""
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties"), dict):
        return False
    given = parameters["properties"].get(_CUSTOM_INPUT)
    description = given.get("description") if isinstance(given, dict) else None
    return isinstance(description, str) and description.startswith(_CUSTOM_DESCRIPTION)


def read_tool_choice(choice: Any, toolbox: Toolbox) -> tuple[gateway_pb2.ToolChoice.ValueType, str]:
    """Returns `tool_choice`, and the name that the model uses for the tool if it names one.

    Raises:
        InvalidFieldError: The choice is not supported.
    """
    if isinstance(choice, str | None) and choice in _CHOICES:
        return _CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        kind = choice.get("type") if isinstance(choice, dict) else choice
        raise InvalidFieldError(
            "tool_choice",
            f"{excerpt(kind)} is not served; give none, auto, required, or a function or a custom "
            "tool by its name",
        )
    name = string(choice.get("name"), "tool_choice.name")
    shown = [key for key, one in toolbox.names.items() if one.name == name and one.namespace]
    if len(shown) > 1:
        raise InvalidFieldError(
            "tool_choice.name", f"several namespaces have {excerpt(name)}; give one of {shown}"
        )
    return gateway_pb2.TOOL_CHOICE_NAMED, shown[0] if shown else name
