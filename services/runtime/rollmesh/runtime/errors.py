"""Typed errors: classes with a gRPC code and a reason.

The message of an error names the field, the problem and the remedy. `rpc.statuses` has its form on
the wire, and errors.proto the meaning and the remedy of each reason. This module imports nothing
else of `rollmesh`.
"""

from collections.abc import Sequence
from typing import Self

# The base of all errors, and the error that names a field.


class RollmeshError(Exception):
    """Base of all errors that cross a service boundary."""

    code: str = "INTERNAL"
    """Name of the gRPC status code."""
    reason: str = "INTERNAL"
    """Identifies the error for programs."""

    def __init_subclass__(cls, code: str = "", reason: str = "") -> None:
        super().__init_subclass__()
        if code:
            cls.code = code
        if reason:
            cls.reason = reason

    def __init__(
        self, message: str, *, retry_delay_ms: int | None = None, **metadata: str | int
    ) -> None:
        """Makes an error.

        Args:
            message: For people: the field, the problem, the remedy.
            retry_delay_ms: When trying again makes sense, milliseconds from now.
            **metadata: The variable parts of the message, for programs.
        """
        super().__init__(message)
        self.message = message
        self.retry_delay_ms = retry_delay_ms
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidFieldError(RollmeshError, code="INVALID_ARGUMENT", reason="INVALID_FIELD"):
    """A field of a request is missing, out of range, or of the wrong form."""

    def __init__(self, field: str, problem: str, **metadata: str | int) -> None:
        """Makes an error that names `field`, the problem and the remedy."""
        super().__init__(f"{field}: {problem}", retry_delay_ms=None, field=field)
        self.metadata |= {key: str(value) for key, value in metadata.items()}
        self.field = field


_MAX_ID_CHARS = 128


def check_name(field: str, name: str) -> str:
    """Returns the name after checking that it has 1 to 128 characters.

    Raises:
        InvalidFieldError: The name is empty or longer.
    """
    if not 0 < len(name) <= _MAX_ID_CHARS:
        raise InvalidFieldError(field, f"give 1 to {_MAX_ID_CHARS} characters")
    return name


class RemoteError(RollmeshError, reason="REMOTE"):
    """A status without a rollmesh reason, from the transport or a foreign server."""

    def __init__(self, message: str, code: str) -> None:
        """Keeps the name of the foreign status code as `code`."""
        super().__init__(message, status_code=code)
        self.code = code


# Errors of any call.


class UndecodableError(InvalidFieldError, reason="UNDECODABLE"):
    """The bytes of a request are not a message of the called method."""


class RepeatConflictError(RollmeshError, code="ALREADY_EXISTS", reason="REPEAT_CONFLICT"):
    """A write was repeated with a different body, and the first one was kept."""


class CallerUnknownError(RollmeshError, code="UNAUTHENTICATED", reason="CALLER_UNKNOWN"):
    """The caller showed no token or certificate that this server accepts."""


class RoleRefusedError(RollmeshError, code="PERMISSION_DENIED", reason="ROLE_REFUSED"):
    """The caller's role may not call this method."""


class OverloadedError(RollmeshError, code="RESOURCE_EXHAUSTED", reason="OVERLOADED"):
    """The service is at its limit and kept nothing of the request."""


class StartingError(RollmeshError, code="UNAVAILABLE", reason="STARTING"):
    """The service is still reading its store."""


class ShuttingDownError(RollmeshError, code="UNAVAILABLE", reason="SHUTTING_DOWN"):
    """The service is shutting down and accepts no new work."""


class DeadlineError(RollmeshError, code="DEADLINE_EXCEEDED", reason="DEADLINE"):
    """The deadline passed before there was an answer."""


# Errors of consumers and scorers.


class ConsumerExistsError(RollmeshError, code="ALREADY_EXISTS", reason="CONSUMER_EXISTS"):
    """A consumer has this name."""


class ConsumerUnknownError(RollmeshError, code="NOT_FOUND", reason="CONSUMER_UNKNOWN"):
    """No consumer has this name."""


class CheckpointUnknownError(RollmeshError, code="NOT_FOUND", reason="CHECKPOINT_UNKNOWN"):
    """The consumer has no such checkpoint: it was released, or it is another consumer's."""


class TooManyCheckpointsError(
    RollmeshError, code="RESOURCE_EXHAUSTED", reason="TOO_MANY_CHECKPOINTS"
):
    """The consumer has its maximum number of checkpoints."""


class ConsumerMovedError(RollmeshError, code="UNAVAILABLE", reason="CONSUMER_MOVED"):
    """The consumer was moved or got another group policy, so its streams must be reopened."""


class ScorerFailedError(RollmeshError, reason="SCORER_FAILED"):
    """The scorer's function raised or took too long, or its process died."""


class ScorerBusyError(RollmeshError, code="RESOURCE_EXHAUSTED", reason="SCORER_BUSY"):
    """Too many sessions wait for the scorer already."""


# Errors of engines: their leases, their generations and their weights.


