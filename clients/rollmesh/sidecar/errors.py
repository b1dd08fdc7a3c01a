"""Errors as the official SDKs expect them: one table from gRPC code and reason to HTTP."""

from dataclasses import dataclass

import grpc
import orjson

from rollmesh.runtime.errors import InvalidFieldError, RemoteError, RollmeshError

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "conflict_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    grpc.StatusCode.ABORTED: (503, "server_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.CANCELLED: (503, "server_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "server_error"),
}
_STATUS_OF_REASON = {"BODY_TOO_LARGE": 413}
_MOST_DELAY_S = 120  # SDKs give up on a longer one
_PARAMS = {
    "tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "json_format": "response_format",
}


class BodyTooLargeError(InvalidFieldError):
    """A request body is over the limit."""

    reason = "BODY_TOO_LARGE"


class PathUnknownError(RollmeshError):
    """Nothing is served at this path with this method."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "PATH_UNKNOWN"


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as an HTTP answer."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


def to_http(error: RollmeshError) -> HttpError:
    """Returns the HTTP form of an error."""
    code = error.status_code if isinstance(error, RemoteError) else error.code
    status, kind = _STATUS.get(code, (500, "server_error"))
    status = _STATUS_OF_REASON.get(error.reason, status)
    param = error.field if isinstance(error, InvalidFieldError) else ""
    message = error.message
    if error.reason == "CONTEXT_LENGTH_EXCEEDED":  # clients know it by how the wording begins
        message = message.removeprefix(f"{param}: ")
    reason = code.name if isinstance(error, RemoteError) else error.reason
    body = {
        "message": message,
        "type": kind,
        "param": _PARAMS.get(param, param.removeprefix("sampling.") or None),
        "code": reason.lower(),
    }
    headers = [(b"content-type", b"application/json")]
    if status in {429, 503}:
        delay = min(max(-(-(error.retry_delay_ms or 1000) // 1000), 1), _MOST_DELAY_S)
        headers.append((b"retry-after", str(delay).encode()))
    if status == 409:  # SDKs retry a conflict; a closed session stays closed
        headers.append((b"x-should-retry", b"false"))
    return HttpError(status, orjson.dumps({"error": body}), tuple(headers))


def error_event(error: RollmeshError) -> bytes:
    """Returns the event that tells an error in the middle of a stream."""
    return b"data: " + to_http(error).body + b"\n\n"
