"""HTTP/2 by hand: what no gRPC client would send."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_END_HEADERS, _ACK = 4, 1
_HEAD_BYTES = 9


class Peer:
    """A connection to a server. Nothing is read from it unless a test does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, kind: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> None:
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
        self._writer.write(head + struct.pack(">I", stream) + payload)

    def call(self, stream: int, path: str) -> None:
        """Begins a call, and sends no message."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "peer",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self.send(HEADERS, block, stream=stream, flags=_END_HEADERS)

    def reset(self, stream: int) -> None:
        self.send(RESET, struct.pack(">I", 8), stream=stream)

    async def drain(self) -> None:
        await self._writer.drain()

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yields kind and payload of what the server sends, until it closes the connection."""
        while True:
            try:
                head = await self._reader.readexactly(_HEAD_BYTES)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield head[3], payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yields number and value of each setting."""
    for at in range(0, len(payload), 6):
        yield struct.unpack(">HI", payload[at : at + 6])


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Peer]:
    """Connects to a server of this host, and says hello."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        peer = Peer(reader, writer)
        writer.write(PREFACE)
        peer.send(SETTINGS)
        await peer.drain()
        yield peer
    finally:
        writer.close()
