"""Reads the messages of chat requests; messages repeated from an earlier request are read once.

Every request of an agent carries the complete conversation. Its serialised messages start with
those of the previous request, so a digest of that prefix shows whether they are the same.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollmesh.chat.messages import Message, MessageGroup, RoleName, ToolCall, group_messages
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
class Conversation:
    """The messages of one request."""

    groups: list[MessageGroup]
    """The messages, in groups; never changed."""
    messages: int
    """Number of messages."""
    size: int
    """Size of the serialised messages, bytes."""
    digest: bytes
    """Digest of the messages, including all their fields."""
    earlier: "Conversation | None" = None
    """A conversation that was read before and that this one begins with."""


_NOTHING = Conversation([()], 0, 0, b"")


class MessageReader:
    """Reads the requests of one session; threads may read concurrently.

    The known conversations are replaced as one tuple and never mutated. If two threads replace them
    at the same time, one update is lost and its messages are read again.
    """

    def __init__(self) -> None:
        """Starts without known conversations."""
        self._known: tuple[Conversation, ...] = ()

    def read(self, request: gateway_pb2.ChatRequest) -> Conversation:
        """Returns the conversation of a request.

        Raises:
            InvalidMessagesError: A message is invalid; the error names it and the problem.
        """
        head = gateway_pb2.ChatRequest(
            session_id=request.session_id, session_key=request.session_key
        )
        # Fields are serialised in order of their numbers: two ids, then the messages.
        data = memoryview(request.SerializeToString(deterministic=True))[head.ByteSize() :]
        earlier, digest = self._earlier(request, data)
        begun = earlier or _NOTHING
        fresh = request.messages[begun.messages :]
        added = tuple(_read_message(at, one) for at, one in enumerate(fresh, begun.messages))
        if not (begun.messages or added):
            raise InvalidMessagesError("messages", "is empty; send at least one message")
        end = begun.size + sum(map(_size, fresh))
        digest.update(data[begun.size : end])
        # The last group is grouped again: a run of tool results may go on.
        *before, last = begun.groups
        groups = [*before, *group_messages(last + added)]
        found = Conversation(groups, len(request.messages), end, digest.digest(), earlier)
        if end <= _KEPT_BYTES:
            others = tuple(one for one in self._known if one is not earlier)
            self._known = (replace(found, earlier=None), *others)[:_KEPT]
        return found

    def _earlier(
        self, request: gateway_pb2.ChatRequest, data: memoryview
    ) -> "tuple[Conversation | None, hashlib.blake2b]":
        """Returns the known conversation that a request begins with, and a hash of its messages."""
        for known in self._known:
            if known.messages > len(request.messages) or known.size > len(data):
                continue
            last = known.messages - 1
            if _read_message(last, request.messages[last]) != known.groups[-1][-1]:
                continue
            begin = hashlib.blake2b(data[: known.size], digest_size=_DIGEST_BYTES)
            if begin.digest() == known.digest:
                return known, begin
        return None, hashlib.blake2b(digest_size=_DIGEST_BYTES)


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
