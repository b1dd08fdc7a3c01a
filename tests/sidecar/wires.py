"""Connections to a sidecar, byte by byte."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from rollmesh.runtime.telemetry import BYTES_IN_FLIGHT
from rollmesh.sidecar import SidecarConfig
from tests.sidecar.reading import counted
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    serving,
    sidecar_of,
)

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
CHUNKED = CHAT + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = orjson.dumps({"messages": [{"role": "user", "content": "Hi"}]})
MEGABYTES = 3 * 1024 * 1024
TIMEOUT_S = 180


@dataclass(slots=True)
class Wire:
    """A connection to a sidecar, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, parts: Iterable[bytes]) -> int:
        """Sends what the sidecar takes. Returns how many bytes that were."""
        sent = 0
        try:
            for part in parts:
                self.writer.write(part)
                await self.writer.drain()
                sent += len(part)
        except OSError:
            pass
        return sent

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Reads one answer with a length: status, headers, body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.strip().split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers.get(b"content-length", b"0")))
        return int(status.split()[1]), headers, body

    async def rest(self) -> bytes:
        """Reads until the sidecar closes."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    async def refusal(self) -> tuple[int, str]:
        """Reads an error after which the connection ends: status and code."""
        status, headers, body = await self.answer()
        assert headers[b"connection"] == b"close"
        assert headers[b"content-type"] == b"application/json"
        assert await self.rest() == b""
        return status, orjson.loads(body)["error"]["code"]


@asynccontextmanager
async def wired(url: str, source: str = "127.0.0.1") -> AsyncIterator[Wire]:
    host, _, port = url.removeprefix("http://").partition(":")
    wire = Wire(*await asyncio.open_connection(host, int(port), local_addr=(source, 0)))
    try:
        yield wire
    finally:
        wire.writer.close()


@asynccontextmanager
async def served(
    gateway: ScriptedGateway | None = None, **bounds: Any
) -> AsyncIterator[tuple[str, ScriptedGateway]]:
    gateway = gateway or ScriptedGateway()
    async with asyncio.timeout(TIMEOUT_S), serving(gateway) as address:
        async with sidecar_of(SidecarConfig(gateway=address, **bounds)) as url:
            yield url, gateway


def refused(reason: str) -> float:
    return counted("refused", reason=reason)


def repeated(part: bytes) -> list[bytes]:
    return [part * (65536 // len(part))] * (MEGABYTES // 65536)


def held_bytes() -> float:
    """Bytes of requests that the sidecar holds."""
    (family,) = BYTES_IN_FLIGHT.collect()
    return family.samples[0].value
