"""Typed errors: classes with a gRPC code and a reason.

The message of an error names the field, what is wrong with it and what to do. `statuses` has its
form on the wire.
"""


class RollmeshError(Exception):
    """Base of all errors that cross a service boundary."""

    code: str = "INTERNAL"
    """Name of the gRPC status code."""
    reason: str = "INTERNAL"
    """What programs tell errors by."""

    def __init__(
        self, message: str, *, retry_delay_ms: int | None = None, **metadata: str | int
    ) -> None:
        """Makes an error.

        Args:
            message: For people: the field, what is wrong, what to do.
            retry_delay_ms: When trying again makes sense, milliseconds from now.
            **metadata: The variable parts of the message, for programs.
        """
        super().__init__(message)
        self.message = message
        self.retry_delay_ms = retry_delay_ms
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidFieldError(RollmeshError):
    """A field of a request is missing, out of range, or of the wrong form."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str, **metadata: str | int) -> None:
        """Makes an error that names `field` and says what is wrong and what to do."""
        super().__init__(f"{field}: {problem}", retry_delay_ms=None, field=field)
        self.metadata |= {key: str(value) for key, value in metadata.items()}
        self.field = field


class GroupSizeError(InvalidFieldError):
    """A session announces its group with another size than the sessions that are stored."""

    reason = "GROUP_SIZE_CONFLICT"


class UndecodableError(InvalidFieldError):
    """A request is no message of the method that it was sent to."""

    reason = "UNDECODABLE"


class PromptEmptyError(InvalidFieldError):
    """A prompt has no ids."""

    reason = "PROMPT_EMPTY"


class PromptTooLongError(InvalidFieldError):
    """A prompt leaves no room in the model's context."""

    reason = "PROMPT_TOO_LONG"


class TokenOutOfVocabularyError(InvalidFieldError):
    """A prompt holds an id the model does not have."""

    reason = "TOKEN_OUT_OF_VOCABULARY"


class InvalidSamplingError(InvalidFieldError):
    """A sampling parameter is out of range."""

    reason = "INVALID_SAMPLING"


class InvalidConstraintError(InvalidFieldError):
    """A constraint cannot be enforced: it is malformed, too large, or the model's files lack it."""

    reason = "INVALID_CONSTRAINT"


class InvalidWeightsError(InvalidFieldError):
    """New weights do not fit the model; the old ones stay."""

    reason = "INVALID_WEIGHTS"


class InvalidMessagesError(InvalidFieldError):
    """The messages of a chat request are not a conversation."""

    reason = "INVALID_MESSAGES"


class ContextLengthExceededError(InvalidFieldError):
    """A conversation leaves no room in the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class IdempotencyKeyReusedError(InvalidFieldError):
    """The idempotency key names the sample of another request."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class UnsupportedPartError(InvalidFieldError):
    """A message holds a part that is not served, such as an image."""

    reason = "UNSUPPORTED_PART"


class ModelMismatchError(InvalidFieldError):
    """A request names another model than the engine serves."""

    reason = "MODEL_MISMATCH"


class InvalidLeaseError(InvalidFieldError):
    """A booking names no model in a mesh of several, or reuses the id of a lease."""

    reason = "INVALID_LEASE"


class RepeatConflictError(RollmeshError):
    """A write was repeated with another body; what the first one did stands."""

    code = "ALREADY_EXISTS"
    reason = "REPEAT_CONFLICT"


class RequestIdInUseError(RollmeshError):
    """A request with this id is running."""

    code = "ALREADY_EXISTS"
    reason = "REQUEST_ID_IN_USE"


class ReplicaIdInUseError(RollmeshError):
    """A member with this id is registered."""

    code = "ALREADY_EXISTS"
    reason = "REPLICA_ID_IN_USE"


class StaleVersionError(RollmeshError):
    """A weight update is not newer than the weights in use."""

    code = "FAILED_PRECONDITION"
    reason = "STALE_VERSION"


class SupersededError(RollmeshError):
    """A later push, or the end of the engine, came before the engine answered this one."""

    code = "ABORTED"
    reason = "SUPERSEDED"


class WeightTransferError(RollmeshError):
    """A transfer backend did not join the trainer or take its weights; the old ones stay."""

    code = "FAILED_PRECONDITION"
    reason = "WEIGHT_TRANSFER_FAILED"


class SessionUnknownError(RollmeshError):
    """No session has this id."""

    code = "NOT_FOUND"
    reason = "SESSION_UNKNOWN"


