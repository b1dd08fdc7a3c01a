"""Converts typed errors to gRPC statuses and back.

On the wire an error is a status with one `google.rpc.ErrorInfo` (domain `rollmesh`), one
`rollmesh.v1.ErrorDetails` with the same facts as typed fields, and one `google.rpc.RetryInfo` if
a retry delay is known.
"""

import contextlib
from typing import TypeVar

import grpc
from google.protobuf import duration_pb2, message as protobuf_message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from rollmesh.runtime.errors import BY_REASON, InvalidFieldError, RemoteError, RollmeshError
from rollmesh.v1 import errors_pb2

DOMAIN = "rollmesh"
_PREFIX = "ERROR_REASON_"
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1500
"""Limit for a message, and for all metadata together: peers drop trailers above 8 KiB."""


def status_code_of(error: RollmeshError) -> grpc.StatusCode:
    """Returns the code that a client sees."""
    return grpc.StatusCode[error.code]


def cut_text(text: str, most_bytes: int) -> str:
    """Truncates a text to at most `most_bytes` of UTF-8. Surrogates become `?`."""
    return text[:most_bytes].encode(errors="replace")[:most_bytes].decode(errors="ignore")


def to_status(error: RollmeshError) -> status_pb2.Status:
    """Returns the wire form of an error."""
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.code),
        message=cut_text(error.message, MAX_MESSAGE_BYTES),
    )
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    left = MAX_MESSAGE_BYTES
    for key, value in error.metadata.items():
        text = info.metadata[key] = cut_text(value, max(left, 0))
        left -= len(key) + len(text.encode())
    status.details.add().Pack(info)
    details = errors_pb2.ErrorDetails(
        reason=reason_of(error.reason),
        field=info.metadata.get("field", ""),
        session_id=info.metadata.get("session_id", ""),
        trajectory_id=info.metadata.get("trajectory_id", ""),
    )
    for name in ("node_id", "policy_version"):
        with contextlib.suppress(KeyError, ValueError):
            setattr(details, name, int(info.metadata[name]))
    status.details.add().Pack(details)
    if error.retry_delay_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_delay_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def reason_of(name: str) -> errors_pb2.ErrorReason.ValueType:
    """Returns the number of a reason, or UNSPECIFIED if the contract does not define it."""
    value = errors_pb2.ErrorReason.DESCRIPTOR.values_by_name.get(f"{_PREFIX}{name}")
    return errors_pb2.ErrorReason.ValueType(value.number if value is not None else 0)


_Detail = TypeVar("_Detail", error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)


def _detail(status: status_pb2.Status, empty: _Detail) -> _Detail | None:
    for packed in status.details:
        with contextlib.suppress(protobuf_message.DecodeError):  # a malformed detail
            if packed.Unpack(empty):
                return empty
    return None


_LOST = {
    "INTERNAL": "Internal error from Core",  # the connection was lost to a write
    "UNKNOWN": "Stream removed",  # or under an open stream
    "CANCELLED": "CANCELLED",  # or the call reached a server that stops
}
"""How the details of a call begin that gRPC ended itself, by its code. The peer gave no status."""


def from_rpc_error(error: grpc.RpcError) -> RollmeshError:
    """Returns the typed error of a failed call, or `RemoteError` if the peer gave no reason."""
    if not isinstance(error, (grpc.aio.AioRpcError, grpc.Call)):
        return RemoteError(str(error), "UNKNOWN")
    code = (error.code() or grpc.StatusCode.UNKNOWN).name
    status = None
    with contextlib.suppress(protobuf_message.DecodeError):
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS_KEY and isinstance(value, bytes):
                status = status_pb2.Status.FromString(value)
                break
    if status is None:
        details = error.details() or ""
        if code in _LOST and details.startswith(_LOST[code]):
            return RemoteError("the connection was lost during the call", "UNAVAILABLE")
        return RemoteError(details, code)
    status.message = status.message or error.details() or ""
    return from_status(status, code)


def from_status(status: status_pb2.Status, code: str = "") -> RollmeshError:
    """Returns the typed error of a status, or `RemoteError` if it has no rollmesh reason.

    Args:
        status: An error status. Its code is not OK.
        code: Name of the code that the call ended with. Empty means the status's own code.
    """
    code = code or _CODES.get(status.code, "UNKNOWN")
    info = _detail(status, error_details_pb2.ErrorInfo())
    if info is None or info.domain != DOMAIN:
        return RemoteError(status.message, code)
    retry = _detail(status, error_details_pb2.RetryInfo())
    found = BY_REASON.get(info.reason, RollmeshError)
    result = found.__new__(found)
    RollmeshError.__init__(
        result,
        status.message,
        retry_delay_ms=retry.retry_delay.ToMilliseconds() if retry else None,
    )
    result.metadata = dict(info.metadata)
    if found is RollmeshError:
        result.reason = info.reason
    if isinstance(result, InvalidFieldError):
        result.field = info.metadata.get("field", "")
    if isinstance(result, RemoteError):
        result.code = code
    return result
