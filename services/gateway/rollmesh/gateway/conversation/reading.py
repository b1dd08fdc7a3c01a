"""Reads the messages of chat requests; messages repeated from an earlier request are read once.

Every request of an agent carries the complete conversation. Its serialised messages start with
those of the previous request, so a digest of that prefix shows whether they are the same.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollmesh.chat.messages import (
    Image,
    Message,
    MessageGroup,
    RoleName,
    ToolCall,
    group_messages,
)
from rollmesh.gateway.conversation.images import RequestImages
from rollmesh.gateway.conversation.spec import node_of
from rollmesh.runtime.codec.images import CheckedImage
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
    images: tuple[str, ...] = ()
    """Hashes of its images, in order."""
    fresh: Mapping[str, CheckedImage] = field(default_factory=dict)
    """Its images that the session did not have when it was read, by hash."""


_NOTHING = Conversation([()], 0, 0, b"")


class MessageReader:
    """Reads the requests of one session; threads may read concurrently.

    The known conversations are replaced as one tuple and never mutated. If two threads replace them
    at the same time, one update is lost and its messages are read again.
    """

    def __init__(self) -> None:
        """Starts without known conversations."""
        self._known: tuple[Conversation, ...] = ()

    def read(
        self, request: gateway_pb2.ChatRequest, images: RequestImages | None = None
    ) -> Conversation:
        """Returns the conversation of a request; call it in a thread if it has images.

        Args:
            request: The request.
            images: Reads its images; None refuses them.

        Raises:
            InvalidMessagesError: A message is invalid; the error names it and the problem.
            InvalidImageError: An image is.
            ImageUnknownError: An image is given by its hash, and the session does not have it.
        """
        images = images or RequestImages()
        head = gateway_pb2.ChatRequest(
            session_id=request.session_id, session_key=request.session_key
        )
        # Fields are serialised in order of their numbers: two ids, then the messages.
        data = memoryview(request.SerializeToString(deterministic=True))[head.ByteSize() :]
        earlier, digest = self._earlier(request, data, images)
        begun = earlier or _NOTHING
        fresh = request.messages[begun.messages :]
        added = tuple(
            _read_message(at, one, request.session_id, images)
            for at, one in enumerate(fresh, begun.messages)
        )
        shown = begun.images + tuple(one.sha256 for message in added for one in message.images)
        images.finish(len(shown))
        if not (begun.messages or added):
            raise InvalidMessagesError("messages", "is empty; send at least one message")
        end = begun.size + sum(map(_size, fresh))
        digest.update(data[begun.size : end])
        # The last group is grouped again: a run may go on.
        *before, last = begun.groups
        groups = [*before, *group_messages(last + added, begins=not before)]
        found = Conversation(
            groups, len(request.messages), end, digest.digest(), earlier, shown, images.fresh
        )
        if end - _image_bytes(found, images) <= _KEPT_BYTES:
            others = tuple(one for one in self._known if one is not earlier)
            self._known = (replace(found, earlier=None, fresh={}), *others)[:_KEPT]
        return found

    def _earlier(
        self, request: gateway_pb2.ChatRequest, data: memoryview, images: RequestImages
    ) -> "tuple[Conversation | None, hashlib.blake2b]":
        """Returns the known conversation that a request begins with, and a hash of its messages."""
        for known in self._known:
            if known.messages > len(request.messages) or known.size > len(data):
                continue
            if not all(sha256 in images.held for sha256 in known.images):
                continue  # its turn was not committed: the bytes are those of this request
            last = known.messages - 1
            echo = _read_message(last, request.messages[last], request.session_id, images)
            if echo != known.groups[-1][-1]:
                continue
            begin = hashlib.blake2b(data[: known.size], digest_size=_DIGEST_BYTES)
            if begin.digest() == known.digest:
                return known, begin
        return None, hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _image_bytes(conversation: Conversation, images: RequestImages) -> int:
    """Returns the size of the images of a conversation, whose bytes are not kept."""
    sizes = (images.size_of(sha256) for sha256 in conversation.images)
    return sum(sizes)


def _read_message(
    at: int, message: chat_pb2.ChatMessage, session_id: str, images: RequestImages
) -> Message:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidMessagesError(f"messages[{at}].role", "is not set; name who wrote it")
    calls = message.tool_calls
    content, shown = _read_content(message.content, f"messages[{at}].content", role, images)
    return Message(
        role,
        content,
        tuple(ToolCall(call.id, call.name, call.arguments_json) for call in calls) if calls else (),
        message.tool_call_id,
        message.reasoning_content,
        message.name,
        shown,
        echo_of=node_of(message.answer_id, session_id) if message.answer_id else 0,
    )


def _read_content(
    parts: Sequence[chat_pb2.ContentPart], field: str, role: RoleName, images: RequestImages
) -> tuple[str, tuple[Image, ...]]:
    """Returns the text of a message, joined from its parts, and the images within it."""
    if len(parts) == 1 and (text := parts[0].text):  # the common case
        return text, ()
    texts: list[str] = []
    shown: list[Image] = []
    end = 0
    for at, part in enumerate(parts):
        match part.WhichOneof("part"):
            case "text":
                texts.append(part.text)
                end += len(part.text)
            case "image":
                image = images.read(part.image, f"{field}[{at}].image", role)
                shown.append(replace(image, at=end))
            case None:
                raise InvalidMessagesError(f"{field}[{at}]", "is not set; give a text")
            case kind:
                raise UnsupportedPartError(
                    f"{field}[{at}].{kind}", "is not served; send text, or leave the part out"
                )
    return "".join(texts), tuple(shown)


def _size(message: chat_pb2.ChatMessage) -> int:
    """Returns the size of a message within its request: tag, length and the message, bytes."""
    size = message.ByteSize()
    return 1 + max((size.bit_length() + 6) // 7, 1) + size
