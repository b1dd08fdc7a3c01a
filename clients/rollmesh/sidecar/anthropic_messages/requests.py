"""Converts a Messages body to a `ChatRequest`; errors name the parameter."""

from typing import Any

from rollmesh.sidecar.anthropic_messages.changes import ToolChanges
from rollmesh.sidecar.anthropic_messages.messages import read_messages
from rollmesh.sidecar.anthropic_messages.parameters import check_parameters
from rollmesh.sidecar.anthropic_messages.system import read_system, says_sub_agent
from rollmesh.sidecar.anthropic_messages.thinking import (
    check_context_management,
    read_output_format,
    read_thinking,
)
from rollmesh.sidecar.anthropic_messages.tools import read_tool_choice, read_tools
from rollmesh.sidecar.fields.sampling import read_sampling, read_stop
from rollmesh.v1 import gateway_pb2, trajectory_pb2

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
_COMPACTION = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools"
"""How Claude Code asks for a summary, in a block after everything else that the user says."""


def read_request(body: dict[str, Any], session_key: str) -> gateway_pb2.ChatRequest:
    """Returns the request to the gateway, without what the headers say.

    Args:
        body: The body, of a request for a message or for its size.
        session_key: Key of the session.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    check_parameters(body)
    check_context_management(body.get("context_management"))
    choice, tool_name, parallel = read_tool_choice(body.get("tool_choice"))
    system = body.get("system")
    tools = body.get("tools")
    tools_json = read_tools(tools)
    messages = read_system(system, "system")
    changes = ToolChanges(tools)
    messages += read_messages(body.get("messages"), session_key, changes)
    return gateway_pb2.ChatRequest(
        messages=messages,
        tools_json=tools_json,
        deferred_tools_json=changes.later_json,
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=parallel,
        json_format=read_output_format(body),
        sampling=read_sampling({name: body.get(name) for name in _SAMPLING}, ("max_tokens",)),
        stop=read_stop(body.get("stop_sequences"), "stop_sequences"),
        template_options_json=read_thinking(body).template_options_json,
        choices=1,
        lineage=_lineage(system, body["messages"][-1]["content"]),
        max_tokens_must_fit=True,
    )


def _lineage(system: Any, last: Any) -> trajectory_pb2.Lineage.ValueType:
    """Returns what Claude Code says of a request in its texts; UNSPECIFIED if it says nothing.

    Args:
        system: The system prompt.
        last: Content of the last message, which has been read.
    """
    said = last if isinstance(last, str) else (last or [{}])[-1].get("text")
    if isinstance(said, str) and said.startswith(_COMPACTION):
        return trajectory_pb2.LINEAGE_COMPACTION
    if says_sub_agent(system):
        return trajectory_pb2.LINEAGE_SUB_AGENT
    return trajectory_pb2.LINEAGE_UNSPECIFIED