class SessionDamagedError(RollmeshError):
    """What is stored of a session cannot be read; everything else can."""

    code = "DATA_LOSS"
    reason = "SESSION_DAMAGED"


class SessionClosedError(RollmeshError):
    """The session is closed and takes no more turns."""

    code = "FAILED_PRECONDITION"
    reason = "SESSION_CLOSED"


class SessionLimitError(RollmeshError):
    """The session holds as much as it may; what it holds is kept, and it can be closed."""

    code = "OUT_OF_RANGE"
    reason = "SESSION_LIMIT"


class SessionKeyWrongError(RollmeshError):
    """The key does not open this session."""

    code = "UNAUTHENTICATED"
    reason = "SESSION_KEY_WRONG"


class EngineStartError(RollmeshError):
    """The model could not be loaded."""

    code = "FAILED_PRECONDITION"
    reason = "ENGINE_START_FAILED"


class EngineDeadError(RollmeshError):
    """The model's process died under the engine."""

    code = "UNAVAILABLE"
    reason = "ENGINE_DEAD"


class EngineLostError(RollmeshError):
    """The engine went away in the middle of a turn; nothing was committed."""

    code = "UNAVAILABLE"
    reason = "ENGINE_LOST"


class EngineMismatchError(RollmeshError):
    """The engine has another vocabulary or a shorter context than the gateway was given."""

    code = "INTERNAL"
    reason = "ENGINE_MISMATCH"


class EngineFaultError(RollmeshError):
    """An engine contradicts itself or what was asked of it; nothing that it said was kept."""

    code = "INTERNAL"
    reason = "ENGINE_FAULT"


class GenerationAbortedError(RollmeshError):
    """The generation was aborted by an operator; nothing was committed."""

    code = "ABORTED"
    reason = "GENERATION_ABORTED"


class NoEngineError(RollmeshError):
    """No engine can serve the turn."""

    code = "UNAVAILABLE"
    reason = "NO_ENGINE"


class EnginesBusyError(RollmeshError):
    """Every engine holds as many leases as it may."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ENGINES_BUSY"


class TooManySessionsError(RollmeshError):
    """The gateway holds as many open sessions as it may."""

    code = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_SESSIONS"


class OverloadedError(RollmeshError):
    """The service holds as many bytes of requests as it may; nothing of this one was kept."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class StoreFullError(RollmeshError):
    """The store takes nothing more until something is acknowledged."""

    code = "RESOURCE_EXHAUSTED"
    reason = "STORE_FULL"


class StoreError(RollmeshError):
    """The store failed; nothing of the request was kept."""

    reason = "STORE_FAILED"


class StoreLostError(StoreError):
    """The store's files were removed or replaced while it was open; nothing more is kept."""

    reason = "STORE_LOST"


class StoreInUseError(StoreError):
    """Another process that lives has the store open."""

    code = "FAILED_PRECONDITION"
    reason = "STORE_IN_USE"


class StartingError(RollmeshError):
    """The service listens and cannot answer yet: it is reading its store."""

    code = "UNAVAILABLE"
    reason = "STARTING"


class StoreAwayError(RollmeshError):
    """The store's server cannot be reached; nothing of the request was kept."""

    code = "UNAVAILABLE"
    reason = "STORE_AWAY"


class ScorerFailedError(RollmeshError):
    """The scorer's function raised or took too long, or its process died."""

    reason = "SCORER_FAILED"


class ScorerBusyError(RollmeshError):
    """Too many sessions wait for the scorer already."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SCORER_BUSY"


class ConsumerExistsError(RollmeshError):
    """A consumer has this name."""

    code = "ALREADY_EXISTS"
    reason = "CONSUMER_EXISTS"


class ConsumerUnknownError(RollmeshError):
    """No consumer has this name."""

    code = "NOT_FOUND"
    reason = "CONSUMER_UNKNOWN"


class ConsumerMovedError(RollmeshError):
    """The consumer was moved or got another group policy; its streams must be reopened."""

    code = "UNAVAILABLE"
    reason = "CONSUMER_MOVED"


class ShuttingDownError(RollmeshError):
    """The service takes nothing new because it is about to stop."""

    code = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"


class DeadlineError(RollmeshError):
    """The deadline passed before there was an answer."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class RemoteError(RollmeshError):
    """A status that carries no reason of rollmesh: the transport's, or a foreign server's."""

    reason = "REMOTE"

    def __init__(self, message: str, code: str) -> None:
        """Keeps the name of the foreign status code as `code`."""
        super().__init__(message, status_code=code)
        self.code = code
