"""Messages as a protocol of the sidecar."""

from typing import Any

import orjson

from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.sidecar.anthropic_messages.errors import to_event, to_messages_http
from rollmesh.sidecar.anthropic_messages.requests import read_request
from rollmesh.sidecar.anthropic_messages.responses import thinking_block, whole_answer
from rollmesh.sidecar.anthropic_messages.streams import KEEP_ALIVE, MessageStream
from rollmesh.sidecar.anthropic_messages.thinking import read_thinking
from rollmesh.sidecar.errors import HttpError
from rollmesh.sidecar.fields.values import flag, parse_body, read_model
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.turns.heads import Head
from rollmesh.sidecar.turns.protocol import Protocol, TurnCall
from rollmesh.sidecar.turns.seals import seal
from rollmesh.v1 import gateway_pb2


class Messages(Protocol):
    """`POST .../v1/messages`."""

    name = "messages"
    keep_alive = KEEP_ALIVE
    request_id_header = b"request-id"

    def read(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request."""
        values = parse_body(body)
        if values.get("max_tokens") is None:
            raise InvalidFieldError("max_tokens", "is missing; give the most tokens to sample")
        return _MessageCall(values, head.session_key, streams=flag(values, "stream"))

    def error(self, error: RollmeshError, request_id: str) -> HttpError:
        """Returns an error in Anthropic's form."""
        return to_messages_http(error, request_id)

    def error_event(self, error: RollmeshError, request_id: str) -> bytes:
        """Returns an error in Anthropic's form, as an event."""
        return to_event(error, request_id)


class CountTokens(Messages):
    """`POST .../v1/messages/count_tokens`."""

    name = "messages_count_tokens"

    def read(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request."""
        return _CountCall(parse_body(body), head.session_key, streams=False)


class _MessageCall(TurnCall):
    """One request for a message."""

    def __init__(self, body: dict[str, Any], session_key: str, *, streams: bool) -> None:
        """Takes the body of a request."""
        super().__init__(read_request(body, session_key), read_model(body), streams=streams)
        self._session_key = session_key
        self._shows_thinking = read_thinking(body).is_shown

    def whole(self, response: gateway_pb2.ChatResponse, model: str) -> bytes:
        """Returns the message."""
        (done,) = response.answers
        thinking: dict[str, Any] = {}
        if thought := done.message.reasoning_content:
            shown = thought if self._shows_thinking else ""
            thinking = thinking_block(shown, self._sign(done.answer_id, thought))
        return whole_answer(done, model, thinking)

    def writer(self, model: str) -> MessageStream:
        """Returns the writer of the message's events."""
        return MessageStream(model, self._sign, shows_thinking=self._shows_thinking)

    def _sign(self, answer_id: str, thinking: str) -> str:
        return seal(self._session_key, answer_id, thinking)


class _CountCall(_MessageCall):
    """One request for the size of a message's prompt."""

    async def answer(self, gateways: Gateways, model: str, request_id: str) -> bytes:
        """Returns the number of tokens."""
        del model
        counted = await gateways.count_tokens(self.chat, request_id)
        return orjson.dumps({"input_tokens": counted.prompt_tokens})
