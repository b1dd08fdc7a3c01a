"""The input items of a Responses body, as messages.

A sampled turn is one message and several items: reasoning, text, calls. Consecutive items of the
assistant are joined again, by the answer that their ids name. Agents that drop the ids get the same
message where the order of the items shows it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import excerpt, string
from rollmesh.sidecar.openai_responses import ids
from rollmesh.sidecar.openai_responses.contents import read_content, read_text, text_parts
from rollmesh.sidecar.openai_responses.tools import (
    AddedTools,
    custom_arguments,
    shown_name,
)
from rollmesh.sidecar.turns.seals import sealed_answer
from rollmesh.v1 import chat_pb2

_MAX_ITEMS = 60_000
"""Three items for each message of the longest session that a gateway holds by default."""
_ROLES = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_SYSTEM,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """An answer to which an input refers by its items' ids."""

    field: str
    """Name of the input's field that does."""
    answer_id: str
    message: chat_pb2.ChatMessage
    """The message that the answer's is to be written into."""


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a request."""

    messages: list[chat_pb2.ChatMessage]
    references: list[Reference] = dataclasses.field(default_factory=list)
    """The messages that are only referred to."""
    added_tools: list[AddedTools] = dataclasses.field(default_factory=list)
    """Tools that items add to those of the body."""


def read_input(given: Any, session_key: str) -> Input:
    """Returns the messages of an `input`.

    Args:
        given: The input: a string, or a list of items.
        session_key: Key of the session, with which reasoning was sealed.

    Raises:
        InvalidFieldError: Names the item, its field, and what is wrong.
    """
    if isinstance(given, str):
        return Input([chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=text_parts(given))])
    if not isinstance(given, list):
        raise InvalidFieldError("input", "must be a string or a list of items")
    if len(given) > _MAX_ITEMS:
        raise InvalidFieldError("input", f"has {len(given)} items; give at most {_MAX_ITEMS}")
    reader = _Reader(session_key)
    for at, item in enumerate(given):
        reader.take(item, f"input[{at}]")
    return Input(reader.messages, reader.references, reader.added_tools)


def _is_reference(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


class _Reader:
    """Joins items into messages."""

    def __init__(self, session_key: str) -> None:
        self._session_key = session_key
        self.messages: list[chat_pb2.ChatMessage] = []
        self.references: list[Reference] = []
        self.added_tools: list[AddedTools] = []
        self._turn: chat_pb2.ChatMessage | None = None
        """The message of the assistant that the next item may belong to."""
        self._answer = ""
        """The answer that it is, as far as its items have said."""

    def take(self, item: Any, field: str) -> None:
        """Adds one item."""
        if not isinstance(item, dict):
            raise InvalidFieldError(field, "is not an object")
        if _is_reference(item):
            self._refer(item, field)
            return
        match item.get("type", "message"):
            case "message":
                self._message(item, field)
            case "reasoning":
                self._reasoning(item, field)
            case "function_call" | "custom_tool_call":
                self._call(item, field)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, field)
            case "agent_message":  # what another agent of Codex writes to this one
                content = read_content(item.get("content"), f"{field}.content")
                self._other(chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=content))
            case "additional_tools":  # Codex gives its tools so, before everything else
                self.added_tools.append(AddedTools(f"{field}.tools", item.get("tools")))
            case kind:
                raise InvalidFieldError(
                    f"{field}.type",
                    f"{excerpt(kind)} is not served; send messages, reasoning, function calls, "
                    "custom tool calls and their outputs",
                )

    def _message(self, item: dict[str, Any], field: str) -> None:
        name = item.get("role")
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise InvalidFieldError(f"{field}.role", f"{excerpt(name)} is not a role")
        content = item.get("content")
        if role != chat_pb2.ROLE_ASSISTANT:
            parts = read_content(content, f"{field}.content")
            self._other(chat_pb2.ChatMessage(role=role, content=parts))
            return
        text = read_text(content, f"{field}.content")
        answer = ids.answer_of_item(item.get("id"))
        turn = self._turn
        if turn is not None and not (answer and answer == self._answer) and turn.content:
            turn = None  # one text a message, unless the ids say that they are of one answer
        turn = self._joined(answer) if turn is not None else self._new(answer)
        turn.content.extend(text_parts(text))

    def _reasoning(self, item: dict[str, Any], field: str) -> None:
        text = read_text(item.get("content"), f"{field}.content")
        text = text or read_text(item.get("summary"), f"{field}.summary")
        answer = ids.answer_of_item(item.get("id"))
        if item.get("encrypted_content") is not None:
            sealed = string(item["encrypted_content"], f"{field}.encrypted_content")
            answer = sealed_answer(self._session_key, sealed, text) or answer
        turn = self._turn
        if turn is not None and not (answer and answer == self._answer):
            turn = None  # reasoning begins a turn, unless the ids say that it goes on
        turn = self._joined(answer) if turn is not None else self._new(answer)
        if text:
            turn.reasoning_content += text

    def _call(self, item: dict[str, Any], field: str) -> None:
        name = string(item.get("name"), f"{field}.name")
        namespace = string(item.get("namespace") or "", f"{field}.namespace")
        if item["type"] == "function_call":
            arguments = string(item.get("arguments") or "", f"{field}.arguments")
        else:
            arguments = string(item.get("input") or "", f"{field}.input")
            if ids.kind_of_item(item.get("id")) != ids.RAW_CUSTOM_CALL:
                arguments = custom_arguments(arguments)
        turn = self._joined(ids.answer_of_item(item.get("id")))
        turn.tool_calls.add(
            id=string(item.get("call_id"), f"{field}.call_id"),
            name=shown_name(name, namespace),
            arguments_json=arguments,
        )

    def _output(self, item: dict[str, Any], field: str) -> None:
        self._other(
            chat_pb2.ChatMessage(
                role=chat_pb2.ROLE_TOOL,
                content=read_content(item.get("output"), f"{field}.output"),
                tool_call_id=string(item.get("call_id"), f"{field}.call_id"),
            )
        )

    def _refer(self, item: dict[str, Any], field: str) -> None:
        """Adds the answer to which an item refers; its further items are in there too."""
        answer = ids.answer_of_item(item.get("id"))
        if not answer:
            raise InvalidFieldError(
                f"{field}.id", f"{excerpt(item.get('id'))} is no item of an answer of this server"
            )
        if self._turn is None or self._answer != answer:
            self.references.append(Reference(f"{field}.id", answer, self._new(answer)))

    def _joined(self, answer: str) -> chat_pb2.ChatMessage:
        """Returns the assistant's message that an item of an answer belongs to."""
        if self._turn is None or (answer and self._answer and answer != self._answer):
            return self._new(answer)
        self._answer = self._turn.answer_id = self._answer or answer
        return self._turn

    def _new(self, answer: str) -> chat_pb2.ChatMessage:
        self._turn = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, answer_id=answer)
        self._answer = answer
        self.messages.append(self._turn)
        return self._turn

    def _other(self, message: chat_pb2.ChatMessage) -> None:
        self._turn, self._answer = None, ""
        self.messages.append(message)
