"""The one table from typed errors to HTTP, in the form that OpenAI's SDKs read."""

import math
from typing import Any

import grpc
import orjson

from rollmesh.runtime.errors import InvalidFieldError, RemoteError, RollmeshError

Header = tuple[bytes, bytes]
"""Name in lower case and value of an HTTP header."""

_CODES: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.CANCELLED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_REASONS = {"BODY_TOO_LARGE": 413, "METHOD_NOT_ALLOWED": 405}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PARAMS = {
    "tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "idempotency_key": "Idempotency-Key",
}
_DEFAULT_DELAY_MS = 1_000
_MAX_DELAY_S = 120  # above it OpenAI's SDK does not retry at all


class UnsupportedParameterError(InvalidFieldError):
    """A parameter would change the result and is not supported."""

    reason = "UNSUPPORTED_PARAMETER"


class BodyTooLargeError(InvalidFieldError):
    """A request body is over the limit."""

    reason = "BODY_TOO_LARGE"


class MethodNotAllowedError(InvalidFieldError):
    """A path does not take this HTTP method."""

    reason = "METHOD_NOT_ALLOWED"


class PathUnknownError(RollmeshError):
    """Nothing is served at this path."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "PATH_UNKNOWN"


def http_status(error: RollmeshError) -> int:
    """Returns the HTTP status of an error."""
    code = error.status_code if isinstance(error, RemoteError) else error.code
    return _REASONS.get(error.reason) or _CODES.get(code, 500)


def error_body(error: RollmeshError) -> dict[str, Any]:
    """Returns the JSON object that describes an error: `message`, `type`, `param`, `code`."""
    status = http_status(error)
    field = error.field if isinstance(error, InvalidFieldError) else ""
    message = error.message
    if error.reason == "CONTEXT_LENGTH_EXCEEDED":  # clients know it by how the wording begins
        message = message.removeprefix(f"{field}: ")
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(status, fallback),
            "param": _PARAMS.get(field, field.removeprefix("sampling.")) or None,
            "code": error.reason.lower(),
        }
    }


def render_error(error: RollmeshError) -> tuple[int, list[Header], bytes]:
    """Returns status, headers and body of the answer to a failed request."""
    status = http_status(error)
    headers = [(b"content-type", b"application/json")]
    if status in {429, 503}:
        delay_ms = error.retry_delay_ms or _DEFAULT_DELAY_MS
        seconds = min(max(math.ceil(delay_ms / 1000), 1), _MAX_DELAY_S)
        headers.append((b"retry-after", str(seconds).encode()))
    if status == 409:  # SDKs retry it, and waiting does not heal it
        headers.append((b"x-should-retry", b"false"))
    return status, headers, orjson.dumps(error_body(error))
