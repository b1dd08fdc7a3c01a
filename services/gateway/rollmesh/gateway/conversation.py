"""Reads the messages of chat requests. Messages repeated from an earlier request are read once.

Every request of an agent carries the complete conversation. Its serialised messages start with the
messages of the previous request, so a digest of that prefix shows whether they are the same.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from rollmesh.chat import (
    Image,
    ImageRefusedError,
    ImageRule,
    Message,
    MessageGroup,
    RoleName,
    ToolCall,
    group_messages,
)
from rollmesh.runtime import ByteCache
from rollmesh.runtime.codec import CheckedImage, ImageLimits, check_media_type
from rollmesh.runtime.decoding import DecodedImage, ImageDecoders
from rollmesh.runtime.errors import (
    ImageUnknownError,
    InvalidImageError,
    InvalidMessagesError,
    UnsupportedPartError,
)
from rollmesh.v1 import chat_pb2, gateway_pb2

# Images of a session. An image of a request is checked once, and then known by its hash.
#
# The bytes of an image that the session has are in its journal. Memory holds only the properties
# that the image's tokens depend on.

_HASH = re.compile("[0-9a-f]{64}")
_DECODED_IMAGES = 16_384
_NAMED = 16  # hashes in an error, whose size is bounded


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The properties of an image without its bytes."""

    media_type: str
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    size: int
    """Number of bytes."""


def facts_of(image: CheckedImage) -> ImageFacts:
    """Returns the properties of an image."""
    return ImageFacts(image.media_type, image.width, image.height, len(image.data))


class ImagePolicy:
    """Which images a gateway takes, and how it checks them. Threads may share it."""

    def __init__(
        self,
        rule: ImageRule | None = None,
        roles: frozenset[RoleName] = frozenset(),
        limits: ImageLimits | None = None,
        max_images: int = 256,
    ) -> None:
        """Takes the limits."""
        self.rule = rule
        self.max_images = max_images
        """Most images in one conversation."""
        self._roles = roles
        self._decoders = ImageDecoders(limits or ImageLimits())
        self._decoded: ByteCache[str, DecodedImage] = ByteCache(_DECODED_IMAGES)
        """Images that were decoded before: siblings and other sessions send the same ones."""

    async def close(self) -> None:
        """Ends the processes that decode images."""
        await self._decoders.close()

    def check_role(self, role: RoleName, field: str) -> None:
        """Checks that messages of a role may hold images.

        Raises:
            UnsupportedPartError: They may not.
        """
        if self.rule is None:
            raise UnsupportedPartError(
                field,
                "is not served, as the model takes no images; send text, or leave it out",
            )
        if role not in self._roles:
            taken = ", ".join(sorted(self._roles)) or "none"
            raise UnsupportedPartError(
                field,
                f"is not served in {role} messages, as the chat template does not show "
                f"it there; send it in a message of another role ({taken}), or leave it out",
            )

    def check_length(self, width: int, height: int, field: str) -> None:
        """Checks that the model can take an image of a size.

        Raises:
            InvalidImageError: It cannot.
        """
        assert self.rule is not None
        try:
            self.rule.run(width, height)
        except ImageRefusedError as error:
            raise InvalidImageError(field, f"{error}; send an image of another shape") from error

    def check_count(self, count: int) -> None:
        """Checks the number of images of a conversation.

        Raises:
            InvalidImageError: There are too many.
        """
        if count > self.max_images:
            raise InvalidImageError(
                "messages",
                f"hold {count} images; a conversation may hold {self.max_images}, "
                "max_conversation_images of the gateway; leave earlier ones out",
            )

    async def decode(
        self, images: Sequence["GivenImage"], session_id: str
    ) -> dict[str, CheckedImage]:
        """Returns images by hash, once all of them have been decoded. Sessions take turns.

        Raises:
            InvalidImageError: One is broken, too large, takes too long, or is not an image.
        """
        self.check_count(len(images))
        found: dict[str, CheckedImage] = {}
        for data, sha256, name in images:
            if sha256 not in found:
                known = partial(self._decoded.find, sha256)
                one = known() or await self._decoders.decode(data, name, session_id, known=known)
                self._decoded.add(sha256, one, 1)
                found[sha256] = CheckedImage(data, sha256, one.media_type, one.width, one.height)
        return found


