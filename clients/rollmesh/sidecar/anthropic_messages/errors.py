"""Errors in the form of Messages, as Anthropic's SDKs and Claude Code expect them."""

from typing import Any

import orjson

from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.errors import HttpError, shown_text, to_http

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    414: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = {"OVERLOADED", "TOO_MANY_CONNECTIONS"}
"""Reasons of 529: this server has too much to do. Claude Code gives up after three of them, so what
only has to be waited for (an engine, another gateway) stays 429 and 503."""
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_FINAL = {401, 403, 404}
_NAMES = {
    "tools_json": "tools",
    "deferred_tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "json_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Names of the gateway's fields in this protocol."""


def to_messages_http(error: RollmeshError, request_id: str) -> HttpError:
    """Returns an error as an HTTP answer, with its message cut to 1,500 bytes."""
    plain = to_http(error)
    status = 529 if error.reason in _OVERLOADED else plain.status
    headers = list(plain.headers)
    if status in _FINAL:  # Claude Code would try again
        headers.append((b"x-should-retry", b"false"))
    fields: dict[str, Any] = {"type": _TYPES.get(status, "api_error"), "message": _message(error)}
    if error.metadata.get("field") == "thread":  # the SDK's tool runner goes on without
        fields["details"] = _UNTHREADED
    body = {"type": "error", "error": fields, "request_id": request_id}
    return HttpError(status, orjson.dumps(body), tuple(headers))


def to_event(error: RollmeshError, request_id: str) -> bytes:
    """Returns the event that reports an error inside a stream."""
    return b"event: error\ndata: " + to_messages_http(error, request_id).body + b"\n\n"


def _message(error: RollmeshError) -> str:
    """Returns the message of an error; clients know the context's end by Anthropic's words."""
    numbers = error.metadata
    if error.reason != "CONTEXT_LENGTH_EXCEEDED" or "prompt_tokens" not in numbers:
        name = numbers.get("field", "")
        text = error.message
        if name in _NAMES:
            text = _NAMES[name] + text.removeprefix(name)
        return shown_text(text.removeprefix("sampling."))
    prompt, most = int(numbers["prompt_tokens"]), int(numbers["max_tokens"])
    if "wanted_tokens" in numbers:
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + "
            f"{numbers['wanted_tokens']} > {most}, decrease input length or `max_tokens` and "
            "try again"
        )
    return f"prompt is too long: {prompt} tokens > {min(most, prompt - 1)} maximum"
