"""Images that are given by URL: from named hosts only, and never from private addresses."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from rollmesh.runtime.errors import InvalidImageError, UnsupportedPartError
from rollmesh.sidecar import app
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.turns.fetching import ImageFetcher, is_public
from tests.sidecar.image_hosts import asking, fetcher, hosted
from tests.sidecar.scripted_gateway import KEY, ScriptedGateway, serving, sidecar_of
from tests.waiting import until

URL = "http://image.example"


async def test_an_image_is_fetched_once_for_a_session() -> None:
    async with hosted() as host:
        fetching, url = fetcher(host.name), f"{host.url}/a?b=c"
        for session in ("s", "s", "t"):
            chat = asking(url, url, session_id=session)
            await fetching.fill(chat)
            assert [part.image.data for part in chat.messages[0].content] == [b"PNG", b"PNG"]
    assert host.asked == ["/a?b=c"] * 2


async def test_a_redirect_within_the_host_is_followed() -> None:
    answers = {"/a": b"HTTP/1.1 302 F\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n"}
    async with hosted(answers=answers) as host:
        chat = asking(f"{host.url}/a")
        await fetcher(host.name).fill(chat)
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
    async with hosted(answers={"/a": answer}) as host:
        fetching = fetcher(host.name, max_image_bytes=8)
        with pytest.raises(InvalidImageError, match=problem) as caught:
            await fetching.fill(asking(f"{host.url}/a"))
    assert caught.value.field == "messages[0].content[0]"


async def test_a_host_that_does_not_answer_is_left() -> None:
    async with hosted(answers={"/a": b"HTTP/1.1 200 O\r\n"}) as host:
        host.hold = True
        fetching = fetcher(host.name, image_timeout_ms=50)
        with pytest.raises(InvalidImageError, match="did not come within"):
            await fetching.fill(asking(f"{host.url}/a"))


async def test_images_are_fetched_four_at_a_time() -> None:
    async with hosted() as host:
        host.meeting = asyncio.Barrier(4)
        chat = asking(*(f"{host.url}/{at}" for at in range(8)))
        await fetcher(host.name).fill(chat)
        assert host.most_open == 4
    assert [part.image.data for part in chat.messages[0].content] == [b"PNG"] * 8


async def test_the_images_of_a_request_have_one_deadline() -> None:
    async with hosted() as host:
        host.other, host.hold = b"HTTP/1.1 200 O\r\n", True
        fetching = fetcher(host.name, request_images_timeout_ms=50, image_timeout_ms=300_000)
        with pytest.raises(InvalidImageError, match=r"0\.05 s that the images") as caught:
            await fetching.fill(asking(*(f"{host.url}/{at}" for at in range(64))))
    assert caught.value.field == "messages[0].content[0]"


@pytest.mark.parametrize("paths", ["abc", "aaa"])
async def test_the_bytes_of_a_request_are_bounded(paths: str) -> None:
    async with hosted() as host:
        fetching = fetcher(host.name, max_body_bytes=8)
        await fetching.fill(asking(f"{host.url}/a", f"{host.url}/b"))  # six, from now on cached
        with pytest.raises(InvalidImageError, match=r"together .* 8 bytes") as caught:
            await fetching.fill(asking(*(f"{host.url}/{path}" for path in paths)))
    assert caught.value.field == f"messages[0].content[{paths.index(paths[-1])}]"


async def test_bytes_are_counted_as_they_come() -> None:
    head = b"HTTP/1.1 200 O\r\ncontent-length: 6\r\n\r\n"
    async with hosted() as host:
        host.other, host.hold = head + b"PNG..", True  # neither is ever complete
        with pytest.raises(InvalidImageError, match=r"together .* 8 bytes"):
            await fetcher(host.name, max_body_bytes=8).fill(
                asking(f"{host.url}/a", f"{host.url}/b")
            )


async def test_what_a_url_may_not_contain_is_escaped() -> None:
    async with hosted() as host:
        await fetcher(host.name).fill(asking(f"{host.url}/ä b%20c?d=ö&e"))
    assert host.asked == ["/%C3%A4%20b%20c?d=%C3%B6&e"]


async def test_a_private_address_is_not_connected_to() -> None:
    async with hosted() as host:
        fetching = fetcher(host.name, is_public)
        with pytest.raises(InvalidImageError, match="not on the public internet"):
            await fetching.fill(asking(f"{host.url}/a"))
    assert not host.asked


async def test_an_image_that_cannot_be_fetched_is_a_400_that_names_its_part() -> None:
    async with hosted() as host, serving(ScriptedGateway()) as gateway:
        config = SidecarConfig(gateway=gateway, image_hosts=host.name)
        async with (
            sidecar_of(config) as url,
            AsyncOpenAI(
                base_url=f"{url}/sessions/{KEY}/v1", api_key="static", max_retries=0
            ) as client,
        ):
            image: Any = {"type": "image_url", "image_url": {"url": f"{host.url}/a"}}
            with pytest.raises(BadRequestError, match="not on the public internet") as caught:
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": [image]}]
                )
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("chat/completions", {"type": "image_url", "image_url": {"url": URL}}),
        ("messages", {"type": "image", "source": {"type": "url", "url": URL}}),
        ("messages/count_tokens", {"type": "image", "source": {"type": "url", "url": URL}}),
        ("responses", {"type": "input_image", "image_url": URL}),
        ("responses/input_tokens", {"type": "input_image", "image_url": URL}),
    ],
)
async def test_a_client_that_leaves_ends_the_fetch_of_its_image(
    monkeypatch: pytest.MonkeyPatch, path: str, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(app, "ImageFetcher", partial(ImageFetcher, allowed=lambda _: True))
    async with hosted() as host, serving(ScriptedGateway()) as gateway:
        host.hold, host.other = True, b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"
        limits: dict[str, Any] = {"image_timeout_ms": 600_000, "request_images_timeout_ms": 600_000}
        config = SidecarConfig(gateway=gateway, image_hosts=host.name, **limits)
        async with sidecar_of(config) as url:
            asked = {"messages": [{"role": "user", "content": [given]}], "max_tokens": 8}
            if path.startswith("responses"):
                asked = {"input": [{"role": "user", "content": [given]}]}
            body = json.dumps(asked).replace(URL, f"{host.url}/a").encode()
            _, leaving = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            head = f"POST /sessions/{KEY}/v1/{path} HTTP/1.1\r\nhost: a\r\n"
            leaving.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: host.asked == ["/a"])
            leaving.close()
            await until(host.connections[0].is_closing)


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
