"""An agent that streams an answer over a connection which takes next to nothing until it reads."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

_RECEIVE_BYTES = 4096
_SEGMENT_BYTES = 536
"""Small ones keep the buffer of the other end small too."""
_READ_BYTES = 65_536


class SlowAgent:
    """One streamed chat completion. What is not read stays at the sidecar."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    async def begun(self) -> None:
        """Reads the first bytes: the answer is on its way."""
        self._read += await self._receive(64)

    async def rest(self) -> tuple[str, bool]:
        """Reads on to the end: the text of the answer, and whether it ended as it should."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * _READ_BYTES)
        parts = [self._read]
        while part := await self._receive(_READ_BYTES):
            parts.append(part)
        _, _, body = b"".join(parts).partition(b"\r\n\r\n")
        events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        whole = events[-1:] == [b"[DONE]"]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events if event[:1] == b"{"]
        return "".join(delta.get("content") or "" for delta in deltas), whole

    async def _receive(self, size: int) -> bytes:
        async with asyncio.timeout(60):
            return await asyncio.get_running_loop().sock_recv(self._connection, size)


@asynccontextmanager
async def slow_agent(base_url: str, key: str, **body: Any) -> AsyncIterator[SlowAgent]:
    """Asks for a streamed answer. The connection is closed, read or not, with the block."""
    url = urlsplit(base_url)
    data = json.dumps({"model": "policy", "stream": True, **body}).encode()
    head = (
        f"POST {url.path}/chat/completions HTTP/1.0\r\n"  # 1.0: the body as it is, to the close
        f"host: {url.netloc}\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        connection.settimeout(0)
        await loop.sock_connect(connection, (url.hostname, url.port))
        await loop.sock_sendall(connection, head.encode() + data)
        yield SlowAgent(connection)
