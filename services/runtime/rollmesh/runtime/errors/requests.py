"""Errors of what a chat request or a generation asks for."""

from collections.abc import Sequence
from typing import Self

from rollmesh.runtime.errors.error import InvalidFieldError, RollmeshError


class PromptEmptyError(InvalidFieldError):
    """The prompt has no token ids."""

    reason = "PROMPT_EMPTY"


class PromptTooLongError(InvalidFieldError):
    """The prompt leaves no room for an answer in the model's context."""

    reason = "PROMPT_TOO_LONG"


class TokenOutOfVocabularyError(InvalidFieldError):
    """The prompt contains an id that the model does not have."""

    reason = "TOKEN_OUT_OF_VOCABULARY"


class InvalidSamplingError(InvalidFieldError):
    """A sampling parameter is out of range."""

    reason = "INVALID_SAMPLING"


class InvalidConstraintError(InvalidFieldError):
    """The constraint is malformed, too large, or not supported for this model."""

    reason = "INVALID_CONSTRAINT"


class InvalidMessagesError(InvalidFieldError):
    """The messages are not a conversation that the chat template can render."""

    reason = "INVALID_MESSAGES"


class ContextLengthExceededError(InvalidFieldError):
    """The conversation leaves no room for an answer in the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class IdempotencyKeyReusedError(InvalidFieldError):
    """The idempotency key was already used for another request."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class UnsupportedPartError(InvalidFieldError):
    """A message contains a part that is not served there, such as a document."""

    reason = "UNSUPPORTED_PART"


class InvalidImageError(InvalidFieldError):
    """An image is broken, too large, or not an image of a kind that is served."""

    reason = "INVALID_IMAGE"


class ImageUnknownError(RollmeshError):
    """The receiver does not hold the bytes of images."""

    code = "FAILED_PRECONDITION"
    reason = "IMAGE_UNKNOWN"

    @classmethod
    def of(cls, sha256s: Sequence[str], missing: int) -> Self:
        """Returns an error that names some of the images, and says how many there are."""
        return cls(
            f"images: the bytes of {missing} are not here; repeat the request with them",
            sha256=",".join(sha256s),
            missing=missing,
        )

    @property
    def sha256s(self) -> list[str]:
        """Hashes of images that are missing, at most 16 of them."""
        return [one for one in self.metadata.get("sha256", "").split(",") if one]


class ModelMismatchError(InvalidFieldError):
    """The request names a model that the engine or the gateway does not serve."""

    reason = "MODEL_MISMATCH"


class RequestIdInUseError(RollmeshError):
    """A generation with this id is already running."""

    code = "ALREADY_EXISTS"
    reason = "REQUEST_ID_IN_USE"
