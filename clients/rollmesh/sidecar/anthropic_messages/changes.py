"""Tools that a conversation names after its beginning.

Claude Code defers most of its tools: it offers a search, and names those that were found in the
result. A chat template prints tools before the conversation, which a later tool would begin anew.
So a deferred tool is not among them: its definition is the text of the block that names it.
"""

from collections.abc import Mapping
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.blocks import Reader
from rollmesh.sidecar.anthropic_messages.parameters import COUNTED
from rollmesh.sidecar.anthropic_messages.tools import read_tool
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.fields.tools import list_tools
from rollmesh.sidecar.fields.values import excerpt, string, to_json
from rollmesh.v1 import chat_pb2


class ToolChanges:
    """Reads the blocks that name tools."""

    def __init__(self, tools: Any) -> None:
        """Takes the `tools` of the body, which have been read."""
        self._tools: dict[str, dict[str, Any]] = {}
        self._later: dict[str, dict[str, Any]] = {}
        """Those that the chat template does not print."""
        for at, tool in enumerate(list_tools(tools)):
            read = self._tools[tool["name"]] = read_tool(tool, f"tools[{at}]")
            if tool.get("defer_loading"):
                self._later[tool["name"]] = read

    @property
    def later_json(self) -> str:
        """The tools that are not printed, as those that are; empty if there are none."""
        return to_json(list(self._later.values()), "tools") if self._later else ""

    @property
    def results(self) -> Mapping[str, Reader]:
        """What reads the blocks of a tool's result."""
        return {"tool_reference": self._reference}

    @property
    def systems(self) -> Mapping[str, Reader]:
        """What reads the blocks of a system message within a conversation."""
        return {"tool_addition": self._addition, "tool_removal": self._removal}

    def _reference(self, block: dict[str, Any], field: str) -> chat_pb2.ContentPart:
        count_ignored(block, ("type", "tool_name"), COUNTED)
        return self._known(string(block.get("tool_name"), f"{field}.tool_name"))

    def _addition(self, block: dict[str, Any], field: str) -> chat_pb2.ContentPart:
        kind, tool = _changed(block, field)
        if kind == "tool_definition":
            defined = read_tool(tool.get("definition"), f"{field}.tool.definition")
            name = defined["function"]["name"]
            if name not in self._tools:
                self._later[name] = defined
            return _printed(defined)
        return self._known(string(tool.get("name"), f"{field}.tool.name"))

    def _removal(self, block: dict[str, Any], field: str) -> chat_pb2.ContentPart:
        _, tool = _changed(block, field)
        name = string(tool.get("name"), f"{field}.tool.name")
        return chat_pb2.ContentPart(text=f"{name} is no longer available.\n")

    def _known(self, name: str) -> chat_pb2.ContentPart:
        """Returns the definition of a tool of the body; its name if the body has it no more."""
        if name not in self._tools:
            return chat_pb2.ContentPart(text=f"{name}\n")
        return _printed(self._tools[name])


def _changed(block: dict[str, Any], field: str) -> tuple[str, dict[str, Any]]:
    """Returns the kind of a block's tool, and the tool."""
    count_ignored(block, ("type", "tool"), COUNTED)
    tool = block.get("tool")
    kind = tool.get("type") if isinstance(tool, dict) else None
    kinds = ("tool_reference", "tool_definition")[: 1 if block["type"] == "tool_removal" else 2]
    if not isinstance(tool, dict) or kind not in kinds:
        raise InvalidFieldError(
            f"{field}.tool.type", f"is {excerpt(kind)}; give {' or '.join(kinds)}"
        )
    return kind, tool


def _printed(tool: dict[str, Any]) -> chat_pb2.ContentPart:
    return chat_pb2.ContentPart(text=f"{to_json(tool, 'tools')}\n")
