"""Images of a session: those of a request are checked once, and then known by their hash.

The bytes of an image that the session has are in its journal. In memory is only what the tokens of
the image depend on.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollmesh.chat.images.rules import ImageRefusedError, ImageRule
from rollmesh.chat.messages import Image, RoleName
from rollmesh.runtime.caches import ByteCache
from rollmesh.runtime.codec.images import (
    CheckedImage,
    ImageLimits,
    check_image,
    check_media_type,
)
from rollmesh.runtime.errors import ImageUnknownError, InvalidImageError, UnsupportedPartError
from rollmesh.v1 import chat_pb2

_HASH = re.compile("[0-9a-f]{64}")
_CHECKED_IMAGES = 16_384
_NAMED = 16  # hashes in an error, whose size is bounded


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What is known of an image without its bytes."""

    media_type: str
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    size: int
    """Number of bytes."""


class SessionImages:
    """The images that a session has: each was in a turn that is in the journal."""

    def __init__(self, facts: Mapping[str, ImageFacts] | None = None) -> None:
        """Takes the images that the journal has, by hash."""
        self._facts = dict(facts or {})
        self.size = sum(one.size for one in self._facts.values())
        """Number of bytes of all images."""

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self._facts)

    def __contains__(self, sha256: str) -> bool:
        """Returns whether the session has an image."""
        return sha256 in self._facts

    def get(self, sha256: str) -> ImageFacts | None:
        """Returns what is known of an image; None if the session does not have it."""
        return self._facts.get(sha256)

    def add(self, images: Iterable[CheckedImage]) -> None:
        """Adds images that the journal has now."""
        for image in images:
            if image.sha256 not in self._facts:
                self._facts[image.sha256] = facts_of(image)
                self.size += len(image.data)


def facts_of(image: CheckedImage) -> ImageFacts:
    """Returns what remains of an image once its bytes are stored."""
    return ImageFacts(image.media_type, image.width, image.height, len(image.data))


class ImagePolicy:
    """Which images a gateway takes, and how it checks them; threads may share it."""

    def __init__(
        self,
        rule: ImageRule | None = None,
        roles: frozenset[RoleName] = frozenset(),
        limits: ImageLimits | None = None,
        max_images: int = 256,
    ) -> None:
        """Takes the limits.

        Args:
            rule: How the model's processor represents images; None if it takes none.
            roles: Roles whose messages may hold images.
            limits: Limits on one image.
            max_images: Most images in one conversation.
        """
        self.rule = rule
        self.max_images = max_images
        """Most images in one conversation."""
        self._roles = roles
        self._limits = limits or ImageLimits()
        self._checked: ByteCache[str, ImageFacts] = ByteCache(_CHECKED_IMAGES)
        """Images that were decoded before: siblings and other sessions send the same ones."""

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

    def check(self, data: bytes, field: str, media_type: str) -> tuple[str, ImageFacts]:
        """Returns the hash of an image and what is known of it; decodes it if it is new.

        Raises:
            InvalidImageError: It is broken, too large, or not an image.
        """
        if len(data) > self._limits.max_bytes:
            check_image(data, field, media_type, self._limits)
        sha256 = hashlib.sha256(data).hexdigest()
        facts = self._checked.get(
            sha256, 1, lambda: facts_of(check_image(data, field, media_type, self._limits))
        )
        check_media_type(media_type, facts.media_type, field)
        return sha256, facts


@dataclass(slots=True)
class RequestImages:
    """Reads the images of one request."""

    policy: ImagePolicy = field(default_factory=ImagePolicy)
    held: SessionImages = field(default_factory=SessionImages)
    """Those that the session has."""
    fresh: dict[str, CheckedImage] = field(default_factory=dict)
    """Those that it does not have yet, by hash."""
    _missing: dict[str, str] = field(default_factory=dict)
    """Names of parts whose images are not there, by hash."""

    def read(self, media: chat_pb2.Media, field_name: str, role: RoleName) -> Image:
        """Returns the image of a part, at the beginning of a content.

        Args:
            media: The part.
            field_name: Its place in the request.
            role: Role of its message.

        Raises:
            UnsupportedPartError: Images are not served there, or the part is a URI.
            InvalidImageError: The image is broken, too large, or not an image.
        """
        name = media.field or field_name
        self.policy.check_role(role, name)
        match media.WhichOneof("source"):
            case "data":
                sha256, facts = self.policy.check(media.data, name, media.media_type)
                if sha256 not in self.held and sha256 not in self.fresh:
                    self.fresh[sha256] = CheckedImage(
                        media.data, sha256, facts.media_type, facts.width, facts.height
                    )
            case "sha256":
                sha256, known = media.sha256, self._known(media.sha256, name)
                if known is None:
                    self._missing.setdefault(sha256, name)
                    return Image(0, sha256, 1, 1)
                facts = known
            case "uri":
                raise UnsupportedPartError(
                    name, "is a URI, which the gateway does not fetch; send the bytes"
                )
            case _:
                raise InvalidImageError(name, "is empty; send the bytes of the image")
        self.policy.check_length(facts.width, facts.height, name)
        return Image(0, sha256, facts.width, facts.height)

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
        if count > self.policy.max_images:
            raise InvalidImageError(
                "messages",
                f"hold {count} images; a conversation may hold {self.policy.max_images}, "
                "max_conversation_images of the gateway; leave earlier ones out",
            )

    def size_of(self, sha256: str) -> int:
        """Returns the number of bytes of an image that was read, or that the session has."""
        held = self.held.get(sha256)
        return len(self.fresh[sha256].data) if held is None else held.size

    def _known(self, sha256: str, name: str) -> ImageFacts | None:
        if not _HASH.fullmatch(sha256):
            raise InvalidImageError(
                f"{name}.sha256", "is not a SHA-256 in lower-case hexadecimal; send the bytes"
            )
        held, sent = self.held.get(sha256), self.fresh.get(sha256)
        return facts_of(sent) if held is None and sent is not None else held