class GivenImage(NamedTuple):
    """An image that a request gives by its bytes."""

    data: bytes
    sha256: str
    """SHA-256 of the bytes, hexadecimal."""
    name: str
    """Names it in errors."""


@dataclass(slots=True)
class RequestImages:
    """Reads the images of one request."""

    policy: ImagePolicy = field(default_factory=ImagePolicy)
    held: Mapping[str, ImageFacts] = field(default_factory=dict)
    """The images that the session has, by hash."""
    decoded: Mapping[str, CheckedImage] = field(default_factory=dict)
    """The images that the request gives by their bytes, by hash."""
    fresh: dict[str, CheckedImage] = field(default_factory=dict)
    """The images that the session does not have yet, by hash."""
    _missing: dict[str, str] = field(default_factory=dict)
    """Names of parts whose images are not there, by hash."""

    def read(self, media: chat_pb2.Media, field_name: str, role: RoleName) -> Image:
        """Returns the image of a part, at the beginning of a content.

        Raises:
            UnsupportedPartError: Images are not served there, or the part is a URI.
            InvalidImageError: The image is broken, too large, or not an image.
        """
        name = media.field or field_name
        self.policy.check_role(role, name)
        match media.WhichOneof("source"):
            case "data":
                sha256 = hashlib.sha256(media.data).hexdigest()
                given = self.decoded[sha256]
                check_media_type(media.media_type, given.media_type, name)
                if sha256 not in self.held:
                    self.fresh.setdefault(sha256, given)
                one: CheckedImage | ImageFacts = given
            case "sha256":
                sha256 = media.sha256
                if not _HASH.fullmatch(sha256):
                    raise InvalidImageError(
                        f"{name}.sha256",
                        "is not a SHA-256 in lower-case hexadecimal; send the bytes",
                    )
                known = self.held.get(sha256) or self.fresh.get(sha256)
                if known is None:
                    self._missing.setdefault(sha256, name)
                    return Image(0, sha256, 1, 1)
                one = known
            case "uri":
                raise UnsupportedPartError(
                    name, "is a URI, which the gateway does not fetch; send the bytes"
                )
            case _:
                raise InvalidImageError(name, "is empty; send the bytes of the image")
        self.policy.check_length(one.width, one.height, name)
        return Image(0, sha256, one.width, one.height)

    def finish(self, count: int) -> None:
        """Checks the images of the complete request.

        Args:
            count: Number of its images, each as often as it is shown.

        Raises:
            ImageUnknownError: Images were given by hash, and the session does not have them.
            InvalidImageError: There are too many images.
        """
        if self._missing:
            sha256, name = next(iter(self._missing.items()))
            raise ImageUnknownError(
                f"{name}: the session does not have image {sha256}; send the bytes of the "
                f"{len(self._missing)} images that are missing",
                field=name,
                sha256=",".join(list(self._missing)[:_NAMED]),
                missing=len(self._missing),
            )
        self.policy.check_count(count)


# The messages of a request.

