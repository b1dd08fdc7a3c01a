"""Parameters about how the model thinks, what form its text has, and what it remembers."""

from dataclasses import dataclass
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.parameters import COUNTED
from rollmesh.sidecar.fields.formats import read_schema
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.fields.template_options import read_template_options
from rollmesh.sidecar.fields.values import excerpt
from rollmesh.v1 import gateway_pb2

_KINDS = {"enabled": True, "adaptive": True, "disabled": False}


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the model thinks."""

    template_options_json: str
    """Options of the chat template, a JSON object; empty if there are none."""
    is_shown: bool = True
    """Whether the answer contains the thinking, and not only its signature."""


def read_thinking(body: dict[str, Any]) -> Thinking:
    """Returns what `thinking` and `output_config.effort` say.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    thinking, options = body.get("thinking"), body.get("chat_template_kwargs")
    effort = _output_config(body).get("effort")
    is_shown = True
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidFieldError(
                "thinking.type", f"is {excerpt(kind)}; give one of {', '.join(_KINDS)}"
            )
        count_ignored(thinking, ("type", "display"), COUNTED)
        is_shown = thinking.get("display") != "omitted"
        if not _KINDS[kind]:
            effort = "none"
        elif isinstance(options, dict | None):
            options = {"enable_thinking": True, **(options or {})}
    read = read_template_options(options, effort=effort, effort_field="output_config.effort")
    return Thinking(read, is_shown)


def read_output_format(body: dict[str, Any]) -> gateway_pb2.JsonFormat | None:
    """Returns the JSON format of the answer; None if it is text.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
    """
    config, field = _output_config(body), "output_config.format"
    count_ignored(config, ("effort", "format"), COUNTED)
    form = config.get("format")
    if form is None:
        form, field = body.get("output_format"), "output_format"
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidFieldError(f"{field}.type", "is not served; give json_schema")
    if not isinstance(form.get("schema"), dict):
        raise InvalidFieldError(f"{field}.schema", "is not an object")
    return read_schema(form["schema"], f"{field}.schema", strict=True)


def check_context_management(management: Any) -> None:
    """Refuses edits of the conversation; one that edits nothing is accepted.

    Claude Code asks with each request to clear no thinking.

    Raises:
        InvalidFieldError: Names the edit.
    """
    if management is None:
        return
    edits = management.get("edits") if isinstance(management, dict) else management
    if not isinstance(edits, list | None):
        raise InvalidFieldError("context_management.edits", "must be a list")
    for at, edit in enumerate(edits or []):
        keeps = isinstance(edit, dict) and edit.get("keep") == "all"
        if not keeps or not str(edit.get("type", "")).startswith("clear_thinking_"):
            raise InvalidFieldError(
                f"context_management.edits[{at}]",
                "is not served: nothing of a conversation is cut here; send less of it, or give "
                "clear_thinking with keep: all",
            )


def _output_config(body: dict[str, Any]) -> dict[str, Any]:
    config = body.get("output_config")
    if not isinstance(config, dict | None):
        raise InvalidFieldError("output_config", "is not an object")
    return config or {}
