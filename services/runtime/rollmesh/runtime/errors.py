"""Typed errors, and the one table each way between them and gRPC status.

An error is a class with a gRPC code and a reason; its message names the field, what is wrong with
it and what to do. On the wire it is a status with one `google.rpc.ErrorInfo` (domain `rollmesh`)
and, where a delay is known, one `google.rpc.RetryInfo`.
"""

import contextlib
from typing import ClassVar, TypeVar

import grpc
from google.protobuf import duration_pb2, message as protobuf_message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "rollmesh"
_DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1500
"""Of a message, and of the metadata together: peers drop trailers above 8 KiB."""


class RollmeshError(Exception):
    """Base of all errors that cross a service boundary."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

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

    code = grpc.StatusCode.INVALID_ARGUMENT
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


class RequestIdInUseError(RollmeshError):
    """A request with this id is running."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_IN_USE"


class ReplicaIdInUseError(RollmeshError):
    """A member with this id is registered."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REPLICA_ID_IN_USE"


class StaleVersionError(RollmeshError):
    """A weight update is not newer than the weights in use."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_VERSION"


class WeightTransferError(RollmeshError):
    """A transfer backend did not join the trainer or take its weights; the old ones stay."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WEIGHT_TRANSFER_FAILED"


class SessionUnknownError(RollmeshError):
    """No session has this id."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "SESSION_UNKNOWN"


class SessionDamagedError(RollmeshError):
    """What is stored of a session cannot be read; everything else can."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "SESSION_DAMAGED"


class SessionClosedError(RollmeshError):
    """The session is closed and takes no more turns."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SESSION_CLOSED"


class SessionLimitError(RollmeshError):
    """The session holds as much as it may; what it holds is kept, and it can be closed."""

    code = grpc.StatusCode.OUT_OF_RANGE
    reason = "SESSION_LIMIT"


class SessionKeyWrongError(RollmeshError):
    """The key does not open this session."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "SESSION_KEY_WRONG"


class EngineStartError(RollmeshError):
    """The model could not be loaded."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ENGINE_START_FAILED"


class EngineDeadError(RollmeshError):
    """The model's process died under the engine."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ENGINE_DEAD"


class EngineLostError(RollmeshError):
    """The engine went away in the middle of a turn; nothing was committed."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ENGINE_LOST"


class EngineMismatchError(RollmeshError):
    """The engine has another vocabulary or a shorter context than the gateway was given."""

    code = grpc.StatusCode.INTERNAL
    reason = "ENGINE_MISMATCH"


class EngineFaultError(RollmeshError):
    """An engine contradicts itself or what was asked of it; nothing that it said was kept."""

    code = grpc.StatusCode.INTERNAL
    reason = "ENGINE_FAULT"


class GenerationAbortedError(RollmeshError):
    """The generation was aborted by an operator; nothing was committed."""

    code = grpc.StatusCode.ABORTED
    reason = "GENERATION_ABORTED"


class NoEngineError(RollmeshError):
    """No engine can serve the turn."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_ENGINE"


class EnginesBusyError(RollmeshError):
    """Every engine holds as many leases as it may."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "ENGINES_BUSY"


class TooManySessionsError(RollmeshError):
    """The gateway holds as many open sessions as it may."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_SESSIONS"


class StoreFullError(RollmeshError):
    """The store takes nothing more until something is acknowledged."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "STORE_FULL"


class StoreError(RollmeshError):
    """The store failed; nothing of the request was kept."""

    reason = "STORE_FAILED"


class StoreLostError(StoreError):
    """The store's files were removed or replaced while it was open; nothing more is kept."""

    reason = "STORE_LOST"


class StoreInUseError(StoreError):
    """Another process that lives has the store open."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STORE_IN_USE"


class StartingError(RollmeshError):
    """The service listens and cannot answer yet: it is reading its store."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STARTING"


class StoreAwayError(RollmeshError):
    """The store's server cannot be reached; nothing of the request was kept."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STORE_AWAY"


class ConsumerUnknownError(RollmeshError):
    """No consumer has this name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "CONSUMER_UNKNOWN"


class ConsumerMovedError(RollmeshError):
    """The consumer was moved or dropped; its streams begin anew."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "CONSUMER_MOVED"


class ShuttingDownError(RollmeshError):
    """The service takes nothing new because it is about to stop."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class DeadlineError(RollmeshError):
    """The deadline passed before there was an answer."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class RemoteError(RollmeshError):
    """A status that carries no reason of rollmesh: the transport's, or a foreign server's."""

    reason = "REMOTE"

    def __init__(self, message: str, status_code: grpc.StatusCode) -> None:
        """Keeps the foreign status code as `status_code`."""
        super().__init__(message, status_code=status_code.name)
        self.status_code = status_code


def _all_classes(root: type[RollmeshError]) -> dict[str, type[RollmeshError]]:
    found = {root.reason: root}
    for child in root.__subclasses__():
        found |= _all_classes(child)
    return found


_CLASSES = _all_classes(RollmeshError)


def status_code_of(error: RollmeshError) -> grpc.StatusCode:
    """Returns the code that a client sees."""
    return error.status_code if isinstance(error, RemoteError) else error.code


def cut_text(text: str, most_bytes: int) -> str:
    """Returns the beginning of a text: at most so many bytes of UTF-8; surrogates become `?`."""
    return text[:most_bytes].encode(errors="replace")[:most_bytes].decode(errors="ignore")


def to_status(error: RollmeshError) -> status_pb2.Status:
    """Returns the wire form of an error."""
    status = status_pb2.Status(
        code=code_pb2.Code.Value(status_code_of(error).name),
        message=cut_text(error.message, MAX_MESSAGE_BYTES),
    )
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    left = MAX_MESSAGE_BYTES
    for key, value in error.metadata.items():
        text = info.metadata[key] = cut_text(value, max(left, 0))
        left -= len(key) + len(text.encode())
    status.details.add().Pack(info)
    if error.retry_delay_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_delay_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


_Detail = TypeVar("_Detail", error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)


def _detail(status: status_pb2.Status, empty: _Detail) -> _Detail | None:
    for packed in status.details:
        with contextlib.suppress(protobuf_message.DecodeError):  # a detail that is none
            if packed.Unpack(empty):
                return empty
    return None


def from_rpc_error(error: grpc.RpcError) -> RollmeshError:
    """Returns the typed error behind a failed call; `RemoteError` where the peer gave no reason."""
    if not isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):
        return RemoteError(str(error), grpc.StatusCode.UNKNOWN)
    code, message = error.code(), error.details() or ""
    status = _status_of(error)
    info = _detail(status, error_details_pb2.ErrorInfo()) if status else None
    if status is None or info is None or info.domain != DOMAIN:
        return RemoteError(message, code or grpc.StatusCode.UNKNOWN)
    retry = _detail(status, error_details_pb2.RetryInfo())
    found = _CLASSES.get(info.reason, RollmeshError)
    result = found.__new__(found)
    RollmeshError.__init__(
        result,
        status.message,
        retry_delay_ms=retry.retry_delay.ToMilliseconds() if retry else None,
    )
    result.metadata = dict(info.metadata)
    if found is RollmeshError:
        result.reason = info.reason  # type: ignore[misc]
    if isinstance(result, InvalidFieldError):
        result.field = info.metadata.get("field", "")
    if isinstance(result, RemoteError):
        result.status_code = code or grpc.StatusCode.UNKNOWN
    return result


def _status_of(error: grpc.aio.AioRpcError | grpc.Call) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except protobuf_message.DecodeError:
                return None
    return None
