"""The images of generation requests: checked, held by their hash, and sent to each engine once."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rollmesh.runtime import ByteCache
from rollmesh.runtime.errors import ImageUnknownError, InvalidFieldError, InvalidImageError
from rollmesh.v1 import engine_pb2

Images = Sequence[engine_pb2.PromptImage]
MOST_IMAGES = 256
"""Images of one prompt, at most."""
_HASH_CHARS = 64
_HEX = frozenset("0123456789abcdef")
_NAMED = 16  # hashes in an error, whose size is bounded
_SENT = 16_384
_MESSAGE_BYTES = 32 * 1024 * 1024


class HeldBytes(ByteCache[str, bytes]):
    """The most recently used images by hash. Weights do not change them: they outlive a push."""

    def take(self, images: Images) -> dict[str, bytes]:
        """Returns the bytes of images by hash. Holds those that came, also if others are missing.

        Raises:
            ImageUnknownError: Bytes neither came nor are held. The error has their hashes.
        """
        found = {image.sha256: image.data for image in images if image.data}
        for image in images:
            if (held := self.find(image.sha256)) is not None:
                found.setdefault(image.sha256, held)
        for sha256, data in found.items():
            self.add(sha256, data, len(data))
        missing = list(dict.fromkeys(one.sha256 for one in images if one.sha256 not in found))
        if missing:
            raise ImageUnknownError.of(missing[:_NAMED], len(missing))
        return found


def check_places(images: Images, prompt_tokens: int, most: int = MOST_IMAGES) -> None:
    """Checks the hashes and the places of images, without their bytes.

    Raises:
        InvalidFieldError: There are too many, one has no place in the prompt, or its ids overlap
            the ids of the image before it.
    """
    if len(images) > most:
        raise InvalidFieldError("images", f"are {len(images)}; send at most {most}")
    end = 0
    for at, image in enumerate(images):
        if len(image.sha256) != _HASH_CHARS or not _HEX.issuperset(image.sha256):
            raise InvalidFieldError(
                f"images[{at}].sha256", "is not a SHA-256; give 64 lower-case hexadecimal digits"
            )
        if not image.length:
            raise InvalidFieldError(f"images[{at}].length", "is 0; give the number of its ids")
        if image.offset < end:
            raise InvalidFieldError(
                f"images[{at}].offset",
                f"is {image.offset}, and the image before it ends at {end}; "
                "give images in order, without overlap",
            )
        end = image.offset + image.length
        if end > prompt_tokens:
            raise InvalidFieldError(
                f"images[{at}].length", f"ends at {end}; the prompt has {prompt_tokens} ids"
            )


def check_hashes(images: Images) -> None:
    """Checks that bytes have the hashes of their images. Takes 1 ms per MB, so use a thread.

    Raises:
        InvalidImageError: Bytes of an image have another hash.
    """
    for at, image in enumerate(images):
        if image.data and hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise InvalidImageError(
                f"images[{at}].data", "has another SHA-256; send the image's own bytes"
            )


class SentImages:
    """The images that one engine was sent, and so need not be sent again unless it asks."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, None] = OrderedDict()  # the last used last

    def fill(self, images: Images, data: Mapping[str, bytes]) -> None:
        """Gives images the bytes that the engine lacks, as far as one message may hold them."""
        left = _MESSAGE_BYTES
        given: set[str] = set()
        for image in images:
            image.ClearField("data")
            if image.sha256 in self._sent or image.sha256 in given:
                continue
            file = data.get(image.sha256, b"")
            if file and (len(file) <= left or not given):
                image.data = file
                left -= len(file)
                given.add(image.sha256)
        for image in images:
            if image.sha256 in self._sent or image.sha256 in given:
                self._sent[image.sha256] = None
                self._sent.move_to_end(image.sha256)
        while len(self._sent) > _SENT:
            self._sent.popitem(last=False)

    def lost(self, error: ImageUnknownError, data: Mapping[str, bytes]) -> None:
        """Notes that the engine lacks images, so that `fill` gives them again.

        Raises:
            ImageUnknownError: The error, if none of their bytes are in `data`.
        """
        for sha256 in error.sha256s:
            self._sent.pop(sha256, None)
        if not any(sha256 in data for sha256 in error.sha256s):
            raise error