class InvalidLeaseError(InvalidFieldError, reason="INVALID_LEASE"):
    """A lease request names no model in a mesh of several, or reuses the id of a lease."""


class NoEngineError(RollmeshError, code="UNAVAILABLE", reason="NO_ENGINE"):
    """No engine can serve the turn."""


class EnginesBusyError(RollmeshError, code="RESOURCE_EXHAUSTED", reason="ENGINES_BUSY"):
    """All leases of every engine are taken, or engines refuse until the limit of the turn."""


class EngineStartError(RollmeshError, code="FAILED_PRECONDITION", reason="ENGINE_START_FAILED"):
    """The model could not be loaded."""


class EngineAsleepError(RollmeshError, code="FAILED_PRECONDITION", reason="ENGINE_ASLEEP"):
    """The engine sleeps and takes no weights."""


class EngineDeadError(RollmeshError, code="UNAVAILABLE", reason="ENGINE_DEAD"):
    """The engine's model process died."""


class EngineLostError(RollmeshError, code="UNAVAILABLE", reason="ENGINE_LOST"):
    """The engine went away in the middle of a turn, and nothing was committed."""


class EngineMismatchError(RollmeshError, reason="ENGINE_MISMATCH"):
    """The engine's vocabulary or context length does not fit the gateway's model."""


class EngineFaultError(RollmeshError, reason="ENGINE_FAULT"):
    """The engine contradicted itself or its request, and its answer was discarded."""

    spoils_tokens = True
    """Whether the tokens that it sampled before cannot be trusted either."""

    def __init__(
        self,
        message: str,
        *,
        spoils_tokens: bool = True,
        retry_delay_ms: int | None = None,
        **metadata: str | int,
    ) -> None:
        """Makes an error. An engine that is only stuck does not spoil its tokens."""
        super().__init__(message, retry_delay_ms=retry_delay_ms, **metadata)
        self.spoils_tokens = spoils_tokens


class GenerationAbortedError(RollmeshError, code="ABORTED", reason="GENERATION_ABORTED"):
    """An operator aborted the generation, and nothing was committed."""


class WeightsDroppedError(RollmeshError, code="UNAVAILABLE", reason="WEIGHTS_DROPPED"):
    """A sleep dropped the engine's weights, and none were pushed since."""


class AdapterUnknownError(RollmeshError, code="FAILED_PRECONDITION", reason="ADAPTER_UNKNOWN"):
    """The engine has not loaded an adapter revision, or the router does not retain it."""


class PrefixCacheInUseError(
    RollmeshError, code="FAILED_PRECONDITION", reason="PREFIX_CACHE_IN_USE"
):
    """Running generations use the prefix cache, so it was not emptied."""


class InvalidWeightsError(InvalidFieldError, reason="INVALID_WEIGHTS"):
    """The new weights do not fit the model, and the old ones stay in use."""


class StaleVersionError(RollmeshError, code="FAILED_PRECONDITION", reason="STALE_VERSION"):
    """The policy version is not above the current one."""


class RunAbandonedError(RollmeshError, code="FAILED_PRECONDITION", reason="RUN_ABANDONED"):
    """A later run of the trainer's policy was opened, so this run's weights are refused."""


class WeightsPinnedError(RollmeshError, code="FAILED_PRECONDITION", reason="WEIGHTS_PINNED"):
    """An evaluation pins the weights for longer than the push may wait."""


class VersionGoneError(RollmeshError, code="FAILED_PRECONDITION", reason="VERSION_GONE"):
    """The engines hold another policy version, or another one is being pushed."""


class SupersededError(RollmeshError, code="ABORTED", reason="SUPERSEDED"):
    """A later push, stream or control call replaced this, or the engine left before it answered."""


class WeightTransferError(
    RollmeshError, code="FAILED_PRECONDITION", reason="WEIGHT_TRANSFER_FAILED"
):
    """A transfer backend did not connect to the trainer or did not receive its weights."""


class WeightsBaseError(RollmeshError, code="FAILED_PRECONDITION", reason="WEIGHTS_BASE_DIFFERS"):
    """The weights that a difference changes are not there, or a checksum is another one."""


# Errors of the membership.


class ReplicaIdInUseError(RollmeshError, code="ALREADY_EXISTS", reason="REPLICA_ID_IN_USE"):
    """Another member is registered under this id."""


class NoGatewayError(RollmeshError, code="UNAVAILABLE", reason="NO_GATEWAY"):
    """No gateway serves the session, or takes a new one."""


class NoCollectorError(RollmeshError, code="UNAVAILABLE", reason="NO_COLLECTOR"):
    """No collector is registered with the router."""


class NoSidecarError(RollmeshError, code="UNAVAILABLE", reason="NO_SIDECAR"):
    """No sidecar is registered with the router, or none has a tunnel to the relay."""


# Errors of chat requests and generations.


class PromptEmptyError(InvalidFieldError, reason="PROMPT_EMPTY"):
    """The prompt has no token ids."""


class PromptTooLongError(InvalidFieldError, reason="PROMPT_TOO_LONG"):
    """The prompt leaves no room for an answer in the model's context."""


