"""Servers of images for the sidecar to fetch from."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.turns.fetching import ImageFetcher
from rollmesh.v1 import chat_pb2, gateway_pb2

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nPNG"


@dataclass
class Host:
    """A server of images that answers with what a path has."""

    hostname: str
    scheme: str = "http"
    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    other: bytes = OK
    """What every other path has."""
    asked: list[str] = field(default_factory=list)
    hold: bool = False
    """Whether nothing more comes, and the connection stays."""
    meeting: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(1))
    """Requests that must be there before one of them is answered."""
    open: int = 0
    most_open: int = 0
    """Most requests at a time."""
    connections: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.hostname}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert f"host: {self.name}\r\n" in head.lower()
        path = head.split(" ")[1]
        self.asked.append(path)
        await self.meeting.wait()
        self.open -= 1
        writer.write(self.answers.get(path, self.other))
        await writer.drain()
        if self.hold:
            await reader.read()
        writer.close()


@asynccontextmanager
async def hosted(
    hostname: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    answers: Mapping[str, bytes] | None = None,
) -> AsyncIterator[Host]:
    """Serves on a free port of 127.0.0.1, under a name, with the answers of paths."""
    host = Host(hostname, "https" if tls else "http")
    host.answers = dict(answers or {})
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host
    for writer in host.connections:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def fetcher(
    hosts: str, allowed: Callable[[str], bool] = lambda _: True, **settings: Any
) -> ImageFetcher:
    return ImageFetcher(SidecarConfig(image_hosts=hosts, **settings), allowed)


def asking(*urls: str, session_id: str = "s") -> gateway_pb2.ChatRequest:
    parts = [
        chat_pb2.ContentPart(image=chat_pb2.Media(uri=url, field=f"messages[0].content[{at}]"))
        for at, url in enumerate(urls)
    ]
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=parts)
    return gateway_pb2.ChatRequest(session_id=session_id, messages=[message])
