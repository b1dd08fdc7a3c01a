"""HTTP errors as the official SDKs expect them, from gRPC codes and reasons."""

import logging
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import orjson

from rollmesh.runtime.errors import InvalidFieldError, RemoteError, RollmeshError
from rollmesh.runtime.rpc import MAX_MESSAGE_BYTES, cut_text
from rollmesh.runtime.telemetry import without_keys

_log = logging.getLogger(__name__)
_STATUS = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "FAILED_PRECONDITION": (409, "conflict_error"),
    "ALREADY_EXISTS": (409, "conflict_error"),
    "ABORTED": (503, "server_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (503, "server_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
    "UNIMPLEMENTED": (501, "server_error"),
}
_STATUS_OF_REASON = {
    "METHOD_UNKNOWN": 405,
    "REQUEST_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
    "URL_TOO_LONG": 414,
    "HEADERS_TOO_LARGE": 431,
    "TOO_MANY_CONNECTIONS": 503,
}
_OF_THE_SIDECAR = {"CALLER_UNKNOWN", "ROLE_REFUSED"}
"""The gateway refuses the sidecar itself: an agent cannot mend that."""
_MAX_PARAM_BYTES = 200
_MOST_DELAY_S = 120  # SDKs ignore longer delays
CHAT_PARAMS: Mapping[str, str] = {
    "tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "json_format": "response_format",
    "choices": "n",
    "sampling.bad_sequences": "bad_words",
    "returns.top_logprobs": "top_logprobs",
}


class ModelUnknownError(InvalidFieldError, code="NOT_FOUND", reason="MODEL_NOT_FOUND"):
    """A request names another model than the session's, or an unknown one.

    Ask for the session's model, or open a session of the other one. `/v1/models` lists them.
    """


class PreviousResponseUnknownError(InvalidFieldError, reason="PREVIOUS_RESPONSE_NOT_FOUND"):
    """A request continues a response that its session does not have.

    Give the id of a response of this session that was not deleted, or send the complete input.
    """


class BodyTooLargeError(InvalidFieldError, reason="BODY_TOO_LARGE"):
    """A request body is over the limit.

    Send a shorter history, or raise the sidecar's `--max-body-bytes`.
    """


class HttpInvalidError(RollmeshError, code="INVALID_ARGUMENT", reason="HTTP_INVALID"):
    """The client did not send a valid HTTP/1.1 request.

    Send HTTP/1.1. The connection was closed.
    """


class HeadersTooLargeError(HttpInvalidError, reason="HEADERS_TOO_LARGE"):
    """The headers of a request or the trailers of a body are over the limit.

    Send smaller headers, or raise the sidecar's `--max-header-bytes`.
    """


class UrlTooLongError(HttpInvalidError, reason="URL_TOO_LONG"):
    """A URL is over the limit.

    Send a shorter URL.
    """


class RequestTimeoutError(HttpInvalidError, reason="REQUEST_TIMEOUT"):
    """A request did not arrive in time.

    Send the request faster, or raise the time limit that the message names.
    """


class PipelineTooLongError(HttpInvalidError, reason="PIPELINE_TOO_LONG"):
    """A client pipelined too many requests on one connection.

    Wait for answers before you send more requests on one connection.
    """


class TooManyConnectionsError(RollmeshError, code="UNAVAILABLE", reason="TOO_MANY_CONNECTIONS"):
    """The sidecar has its maximum of connections.

    Reuse connections, or raise the sidecar's `--max-connections`.
    """


class PathUnknownError(RollmeshError, code="NOT_FOUND", reason="PATH_UNKNOWN"):
    """Nothing is served at this path with this method.

    Call one of the paths that the message names.
    """


class MethodUnknownError(PathUnknownError, reason="METHOD_UNKNOWN"):
    """This path is served, but not with this method.

    Use a method that the header `allow` names.
    """


class StoppingError(RollmeshError, code="UNAVAILABLE", reason="STOPPING"):
    """The sidecar or the relay stopped before the answer was complete.

    Retry: another one, or this one after its restart, gives the answer.
    """


Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
JSON: Headers = ((b"content-type", b"application/json"),)


class HttpError(NamedTuple):
    """An error as an HTTP answer."""

    status: int
    body: bytes
    headers: Headers


def to_http(error: RollmeshError, params: Mapping[str, str] = CHAT_PARAMS) -> HttpError:
    """Returns an error as an HTTP answer in OpenAI's form, its message cut to 1,500 bytes."""
    status, kind = _STATUS.get(error.code, (500, "server_error"))
    if error.reason in _OF_THE_SIDECAR:
        status, kind = 503, "server_error"
    status = _STATUS_OF_REASON.get(error.reason, status)
    param = error.field if isinstance(error, InvalidFieldError) else ""
    param = cut_text(without_keys(param), _MAX_PARAM_BYTES)
    message = shown_text(error.message)
    if error.reason == "CONTEXT_LENGTH_EXCEEDED":  # clients recognise it by how it begins
        message = message.removeprefix(f"{param}: ")
    reason = error.code if isinstance(error, RemoteError) else error.reason
    body = {
        "message": message,
        "type": kind,
        "param": params.get(param, param.removeprefix("sampling.") or None),
        "code": reason.lower(),
    }
    headers = list(JSON)
    if status in {429, 503}:
        delay = min(max(-(-(error.retry_delay_ms or 1000) // 1000), 1), _MOST_DELAY_S)
        headers.append((b"retry-after", str(delay).encode()))
    # SDKs would retry, but a closed session stays closed, and a spent budget spent.
    if status in {409, 501} or error.reason == "BUDGET_SPENT":
        headers.append((b"x-should-retry", b"false"))
    return HttpError(status, orjson.dumps({"error": body}), tuple(headers))


def renamed(error: RollmeshError, names: Mapping[str, str]) -> tuple[str, str]:
    """Returns the field of an error, empty if it has none, and its message."""
    field = error.metadata.get("field", "")
    plain = field.removeprefix("sampling.")
    name = names.get(plain, plain)
    return name, name + error.message.removeprefix(field)


def shown_text(message: str) -> str:
    """Returns a message without session keys, cut to 1,500 bytes, because clients log errors."""
    return cut_text(without_keys(message), MAX_MESSAGE_BYTES)


def typed(error: Exception) -> RollmeshError:
    """Returns the first typed error of a group. Details of any other error stay in the log."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RollmeshError):
        return error
    _log.error("unexpected error", exc_info=error)
    return RollmeshError("unexpected error; see the log under the request id")