ROLES: dict[int, RoleName] = {
    chat_pb2.ROLE_SYSTEM: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
    chat_pb2.ROLE_TOOL: "tool",
}
_KEPT = 4  # a main conversation and some sub-agents
_KEPT_BYTES = 4 * 1024 * 1024
"""Maximum size of a conversation that is kept. A larger one is read again for each request."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """The messages of one request."""

    groups: list[MessageGroup]
    """The messages, in groups, never changed."""
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
    """Reads the requests of one session. Threads may read concurrently.

    The known conversations are replaced as one tuple and never mutated. If two threads replace them
    at the same time, one update is lost and its messages are read again.
    """

    def __init__(self) -> None:
        self._known: tuple[Conversation, ...] = ()

    def read(
        self, request: gateway_pb2.ChatRequest, images: RequestImages | None = None
    ) -> tuple[Conversation, memoryview]:
        """Returns the conversation of a request, and the serialised fields after its messages.

        Call it in a thread if the request is large.

        Raises:
            InvalidMessagesError: A message is invalid. The error names it and the problem.
            InvalidImageError: An image is invalid.
            ImageUnknownError: An image is given by its hash, and the session does not have it.
        """
        images = images or RequestImages()
        head = gateway_pb2.ChatRequest(
            session_id=request.session_id, session_key=request.session_key
        )
        # Fields are serialised in order of their numbers: two ids, then the messages.
        data = memoryview(request.SerializeToString(deterministic=True))[head.ByteSize() :]
        earlier, digest = None, hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for known in self._known:
            if known.messages > len(request.messages) or known.size > len(data):
                continue
            if known.images and not all(map(images.held.__contains__, known.images)):
                continue  # its turn was not committed: only this request has the bytes
            at = known.messages - 1
            echo = _read_message(at, request.messages[at], request.session_id, images)
            if echo != known.groups[-1][-1]:
                continue
            begin = hashlib.blake2b(data[: known.size], digest_size=_DIGEST_BYTES)
            if begin.digest() == known.digest:
                earlier, digest = known, begin
                break
        begun = earlier or _NOTHING
        end, added, shown = begun.size, list[Message](), list(begun.images)
        for at, one in enumerate(request.messages[begun.messages :], begun.messages):
            message = _read_message(at, one, request.session_id, images)
            added.append(message)
            if message.images:
                shown.extend([image.sha256 for image in message.images])
            size = one.ByteSize()
            end += 1 + max((size.bit_length() + 6) // 7, 1) + size  # tag, length, message
        if shown:
            images.finish(len(shown))
        if not (begun.messages or added):
            raise InvalidMessagesError("messages", "is empty; send at least one message")
        digest.update(data[begun.size : end])
        # The last group is grouped again: a run of tool results may continue.
        *before, last = begun.groups
        groups = [*before, *group_messages(last + tuple(added), begins=not before)]
        found = Conversation(
            groups, len(request.messages), end, digest.digest(), earlier, tuple(shown), images.fresh
        )
        kept = end  # without the bytes of images
        held, fresh = images.held, images.fresh
        for sha256 in shown:
            kept -= held[sha256].size if sha256 in held else len(fresh[sha256].data)
        if kept <= _KEPT_BYTES:
            others = [*self._known]
            if earlier in others:
                others.remove(earlier)
            self._known = (replace(found, earlier=None, fresh={}), *others[: _KEPT - 1])
        return found, data[end:]


def given_images(request: gateway_pb2.ChatRequest, policy: ImagePolicy) -> list[GivenImage]:
    """Returns the images that a request gives by their bytes. Call it in a thread if it is large.

    Raises:
        UnsupportedPartError: Images are not served there.
    """
    found: list[GivenImage] = []
    for at, message in enumerate(request.messages):
        for index, part in enumerate(message.content):
            if not part.HasField("image") or not part.image.HasField("data"):
                continue
            image, role = part.image, ROLES.get(message.role)
            if role is not None:  # else reading the message refuses it
                name = image.field or f"messages[{at}].content[{index}].image"
                policy.check_role(role, name)
                digest = hashlib.sha256(image.data).hexdigest()
                found.append(GivenImage(image.data, digest, name))
    return found


def _read_message(
    at: int, message: chat_pb2.ChatMessage, session_id: str, images: RequestImages
) -> Message:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidMessagesError(f"messages[{at}].role", "is not set; name who wrote it")
    calls, parts = message.tool_calls, message.content
    if len(parts) == 1 and (content := parts[0].text):  # the common case
        shown: tuple[Image, ...] = ()
    else:
        content, shown = _read_content(parts, f"messages[{at}].content", role, images)
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


def answer_id_of(session_id: str, node_id: int) -> str:
    """Returns the id of the answer in a session's node."""
    return f"chatcmpl-{session_id}-{node_id}"


def node_of(answer_id: str, session_id: str) -> int:
    """Returns the node of a session that an answer id names, or 0 if it names none."""
    node = answer_id.removeprefix(f"chatcmpl-{session_id}-")
    is_own = node != answer_id and node.isdecimal() and len(node) < 10
    return int(node) if is_own else 0
