"""Reads the messages of chat requests; messages repeated from an earlier request are read once.

Every request of an agent carries the complete conversation. Its serialised messages start with
those of the previous request, so a digest of that prefix shows whether they are the same.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.chat.messages import Message, RoleName, ToolCall
from rollmesh.runtime.errors import InvalidMessagesError, UnsupportedPartError
from rollmesh.v1 import chat_pb2, gateway_pb2

ROLES: dict[int, RoleName] = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
    chat_pb2.ROLE_TOOL: "tool",
}
_KEPT = 4  # a main conversation and some sub-agents
_KEPT_BYTES = 4 * 1024 * 1024
"""Maximum size of a conversation that is kept; a larger one is read again for each request."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The messages of an earlier request."""

    messages: tuple[Message, ...]
    size: int
    """Size of the serialised messages, bytes."""
    digest: bytes
    """Digest of the serialised messages."""


class MessageReader:
    """Reads the requests of one session; threads may read concurrently.

    The known conversations are replaced as one tuple and never mutated. If two threads replace them
    at the same time, one update is lost and its messages are read again.
    """

    def __init__(self) -> None:
        """Starts without known conversations."""
        self._known: tuple[_Known, ...] = ()

    def read(self, request: gateway_pb2.ChatRequest) -> tuple[tuple[Message, ...], bytes]:
        """Returns a request's messages and a digest of their fields, including call ids.

        Raises:
            InvalidMessagesError: A message is invalid; the error names it and the problem.
        """
        head = gateway_pb2.ChatRequest(
            session_id=request.session_id, session_key=request.session_key
        )
        # Fields are serialised in order of their numbers: two ids, then the messages.
        data = memoryview(request.SerializeToString(deterministic=True))[head.ByteSize() :]
        messages: tuple[Message, ...] = ()
        size, digest = 0, hashlib.blake2b(digest_size=_DIGEST_BYTES)
        others = self._known
        for known in others:
            count = len(known.messages)
            if count > len(request.messages) or known.size > len(data):
                continue
            if _read_message(count - 1, request.messages[count - 1]) != known.messages[-1]:
                continue
            begin = hashlib.blake2b(data[: known.size], digest_size=_DIGEST_BYTES)
            if begin.digest() == known.digest:
                messages, size, digest = known.messages, known.size, begin
                others = tuple(one for one in others if one is not known)
                break
        fresh = request.messages[len(messages) :]
        messages += tuple(
            _read_message(at, message) for at, message in enumerate(fresh, len(messages))
        )
        if not messages:
            raise InvalidMessagesError("messages", "is empty; send at least one message")
        end = size + sum(map(_size, fresh))
        digest.update(data[size:end])
        if end <= _KEPT_BYTES:
            self._known = (_Known(messages, end, digest.digest()), *others)[:_KEPT]
        return messages, digest.digest()


def _read_message(at: int, message: chat_pb2.ChatMessage) -> Message:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidMessagesError(f"messages[{at}].role", "is not set; name who wrote it")
    calls = message.tool_calls
    return Message(
        role,
        _read_content(message.content, f"messages[{at}].content"),
        tuple(ToolCall(call.id, call.name, call.arguments_json) for call in calls) if calls else (),
        message.tool_call_id,
        message.reasoning_content,
        message.name,
    )


def _read_content(parts: Sequence[chat_pb2.ContentPart], field: str) -> str:
    """Returns the text of a message, joined from its parts."""
    if len(parts) == 1 and (text := parts[0].text):  # the common case
        return text
    for at, part in enumerate(parts):
        match part.WhichOneof("part"):
            case "text":
                continue
            case None:
                raise InvalidMessagesError(f"{field}[{at}]", "is not set; give a text")
            case kind:
                raise UnsupportedPartError(
                    f"{field}[{at}].{kind}", "is not served; send text, or leave the part out"
                )
    return "".join(part.text for part in parts)


def _size(message: chat_pb2.ChatMessage) -> int:
    """Returns the size of a message within its request: tag, length and the message, bytes."""
    size = message.ByteSize()
    return 1 + max((size.bit_length() + 6) // 7, 1) + size
