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
    """A session gives its group a different size than earlier sessions did."""

    reason = "GROUP_SIZE_CONFLICT"


class UndecodableError(InvalidFieldError):
    """The bytes of a request are not a message of the called method."""

    reason = "UNDECODABLE"


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


class InvalidWeightsError(InvalidFieldError):
    """The new weights do not fit the model; the old ones stay in use."""

    reason = "INVALID_WEIGHTS"


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
    """A message contains a part that is not supported, such as an image."""

    reason = "UNSUPPORTED_PART"


class ModelMismatchError(InvalidFieldError):
    """The request names a model that the engine or the gateway does not serve."""

    reason = "MODEL_MISMATCH"


class InvalidLeaseError(InvalidFieldError):
    """A lease request names no model in a mesh of several, or reuses the id of a lease."""

    reason = "INVALID_LEASE"


class RepeatConflictError(RollmeshError):
    """A write was repeated with a different body; the first one was kept."""

    code = "ALREADY_EXISTS"
    reason = "REPEAT_CONFLICT"


class WrongServiceError(RollmeshError):
    """The server does not serve this method; another service of it does."""

    code = "UNIMPLEMENTED"
    reason = "WRONG_SERVICE"


class RequestIdInUseError(RollmeshError):
    """A generation with this id is already running."""

    code = "ALREADY_EXISTS"
    reason = "REQUEST_ID_IN_USE"


class ReplicaIdInUseError(RollmeshError):
    """Another member is registered under this id."""

    code = "ALREADY_EXISTS"
    reason = "REPLICA_ID_IN_USE"


class StaleVersionError(RollmeshError):
    """The policy version is not above the current one."""

    code = "FAILED_PRECONDITION"
    reason = "STALE_VERSION"


class SupersededError(RollmeshError):
    """A later push or stream replaced this one, or the engine left before it answered."""

    code = "ABORTED"
    reason = "SUPERSEDED"


class WeightTransferError(RollmeshError):
    """A transfer backend did not connect to the trainer or did not receive its weights."""

    code = "FAILED_PRECONDITION"
    reason = "WEIGHT_TRANSFER_FAILED"


class SessionUnknownError(RollmeshError):
    """No session has this id."""

    code = "NOT_FOUND"
    reason = "SESSION_UNKNOWN"


class SessionDamagedError(RollmeshError):
    """The stored data of a session cannot be read; other sessions are not affected."""

    code = "DATA_LOSS"
    reason = "SESSION_DAMAGED"


class SessionClosedError(RollmeshError):
    """The session is closed and accepts no more turns."""

    code = "FAILED_PRECONDITION"
    reason = "SESSION_CLOSED"


class SessionLimitError(RollmeshError):
    """The session has reached a limit; its contents are kept, and it can be closed."""

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
    """The engine's model process died."""

    code = "UNAVAILABLE"
    reason = "ENGINE_DEAD"


class EngineLostError(RollmeshError):
    """The engine went away in the middle of a turn; nothing was committed."""

    code = "UNAVAILABLE"
    reason = "ENGINE_LOST"


class EngineMismatchError(RollmeshError):
    """The engine's vocabulary or context length does not fit the gateway's model."""

    code = "INTERNAL"
    reason = "ENGINE_MISMATCH"


class EngineFaultError(RollmeshError):
    """The engine contradicted itself or its request; its answer was discarded."""

    code = "INTERNAL"
    reason = "ENGINE_FAULT"
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
        """Makes an error; an engine that is only stuck does not spoil its tokens."""
        super().__init__(message, retry_delay_ms=retry_delay_ms, **metadata)
        self.spoils_tokens = spoils_tokens


class GenerationAbortedError(RollmeshError):
    """An operator aborted the generation; nothing was committed."""

    code = "ABORTED"
    reason = "GENERATION_ABORTED"


class NoEngineError(RollmeshError):
    """No engine can serve the turn."""

    code = "UNAVAILABLE"
    reason = "NO_ENGINE"


class PrefixCacheInUseError(RollmeshError):
    """Running generations use the prefix cache, so it was not emptied."""

    code = "FAILED_PRECONDITION"
    reason = "PREFIX_CACHE_IN_USE"


class NoGatewayError(RollmeshError):
    """No gateway serves the session, or takes a new one."""

    code = "UNAVAILABLE"
    reason = "NO_GATEWAY"


class NoCollectorError(RollmeshError):
    """No collector is registered with the router."""

    code = "UNAVAILABLE"
    reason = "NO_COLLECTOR"


class NoSidecarError(RollmeshError):
    """No sidecar is registered with the router."""

    code = "UNAVAILABLE"
    reason = "NO_SIDECAR"


class EnginesBusyError(RollmeshError):
    """All leases of every engine are taken."""

    code = "RESOURCE_EXHAUSTED"
    reason = "ENGINES_BUSY"


class TooManySessionsError(RollmeshError):
    """The gateway has its maximum number of open sessions."""

    code = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_SESSIONS"


class OverloadedError(RollmeshError):
    """The service holds as many bytes of requests as it may; nothing of this one was kept."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class StoreFullError(RollmeshError):
    """The store is full until deliveries are acknowledged, or its disk is full."""

    code = "RESOURCE_EXHAUSTED"
    reason = "STORE_FULL"


class StoreError(RollmeshError):
    """The store failed; nothing of the request was stored."""

    reason = "STORE_FAILED"


class StoreLostError(StoreError):
    """The store's files were removed or replaced while open; nothing more is stored."""

    reason = "STORE_LOST"


class StoreInUseError(StoreError):
    """Another running process has the store open."""

    code = "FAILED_PRECONDITION"
    reason = "STORE_IN_USE"


class StartingError(RollmeshError):
    """The service is still reading its store."""

    code = "UNAVAILABLE"
    reason = "STARTING"


class StoreAwayError(RollmeshError):
    """The store's server cannot be reached; nothing of the request was stored."""

    code = "UNAVAILABLE"
    reason = "STORE_AWAY"


class StoreInDoubtError(StoreAwayError):
    """The store's server was lost in a commit; whether the request was stored is unknown."""

    reason = "STORE_IN_DOUBT"


class JournalMovedError(RollmeshError):
    """Another gateway serves the session's journal; nothing of the request was stored."""

    code = "UNAVAILABLE"
    reason = "JOURNAL_MOVED"


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
    """The service is shutting down and accepts no new work."""

    code = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"


class DeadlineError(RollmeshError):
    """The deadline passed before there was an answer."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class RemoteError(RollmeshError):
    """A status without a rollmesh reason, from the transport or a foreign server."""

    reason = "REMOTE"

    def __init__(self, message: str, code: str) -> None:
        """Keeps the name of the foreign status code as `code`."""
        super().__init__(message, status_code=code)
        self.code = code