class TokenOutOfVocabularyError(InvalidFieldError, reason="TOKEN_OUT_OF_VOCABULARY"):
    """The prompt contains an id that the model does not have."""


class InvalidSamplingError(InvalidFieldError, reason="INVALID_SAMPLING"):
    """A sampling parameter is out of range."""


class InvalidConstraintError(InvalidFieldError, reason="INVALID_CONSTRAINT"):
    """The constraint is malformed, over a limit, or not supported for this model."""


class InvalidMessagesError(InvalidFieldError, reason="INVALID_MESSAGES"):
    """The messages are not a conversation that the chat template can render."""


class ContextLengthExceededError(InvalidFieldError, reason="CONTEXT_LENGTH_EXCEEDED"):
    """The conversation leaves no room for an answer in the model's context."""


class IdempotencyKeyReusedError(InvalidFieldError, reason="IDEMPOTENCY_KEY_REUSED"):
    """The idempotency key was already used for another request."""


class UnsupportedPartError(InvalidFieldError, reason="UNSUPPORTED_PART"):
    """A message contains a part that is not served there, such as a document."""


class InvalidImageError(InvalidFieldError, reason="INVALID_IMAGE"):
    """An image is broken, over a limit, or of a kind that is not served."""


class ImageUnknownError(RollmeshError, code="FAILED_PRECONDITION", reason="IMAGE_UNKNOWN"):
    """The receiver does not hold the bytes of images."""

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


class ModelMismatchError(InvalidFieldError, reason="MODEL_MISMATCH"):
    """The request names a model that the engine or the gateway does not serve."""


class VocabularyMismatchError(InvalidFieldError, reason="VOCABULARY_MISMATCH"):
    """A teacher has another tokenizer than the model whose tokens it is to score."""


class RequestIdInUseError(RollmeshError, code="ALREADY_EXISTS", reason="REQUEST_ID_IN_USE"):
    """A generation with this id is already running."""


class PoisonRequestError(RollmeshError, code="INVALID_ARGUMENT", reason="POISON_REQUEST"):
    """Several engines died or fell silent before the request's first token."""


# Errors of sessions and their answers.


class GroupSizeError(InvalidFieldError, reason="GROUP_SIZE_CONFLICT"):
    """A session gives its group a different size than earlier sessions did."""


class SessionUnknownError(RollmeshError, code="NOT_FOUND", reason="SESSION_UNKNOWN"):
    """No session has this id."""


class AnswerUnknownError(RollmeshError, code="NOT_FOUND", reason="ANSWER_UNKNOWN"):
    """The session has no answer with this id, or it was withdrawn."""


class SessionDamagedError(RollmeshError, code="DATA_LOSS", reason="SESSION_DAMAGED"):
    """The stored data of a session cannot be read. Other sessions are not affected."""


class SessionClosedError(RollmeshError, code="FAILED_PRECONDITION", reason="SESSION_CLOSED"):
    """The session is closed and accepts no more turns."""


class SessionLimitError(RollmeshError, code="OUT_OF_RANGE", reason="SESSION_LIMIT"):
    """The session has reached a limit. Its contents are kept, and it can be closed."""


class BudgetSpentError(RollmeshError, code="OUT_OF_RANGE", reason="BUDGET_SPENT"):
    """A budget of the session leaves no room for the request."""


class SessionKeyWrongError(RollmeshError, code="UNAUTHENTICATED", reason="SESSION_KEY_WRONG"):
    """The key does not open this session."""


class TooManySessionsError(RollmeshError, code="RESOURCE_EXHAUSTED", reason="TOO_MANY_SESSIONS"):
    """The gateway has its maximum number of open sessions."""


# Errors of journals and stores.


class StoreFullError(RollmeshError, code="RESOURCE_EXHAUSTED", reason="STORE_FULL"):
    """The store is full until deliveries are acknowledged, or its disk is full."""


class StoreError(RollmeshError, reason="STORE_FAILED"):
    """The store failed, and nothing of the request was stored."""


class StoreLostError(StoreError, reason="STORE_LOST"):
    """The store's files were removed or replaced while open, so nothing more is stored."""


class StoreInUseError(StoreError, code="FAILED_PRECONDITION", reason="STORE_IN_USE"):
    """Another running process has the store open."""


class StoreAwayError(RollmeshError, code="UNAVAILABLE", reason="STORE_AWAY"):
    """The store's server cannot be reached, and nothing of the request was stored."""


class StoreInDoubtError(StoreAwayError, reason="STORE_IN_DOUBT"):
    """The store's server was lost in a commit, so the request may or may not be stored."""


class JournalMovedError(RollmeshError, code="UNAVAILABLE", reason="JOURNAL_MOVED"):
    """Another gateway serves the session's journal, and nothing of the request was stored."""


def _by_reason(root: type[RollmeshError]) -> dict[str, type[RollmeshError]]:
    found = {root.reason: root}
    for child in root.__subclasses__():
        found |= _by_reason(child)
    return found


BY_REASON = _by_reason(RollmeshError)
"""The classes of this module, by reason."""
