"""One chat completion, parsed from the body and the headers of an HTTP request."""

from dataclasses import dataclass

from starlette.types import Scope

from rollmesh.sidecar.openai_chat.lineages import said_lineage
from rollmesh.sidecar.openai_chat.requests import (
    parse_body,
    read_model,
    read_request,
    read_shown,
    wants_stream,
    wants_usage,
)
from rollmesh.sidecar.openai_chat.sampled import Shown
from rollmesh.sidecar.sessions import named_session
from rollmesh.v1 import gateway_pb2


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request for a chat completion."""

    request_id: str
    chat: gateway_pb2.ChatRequest
    """The request to the gateway."""
    model: str
    """Model named by the client; empty if it named none, until the session's is known."""
    shown: Shown
    """Which token fields the answer contains."""
    streams: bool
    """Whether the answer is streamed."""
    include_usage: bool
    """Whether a stream ends with a usage chunk."""

    @property
    def names_tool(self) -> bool:
        """Whether the request names the tool to call."""
        return self.chat.tool_choice == gateway_pb2.TOOL_CHOICE_NAMED


def read_call(data: bytes, scope: Scope, request_id: str) -> ChatCall:
    """Reads an HTTP request.

    Args:
        data: Its body.
        scope: Its ASGI scope, with the headers and the session in the path.
        request_id: Its id in logs and in the gateway.

    Raises:
        InvalidFieldError: Names the parameter and what is wrong with it.
        SessionKeyWrongError: It carries no session key, or two different ones.
    """
    body = parse_body(data)
    chat = read_request(body)
    model = read_model(body)
    _read_headers(chat, scope)
    return ChatCall(
        request_id, chat, model, read_shown(body), wants_stream(body), wants_usage(body)
    )


def _read_headers(chat: gateway_pb2.ChatRequest, scope: Scope) -> None:
    """Sets the session, the lineage and the retry marks of a request."""
    headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
    session = scope["path_params"].get("session", "")
    chat.session_id, chat.session_key = named_session(session, headers)
    chat.idempotency_key = headers.get(b"idempotency-key", "")
    chat.lineage = said_lineage(headers)
    retries = headers.get(b"x-stainless-retry-count", "0")
    chat.retry_count = int(retries) if retries.isdecimal() and len(retries) < 9 else 0
