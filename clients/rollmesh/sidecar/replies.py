"""One HTTP reply: whole or streamed, and broken off on purpose when a stream fails."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.answers import KEEP_ALIVE, event
from rollmesh.sidecar.http_errors import BodyTooLargeError, Header, error_body, render_error

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON: list[Header] = [(b"content-type", b"application/json")]


class ClientGoneError(Exception):
    """The client closed the connection before it had the answer."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """Returns the body of a request.

    Raises:
        BodyTooLargeError: It has more than `limit` bytes.
        ClientGoneError: The client left before it was sent whole.
    """
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body = body + message["body"] if body else message["body"]
        if len(body) > limit:
            raise BodyTooLargeError("body", f"is over {limit} bytes; send fewer")
        if not message.get("more_body"):
            return body


class Reply:
    """Writes one reply. Nothing is sent twice: `status` is 0 until the headers left."""

    def __init__(self, send: Send, request_id: str) -> None:
        """Takes the ASGI channel and the id that the reply names."""
        self._send = send
        self._request_id = request_id.encode("latin-1")
        self._silent = True
        self.status = 0

    async def whole(self, body: bytes, status: int = 200, headers: list[Header] = _JSON) -> None:
        """Sends a whole reply."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a piece of a stream at once; the first one is preceded by the headers."""
        self._silent = False
        if not self.status:
            await self._start(200, _STREAM_HEADERS)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def fail(self, error: RollmeshError) -> None:
        """Sends an error; a stream that has begun gets an error event and no proper end.

        The server closes the socket of a reply that was left without its end: clients would take
        a properly ended half answer for a whole one.
        """
        if self.status:
            await self._send(
                {"type": "http.response.body", "body": event(error_body(error)), "more_body": True}
            )
        else:
            status, headers, body = render_error(error)
            await self.whole(body, status, headers)

    async def attend(self, receive: Receive, keep_alive_ms: int | None) -> None:
        """Sends keep-alive comments while nothing else is sent, until the client leaves.

        Args:
            receive: The ASGI channel, after the body was read.
            keep_alive_ms: Silence between comments; None sends none.

        Raises:
            ClientGoneError: The client closed the connection.
        """
        delay_s = None if keep_alive_ms is None else keep_alive_ms / 1000
        while True:
            try:
                async with asyncio.timeout(delay_s):
                    while (await receive())["type"] != "http.disconnect":
                        pass
            except TimeoutError:
                if self._silent:
                    await self.write(KEEP_ALIVE)
                self._silent = True
            else:
                raise ClientGoneError

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        headers = [*headers, (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
