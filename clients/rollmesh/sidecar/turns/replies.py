"""One streamed answer on its connection."""

import asyncio

from starlette.types import Send

from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.turns.protocol import Protocol, StreamWriter
from rollmesh.v1 import gateway_pb2


class StreamReply:
    """Writes a stream; its headers are sent with the first event, so early errors get a status.

    Nothing is buffered here for a slow client. While the server's 64 KiB buffer is full, a write
    waits and nothing more is read from the gateway; gRPC's flow-control window then bounds the
    backlog to a few MiB per choice.
    """

    def __init__(
        self, send: Send, request_id: str, protocol: Protocol, writer: StreamWriter
    ) -> None:
        """Takes the ASGI channel, and what writes errors and events."""
        self._send = send
        self._request_id = request_id
        self._protocol = protocol
        self._writer = writer
        self._begun: set[int] = set()
        self._silent = True
        self._started = False

    def knows(self, index: int) -> bool:
        """Returns whether a choice has begun."""
        return index in self._begun

    async def begin(self, index: int, answer_id: str) -> None:
        """Sends the beginning of a choice."""
        self._begun.add(index)
        await self._write(self._writer.begin(index, answer_id))

    async def prompt(self, prompt: gateway_pb2.ChatPrompt) -> None:
        """Sends the ids of the prompt."""
        await self._write(self._writer.prompt(prompt.token_ids_u32le))

    async def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> None:
        """Sends a delta at once."""
        await self._write(self._writer.delta(index, delta))

    async def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> None:
        """Sends the end of one choice."""
        await self._write(self._writer.finish(index, done))

    async def end(self, answers: list[gateway_pb2.ChatAnswer]) -> None:
        """Sends the end of the stream."""
        last = self._writer.end(answers)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: RollmeshError) -> None:
        """Sends an error with its status, or as an event if the stream has started.

        A started stream is not terminated properly and the server closes the connection. Clients
        would mistake a properly terminated partial answer for a complete one.
        """
        if self._started:
            await self._write(self._protocol.error_event(error, self._request_id))
            return
        http = self._protocol.error(error, self._request_id)
        await self._start(http.status, http.headers)
        await self._send({"type": "http.response.body", "body": http.body})

    async def fill_silence(self, pause_ms: int) -> None:
        """Sends a keep-alive after each silence of `pause_ms`; runs until cancelled."""
        while True:
            await asyncio.sleep(pause_ms / 1000)
            if self._silent:
                await self._write(self._protocol.keep_alive)
            self._silent = True

    async def _write(self, body: bytes) -> None:
        if not body:
            return
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
        named = [*headers, (self._protocol.request_id_header, self._request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": named})
