"""Converts a Responses body to a `ChatRequest`; errors name the parameter."""

from collections.abc import Mapping
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.formats import read_format
from rollmesh.sidecar.fields.sampling import read_sampling, read_stop
from rollmesh.sidecar.fields.template_options import read_template_options
from rollmesh.sidecar.fields.values import flag, string, to_json
from rollmesh.sidecar.openai_responses.contents import text_parts
from rollmesh.sidecar.openai_responses.parameters import check_parameters
from rollmesh.sidecar.openai_responses.tools import Toolbox, read_tool_choice
from rollmesh.v1 import chat_pb2, gateway_pb2

_MAX_METADATA_BYTES = 64 * 1024
_ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Members of a response that repeat the request, and what they are if it does not say."""


def read_request(body: dict[str, Any], toolbox: Toolbox) -> gateway_pb2.ChatRequest:
    """Returns the request to the gateway, without the messages and what comes from headers.

    Args:
        body: The body of the request.
        toolbox: Its tools.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    check_parameters(body)
    _check_metadata(body.get("metadata"))
    choice, tool_name = read_tool_choice(body.get("tool_choice"), toolbox)
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InvalidFieldError("parallel_tool_calls", "must be true or false")
    return gateway_pb2.ChatRequest(
        tools_json=toolbox.tools_json,
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=parallel,
        json_format=_format(body.get("text")),
        sampling=read_sampling(body, ("max_output_tokens",)),
        stop=read_stop(body.get("stop")),
        template_options_json=read_template_options(
            body.get("chat_template_kwargs"),
            effort=_effort(body.get("reasoning")),
            effort_field="reasoning.effort",
        ),
        include_stop=flag(body, "include_stop_str_in_output"),
        show_special_tokens=not flag(body, "skip_special_tokens", default=True),
        choices=1,
    )


def read_instructions(body: dict[str, Any]) -> list[chat_pb2.ChatMessage]:
    """Returns the system message that `instructions` are; none if there are none.

    Raises:
        InvalidFieldError: They are not a string.
    """
    given = body.get("instructions")
    if given is None or given == "":
        return []
    content = text_parts(string(given, "instructions"))
    return [chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=content)]


def settings_of(body: Mapping[str, Any]) -> bytes:
    """Returns the members of a response that repeat its request, as JSON without braces.

    Raises:
        InvalidFieldError: One of them is nested too deeply.
    """
    given = {
        name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()
    }
    return ",".join(f'"{name}":{to_json(one, name)}' for name, one in given.items()).encode()


def _format(text: Any) -> gateway_pb2.JsonFormat | None:
    return read_format(_object(text, "text").get("format"), "text.format")


def _effort(reasoning: Any) -> Any:
    return _object(reasoning, "reasoning").get("effort")


def _object(value: Any, field: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidFieldError(field, "is not an object")
    return value


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    is_labels = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_labels:
        raise InvalidFieldError("metadata", "is not an object of strings")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > _MAX_METADATA_BYTES:
        raise InvalidFieldError("metadata", f"has {size} bytes; give at most {_MAX_METADATA_BYTES}")
