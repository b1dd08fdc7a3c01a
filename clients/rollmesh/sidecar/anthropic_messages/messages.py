"""The messages of a Messages body.

A user message with results of tools becomes the results and the rest, in order. What an answer
contained comes back as blocks of one assistant message: thinking, text and calls.
"""

from functools import partial
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.anthropic_messages.blocks import (
    each_block,
    read_image,
    read_parts,
    read_text,
)
from rollmesh.sidecar.anthropic_messages.calls import read_arguments
from rollmesh.sidecar.anthropic_messages.changes import ToolChanges
from rollmesh.sidecar.anthropic_messages.parameters import COUNTED
from rollmesh.sidecar.anthropic_messages.system import read_system
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.fields.values import excerpt, string
from rollmesh.sidecar.turns.images import joined
from rollmesh.sidecar.turns.seals import sealed_answer
from rollmesh.v1 import chat_pb2

_MAX_MESSAGES = 20_000  # the default of the gateway's `max_session_nodes`
_SEEN = {"text": read_text, "image": read_image}
_ANSWERED = {kind: kind for kind in ("text", "thinking", "redacted_thinking", "tool_use")}
_FAILED = "Error"


def read_messages(
    messages: Any, session_key: str, changes: ToolChanges
) -> list[chat_pb2.ChatMessage]:
    """Returns the conversation of a body.

    Args:
        messages: The `messages`.
        session_key: Key of the session, with which thinking was sealed.
        changes: Reads the blocks that name tools.

    Raises:
        InvalidFieldError: Names the message, its block, and what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidFieldError("messages", "must be a non-empty list")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidFieldError(
            "messages", f"has {len(messages)} messages; a session holds at most {_MAX_MESSAGES}"
        )
    found: list[chat_pb2.ChatMessage] = []
    for at, message in enumerate(messages):
        field = f"messages[{at}]"
        if not isinstance(message, dict):
            raise InvalidFieldError(field, "is not an object")
        count_ignored(message, ("role", "content"), COUNTED)
        content, name = message.get("content"), f"{field}.content"
        match message.get("role"):
            case "user":
                found += _user(content, name, changes)
            case "assistant":
                found.append(_assistant(content, name, session_key))
            case "system":
                found += read_system(content, name, changes.systems)
            case role:
                raise InvalidFieldError(
                    f"{field}.role", f"is {excerpt(role)}; give user, assistant or system"
                )
    if not found:
        raise InvalidFieldError("messages", "says nothing; end with a user message")
    if found[-1].role == chat_pb2.ROLE_ASSISTANT:
        raise InvalidFieldError(
            f"messages[{len(messages) - 1}].role",
            "is assistant, and an answer cannot be begun for the model; end with a user message",
        )
    return found


def _user(content: Any, field: str, changes: ToolChanges) -> list[chat_pb2.ChatMessage]:
    """Returns the results of tools and the user's own words, in order."""
    if isinstance(content, str):
        return [_said(read_parts(content, field, _SEEN))]
    found: list[chat_pb2.ChatMessage] = []
    said: list[chat_pb2.ContentPart] = []
    readers = {**_SEEN, "tool_result": partial(_result, changes=changes)}
    for block, name, reader in each_block(content, field, readers):
        if block["type"] != "tool_result":
            part = reader(block, name)
            said += [part] if part is not None else []
            continue
        found += [_said(said)] if said else []
        said = []
        found.append(reader(block, name))
    if said or not found:
        found.append(_said(said))
    return found


def _said(parts: list[chat_pb2.ContentPart]) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=joined(parts))


def _result(block: dict[str, Any], field: str, changes: ToolChanges) -> chat_pb2.ChatMessage:
    """Returns the result of a tool; a failed one that says nothing says that it failed."""
    count_ignored(block, ("type", "tool_use_id", "content", "is_error"), COUNTED)
    parts = read_parts(block.get("content"), f"{field}.content", {**_SEEN, **changes.results})
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise InvalidFieldError(f"{field}.is_error", "must be true or false")
    if failed and not parts:
        parts = [chat_pb2.ContentPart(text=_FAILED)]
    return chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_TOOL,
        content=joined(parts),
        tool_call_id=string(block.get("tool_use_id"), f"{field}.tool_use_id"),
    )


def _assistant(content: Any, field: str, session_key: str) -> chat_pb2.ChatMessage:
    if isinstance(content, str):
        parts = read_parts(content, field, {})
        return chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, content=parts)
    result = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT)
    thoughts: list[str] = []
    texts: list[chat_pb2.ContentPart] = []
    for block, name, kind in each_block(content, field, _ANSWERED):
        match kind:
            case "text":
                part = read_text(block, name)
                texts += [part] if part is not None else []
            case "thinking":
                thinking, answer_id = _thinking(block, name, session_key)
                thoughts.append(thinking)
                result.answer_id = result.answer_id or answer_id
            case "tool_use":
                result.tool_calls.append(_call(block, name))
            case _:  # opaque text of another server's model
                count_ignored({"redacted_thinking": True}, (), COUNTED)
    result.content.extend(joined(texts))
    if any(thoughts):
        result.reasoning_content = "".join(thoughts)
    return result


def _thinking(block: dict[str, Any], field: str, session_key: str) -> tuple[str, str]:
    """Returns the thinking of a block, and the answer that its signature names if it holds.

    Thinking that was not sampled here is carried too: the tree finds no such answer, so it becomes
    context that is not trained.
    """
    thinking = string(block.get("thinking"), f"{field}.thinking")
    signature = block.get("signature")
    signature = "" if signature is None else string(signature, f"{field}.signature")
    return thinking, sealed_answer(session_key, signature, thinking)


def _call(block: dict[str, Any], field: str) -> chat_pb2.ToolCall:
    count_ignored(block, ("type", "id", "name", "input"), COUNTED)
    return chat_pb2.ToolCall(
        id=string(block.get("id"), f"{field}.id"),
        name=string(block.get("name"), f"{field}.name"),
        arguments_json=read_arguments(block.get("input"), f"{field}.input"),
    )
