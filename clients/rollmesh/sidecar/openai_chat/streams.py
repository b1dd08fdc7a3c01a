"""One streamed reply: pieces as they come, comments in silence, no proper end to a failure."""

import asyncio

from starlette.types import Send

from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.errors import error_event, to_http
from rollmesh.sidecar.openai_chat.responses import DONE, KEEP_ALIVE, ChunkWriter
from rollmesh.v1 import gateway_pb2


class StreamReply:
    """Writes a stream; its headers leave with the first event, so early errors have a status.

    Nothing is kept for a client that reads slowly: a write waits while the server holds 64 KiB for
    it. Then no more is read from the gateway, and gRPC holds what its window lets in: a few MiB for
    each choice at most.
    """

    def __init__(self, send: Send, request_id: str, writer: ChunkWriter) -> None:
        """Takes the ASGI channel and what writes the chunks."""
        self._send = send
        self._request_id = request_id
        self._writer = writer
        self._silent = True
        self._started = False

    def begin(self, index: int, answer_id: str) -> None:
        """Takes the id of a choice's answer; nothing is sent before the first choice has one."""
        self._writer.begin(index, answer_id)

    def knows(self, index: int) -> bool:
        """Says whether a choice has begun."""
        return self._writer.knows(index)

    async def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> None:
        """Sends a piece of an answer at once."""
        await self._write(self._writer.delta(index, delta))

    async def prompt(self, prompt: gateway_pb2.ChatPrompt) -> None:
        """Sends the ids of the prompt."""
        await self._write(self._writer.prompt(prompt.token_ids_u32le))

    async def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> None:
        """Sends the end of one choice."""
        await self._write(self._writer.finish(index, done))

    async def end(self, answers: list[gateway_pb2.ChatAnswer], *, include_usage: bool) -> None:
        """Sends the end of the stream."""
        usage = self._writer.usage(answers) if include_usage else b""
        await self._send({"type": "http.response.body", "body": usage + DONE, "more_body": False})

    async def fail(self, error: RollmeshError) -> None:
        """Sends an error: with its status, or as an event where the stream has begun.

        A stream that has begun is left without its end and the server closes the socket: clients
        take a properly ended half answer for a whole one.
        """
        if self._started:
            await self._write(error_event(error))
            return
        http = to_http(error)
        await self._start(http.status, http.headers)
        await self._send({"type": "http.response.body", "body": http.body})

    async def fill_silence(self, pause_ms: int) -> None:
        """Sends a comment after each silence of `pause_ms`; runs until it is cancelled."""
        while True:
            await asyncio.sleep(pause_ms / 1000)
            if self._silent:
                await self._write(KEEP_ALIVE)
            self._silent = True

    async def _write(self, body: bytes) -> None:
        self._silent = False
        if not self._started:
            self._started = True
            await self._start(
                200,
                (
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                ),
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        named = [*headers, (b"x-request-id", self._request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": named})
