"""What a client can do to a server, and what becomes of it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_PIECE = 64 * 1024
_ANSWER_S = 60.0
SLOW = {
    "slow_heads": HEAD + b"X-Slow",
    "slow_bodies": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "idle": b"",
}
FLOODS = {
    "header_16m": (b"GET / HTTP/1.1\r\nX-Long: ", b"a", 16),
    "headers_8m": (b"GET / HTTP/1.1\r\n", b"A: b\r\n", 8),
    "url_16m": (b"GET /", b"a", 16),
    "trailers_8m": (_CHUNKED + b"0\r\n", b"A: b\r\n", 8),
    "pipelined_8m": (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 8),
}
"""How each begins, what is repeated, and for how many MiB."""


@dataclass(frozen=True, slots=True)
class Flooded:
    """What a server did with a flood."""

    sent_mib: float
    """What it took before it answered, closed, or took no more."""
    end: str
    """Status of its answer, "closed", or "open" if it did neither in time."""


async def flood(port: int, begin: bytes, part: bytes, mib: int) -> Flooded:
    """Sends a flood, and reads only once all is sent or nothing more is taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        with suppress(OSError, TimeoutError):
            for piece in _pieces(begin, part, mib):
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 5)
                sent += len(piece)
        return Flooded(sent / 2**20, await _end_of(reader))
    finally:
        writer.transport.abort()


def _pieces(begin: bytes, part: bytes, mib: int) -> Iterable[bytes]:
    yield begin
    piece = part * (_PIECE // len(part))
    for _ in range(mib * 2**20 // len(piece)):
        yield piece


async def _end_of(reader: asyncio.StreamReader) -> str:
    try:
        head = await asyncio.wait_for(reader.read(64), 5)
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return head.split()[1].decode() if head.startswith(b"HTTP/1.1 ") else "closed"


@asynccontextmanager
async def held(port: int, count: int, begin: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Holds connections that have sent the beginning of a request, or nothing."""
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in pairs:
        writer.write(begin)
    try:
        yield [reader for reader, _ in pairs]
    finally:
        for _, writer in pairs:
            writer.transport.abort()


async def ended(readers: list[asyncio.StreamReader], within_s: float) -> int:
    """Returns how many connections a server ends within a time."""

    async def wait(reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            await reader.read()

    waits = [asyncio.ensure_future(wait(reader)) for reader in readers]
    done, left = await asyncio.wait(waits, timeout=within_s)
    for one in left:
        one.cancel()
    return len(done)


async def request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    """Makes one request and reads its answer.

    Raises:
        ConnectionError: The answer is not 200.
    """
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(_ANSWER_S):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.splitlines()[0]:
            raise ConnectionError(head.splitlines()[0].decode())
        length = next(line for line in head.splitlines() if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))


async def is_served(port: int) -> bool:
    """Returns whether a new client gets an answer."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await request(reader, writer, b"{}")
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return True
