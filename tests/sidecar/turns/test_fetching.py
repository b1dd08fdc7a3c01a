"""Images that are given by URL: from named hosts only, and never from private addresses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidImageError, UnsupportedPartError
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.turns.fetching import ImageFetcher, is_public
from rollmesh.v1 import chat_pb2, gateway_pb2

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nPNG"


@dataclass
class Host:
    """A server of images that answers with what a path has."""

    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    hold: bool = False
    """Whether nothing more comes, and the connection stays."""
    connections: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert f"host: 127.0.0.1:{self.port}\r\n" in head.lower()
        path = head.split(" ")[1]
        self.asked.append(path)
        writer.write(self.answers.get(path, OK))
        await writer.drain()
        if self.hold:
            await reader.read()
        writer.close()


@asynccontextmanager
async def hosted(**answers: bytes) -> AsyncIterator[Host]:
    host = Host(answers={f"/{path}": answer for path, answer in answers.items()})
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0)
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


async def test_an_image_is_fetched_once_for_a_session() -> None:
    async with hosted() as host:
        fetching, url = fetcher(f"127.0.0.1:{host.port}"), f"http://127.0.0.1:{host.port}/a?b=c"
        for session in ("s", "s", "t"):
            chat = asking(url, url, session_id=session)
            await fetching.fill(chat)
            assert [part.image.data for part in chat.messages[0].content] == [b"PNG", b"PNG"]
    assert host.asked == ["/a?b=c"] * 2


async def test_a_redirect_within_the_host_is_followed() -> None:
    answers = {"a": b"HTTP/1.1 302 F\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n"}
    async with hosted(**answers) as host:
        chat = asking(f"http://127.0.0.1:{host.port}/a")
        await fetcher(f"127.0.0.1:{host.port}").fill(chat)
    assert host.asked == ["/a", "/b"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        pytest.param(
            b"HTTP/1.1 302 F\r\nlocation: http://localhost/\r\ncontent-length: 0\r\n\r\n",
            "redirects to another",
            id="another host",
        ),
        pytest.param(
            b"HTTP/1.1 302 F\r\nlocation: /a\r\ncontent-length: 0\r\n\r\n",
            "again and again",
            id="loop",
        ),
        pytest.param(b"HTTP/1.1 404 N\r\ncontent-length: 0\r\n\r\n", "answers 404", id="absent"),
        pytest.param(
            b"HTTP/1.1 200 O\r\ncontent-length: 99\r\n\r\n", "more than 8 bytes", id="large"
        ),
        pytest.param(
            b"HTTP/1.1 200 O\r\ntransfer-encoding: chunked\r\n\r\n9\r\nabcdefghi\r\n",
            "more than 8 bytes",
            id="growing",
        ),
        pytest.param(b"HTTP/1.1 200 O\r\ncontent-length: 5\r\n\r\nPN", "fetched", id="cut"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n\r\n", "fetched", id="not HTTP"),
    ],
)
async def test_what_a_host_may_not_do_is_an_error_of_the_part(answer: bytes, problem: str) -> None:
    async with hosted(a=answer) as host:
        fetching = fetcher(f"127.0.0.1:{host.port}", max_image_bytes=8)
        with pytest.raises(InvalidImageError, match=problem) as caught:
            await fetching.fill(asking(f"http://127.0.0.1:{host.port}/a"))
    assert caught.value.field == "messages[0].content[0]"


async def test_a_host_that_does_not_answer_is_left() -> None:
    async with hosted(a=b"HTTP/1.1 200 O\r\n") as host:
        host.hold = True
        fetching = fetcher(f"127.0.0.1:{host.port}", image_timeout_ms=50)
        with pytest.raises(InvalidImageError, match="did not come within"):
            await fetching.fill(asking(f"http://127.0.0.1:{host.port}/a"))


async def test_a_private_address_is_not_connected_to() -> None:
    async with hosted() as host:
        fetching = fetcher(f"127.0.0.1:{host.port}", is_public)
        with pytest.raises(InvalidImageError, match="not on the public internet"):
            await fetching.fill(asking(f"http://127.0.0.1:{host.port}/a"))
    assert not host.asked


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ("", "https://example.com/a.png"),
        ("example.com", "https://example.com:8443/a.png"),
        ("example.com", "https://www.example.com/a.png"),
        ("example.com:80", "https://example.com/a.png"),
    ],
)
async def test_a_host_that_is_not_named_is_refused(hosts: str, url: str) -> None:
    with pytest.raises(UnsupportedPartError, match="no images are fetched") as caught:
        await fetcher(hosts).fill(asking(url))
    assert caught.value.field == "messages[0].content[0]"


@pytest.mark.parametrize(
    "url",
    ["http://", "http://example.com:x/", "http://u:p@example.com/", "http://[::1", "http:/a"],
)
async def test_what_is_no_url_of_a_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidImageError):
        await fetcher("example.com").fill(asking(url))


async def test_many_urls_are_refused() -> None:
    with pytest.raises(InvalidImageError, match="at most 64"):
        await fetcher("example.com").fill(asking(*["https://example.com/a"] * 65))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::1", False),
    ],
)
def test_addresses_are_public_or_not(address: str, *, public: bool) -> None:
    assert is_public(address) is public
