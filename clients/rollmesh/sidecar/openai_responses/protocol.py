"""Responses as a protocol of the sidecar."""

from typing import Any

import orjson

from rollmesh.runtime import clock
from rollmesh.runtime.errors import AnswerUnknownError, InvalidFieldError, RollmeshError
from rollmesh.sidecar.errors import HttpError, PreviousResponseUnknownError, to_http
from rollmesh.sidecar.fields.values import flag, parse_body, read_model, string
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.openai_responses import ids
from rollmesh.sidecar.openai_responses.items import read_input
from rollmesh.sidecar.openai_responses.outputs import Items
from rollmesh.sidecar.openai_responses.parameters import read_include
from rollmesh.sidecar.openai_responses.requests import (
    read_instructions,
    read_request,
    settings_of,
)
from rollmesh.sidecar.openai_responses.responses import ResponseWriter
from rollmesh.sidecar.openai_responses.streams import KEEP_ALIVE, ResponseStream
from rollmesh.sidecar.openai_responses.tools import read_tools
from rollmesh.sidecar.turns.heads import Head
from rollmesh.sidecar.turns.protocol import Protocol, TurnCall
from rollmesh.v1 import chat_pb2, gateway_pb2

_PREVIOUS = "previous_response_id"
_PARAMS = {
    "messages": "input",
    "tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "json_format": "text.format",
    "sampling.max_tokens": "max_output_tokens",
    "answer_id": "response_id",
}
"""Names of the gateway's fields in this protocol."""


def http_error(error: RollmeshError) -> HttpError:
    """Returns an error in OpenAI's form."""
    return to_http(error, _PARAMS)


class Responses(Protocol):
    """`POST .../v1/responses`."""

    name = "responses"
    keep_alive = KEEP_ALIVE

    def read(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request."""
        return ResponsesCall(parse_body(body), head.session_key)

    def error(self, error: RollmeshError, request_id: str) -> HttpError:
        """Returns an error in OpenAI's form."""
        del request_id
        return http_error(error)

    def error_event(self, error: RollmeshError, request_id: str) -> bytes:
        """Returns an error in OpenAI's form, as an event that the SDK raises."""
        del request_id
        return b"event: error\ndata: " + http_error(error).body + b"\n\n"


class CountTokens(Responses):
    """`POST .../v1/responses/input_tokens`."""

    name = "responses_input_tokens"

    def read(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request."""
        call = _CountCall(parse_body(body), head.session_key)
        call.streams = False
        return call


class ResponsesCall(TurnCall):
    """One request for a response."""

    def __init__(self, body: dict[str, Any], session_key: str) -> None:
        """Reads the request.

        Args:
            body: Its body.
            session_key: Key of its session.

        Raises:
            InvalidFieldError: Names the parameter and what is wrong with it.
        """
        found = read_input(body.get("input"), session_key)
        self._toolbox = read_tools(body.get("tools"), found.added_tools)
        super().__init__(
            read_request(body, self._toolbox), read_model(body), streams=flag(body, "stream")
        )
        given = body.get(_PREVIOUS)
        self._previous = None if given is None else string(given, _PREVIOUS)
        self._instructions = read_instructions(body)
        self._input, self._references = found.messages, found.references
        self.chat.messages.extend(self._instructions + self._input)
        self._session_key = session_key if read_include(body.get("include")) else ""
        self._settings = settings_of(body)

    async def complete(self, gateways: Gateways) -> None:
        """Adds the conversation that the request continues, and the items that it refers to."""
        for reference in self._references:
            answer = await self._stored(gateways, reference.answer_id, reference.field)
            reference.message.CopyFrom(message_of(answer))
        before: list[chat_pb2.ChatMessage] = []
        if self._previous is not None:
            answer_id, instructed = ids.answer_of_response(self._previous, _PREVIOUS)
            answer = await self._stored(gateways, answer_id, _PREVIOUS)
            # Instructions are not carried over, as in OpenAI's API.
            before = [*answer.messages[1 if instructed else 0 :], message_of(answer)]
        if before or self._references:
            del self.chat.messages[:]
            self.chat.messages.extend(self._instructions + before + self._input)

    async def _stored(
        self, gateways: Gateways, answer_id: str, field: str
    ) -> gateway_pb2.GetAnswerResponse:
        """Returns an earlier answer of the session, to which a field of the request refers."""
        chat, with_messages = self.chat, field == _PREVIOUS
        try:
            return await gateways.answer(
                chat.session_id, chat.session_key, answer_id, with_messages=with_messages
            )
        except AnswerUnknownError as error:
            problem = "is not known in this session, or was deleted; send the items themselves"
            kind = PreviousResponseUnknownError if with_messages else InvalidFieldError
            raise kind(field, problem) from error

    def whole(self, response: gateway_pb2.ChatResponse, model: str) -> bytes:
        """Returns the `response` object."""
        done = response.answers[0]
        return self._response(model).whole(done, self._items(done.answer_id))

    def writer(self, model: str) -> ResponseStream:
        """Returns the writer of the response's events."""
        return ResponseStream(self._response(model), self._items(""), clock.unix_ms() // 1000)

    def _response(self, model: str) -> ResponseWriter:
        return ResponseWriter(self._settings, model, instructed=bool(self._instructions))

    def _items(self, answer_id: str) -> Items:
        return Items(answer_id, self._toolbox, self._session_key)


class _CountCall(ResponsesCall):
    """One request for the size of a response's prompt."""

    async def answer(self, gateways: Gateways, model: str, request_id: str) -> bytes:
        """Returns the number of tokens."""
        del model
        counted = await gateways.count_tokens(self.chat, request_id)
        body = {"object": "response.input_tokens", "input_tokens": counted.prompt_tokens}
        return orjson.dumps(body)


def message_of(stored: gateway_pb2.GetAnswerResponse) -> chat_pb2.ChatMessage:
    """Returns the message of an earlier answer, which names the answer that it echoes."""
    message = chat_pb2.ChatMessage()
    message.CopyFrom(stored.answer.message)
    message.answer_id = stored.answer.answer_id
    return message
