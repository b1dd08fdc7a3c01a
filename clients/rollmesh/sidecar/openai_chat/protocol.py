"""Chat completions as a protocol of the sidecar."""

from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.errors import HttpError, error_event, to_http
from rollmesh.sidecar.fields.values import parse_body, read_model
from rollmesh.sidecar.openai_chat.requests import (
    read_request,
    read_shown,
    wants_stream,
    wants_usage,
)
from rollmesh.sidecar.openai_chat.responses import KEEP_ALIVE, ChunkWriter, whole_answer
from rollmesh.sidecar.openai_chat.sampled import Shown
from rollmesh.sidecar.turns.heads import Head
from rollmesh.sidecar.turns.protocol import Protocol, TurnCall
from rollmesh.v1 import gateway_pb2


class ChatCompletions(Protocol):
    """`POST .../v1/chat/completions`."""

    name = "chat"
    keep_alive = KEEP_ALIVE

    def read(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request."""
        del head
        values = parse_body(body)
        return _ChatCall(
            read_request(values),
            read_model(values),
            read_shown(values),
            streams=wants_stream(values),
            include_usage=wants_usage(values),
        )

    def error(self, error: RollmeshError, request_id: str) -> HttpError:
        """Returns an error in OpenAI's form."""
        del request_id
        return to_http(error)

    def error_event(self, error: RollmeshError, request_id: str) -> bytes:
        """Returns an error in OpenAI's form, as an event."""
        del request_id
        return error_event(error)


class _ChatCall(TurnCall):
    """One request for a chat completion."""

    def __init__(
        self,
        chat: gateway_pb2.ChatRequest,
        model: str,
        shown: Shown,
        *,
        streams: bool,
        include_usage: bool,
    ) -> None:
        """Takes the request, the token fields of its answer, and whether a stream has usage."""
        super().__init__(chat, model, streams=streams)
        self._shown = shown
        self._include_usage = include_usage
        self._named = chat.tool_choice == gateway_pb2.TOOL_CHOICE_NAMED

    def whole(self, response: gateway_pb2.ChatResponse, model: str) -> bytes:
        """Returns the `chat.completion` object."""
        return whole_answer(response, model, self._shown, named=self._named)

    def writer(self, model: str) -> ChunkWriter:
        """Returns the writer of `chat.completion.chunk` events."""
        return ChunkWriter(
            clock.unix_ms() // 1000,
            model,
            self._shown,
            named=self._named,
            include_usage=self._include_usage,
        )
