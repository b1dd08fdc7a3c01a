"""HTTPS with the official SDKs, certificates that change, and handshakes that do not end."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from rollmesh.runtime.config import ConfigError
from rollmesh.sidecar import SidecarConfig, certificate_of
from tests.lazily import anthropic
from tests.sidecar.reading import counted
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    answering,
    done,
    serving,
    sidecar_of,
    text,
)
from tests.sidecar.test_process import port_of, started

pytest.importorskip("cryptography", reason="it makes the certificates")
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.runtime.access.tls._LOOK_MS", 0)


@pytest.fixture
def authority(tmp_path: Path) -> Any:
    from tests.sidecar.certificates import Authority  # needs cryptography

    return Authority.make(tmp_path / "certificates")


@asynccontextmanager
async def served(
    authority: Any, gateway: ScriptedGateway | None = None, **settings: Any
) -> AsyncIterator[int]:
    settings["https_certificate_file"] = str(authority.certificate)
    settings["https_key_file"] = str(authority.key_file)
    async with asyncio.timeout(60), serving(gateway or ScriptedGateway()) as address:
        async with sidecar_of(SidecarConfig(gateway=address, **settings)) as url:
            yield int(url.rpartition(":")[2])


@asynccontextmanager
async def connected(
    port: int, trust: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def shown(port: int, trust: ssl.SSLContext) -> str:
    """The name on the certificate that a new connection is shown."""
    async with connected(port, trust) as (_, writer):
        certificate: Any = writer.get_extra_info("peercert")
    return str(certificate["subject"][0][0][1])


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_the_official_sdks_are_answered_whole_and_streamed(authority: Any) -> None:
    gateway = ScriptedGateway()
    gateway.script = answering(text("Hel"), text("lo"), done("Hello"))
    async with served(authority, gateway) as port, AsyncExitStack() as stack:
        url = f"https://127.0.0.1:{port}/sessions/{KEY}"
        one = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="any", max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(verify=authority.trust()),
            )
        )  # fmt: skip
        other = await stack.enter_async_context(
            anthropic.AsyncAnthropic(
                base_url=url, api_key="any", max_retries=0,
                http_client=anthropic.DefaultAsyncHttpxClient(verify=authority.trust()),
            )
        )  # fmt: skip
        for _ in range(2):
            stream = await one.chat.completions.create(model="m", messages=ASK, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == "Hello"
            said = await other.messages.create(model="m", max_tokens=9, messages=ASK)
            assert said.content[0].type == "text"
        with pytest.raises(openai.APIConnectionError):
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="any", max_retries=0
            ) as stranger:
                await stranger.chat.completions.create(model="m", messages=ASK)


async def test_the_process_serves_https_on_the_loop_that_it_runs(authority: Any) -> None:
    files = authority.certificate, authority.key_file
    names = "--https-certificate-file", "--https-key-file"
    flags = [f"{name}={file}" for name, file in zip(names, files, strict=True)]
    gateway = ScriptedGateway()
    gateway.script = answering(text("Hel"), text("lo"), done("Hello"))
    async with (
        asyncio.timeout(60),
        serving(gateway) as address,
        started("--port=0", f"--gateway={address}", *flags) as process,
        openai.AsyncOpenAI(
            base_url=f"https://127.0.0.1:{await port_of(process)}/sessions/{KEY}/v1",
            api_key="any",
            http_client=openai.DefaultAsyncHttpxClient(verify=authority.trust()),
            max_retries=0,
        ) as agent,
    ):
        for _ in range(2):
            answer = await agent.chat.completions.create(model="m", messages=ASK)
            assert answer.choices[0].message.content == "Hello"
        port = int(str(agent.base_url).split(":")[2].split("/")[0])
        for _ in range(3):
            async with connected(port) as (reader, writer):  # no TLS
                writer.write(HEALTH)
                assert await ended(reader) in {b"", b"\x15\x03\x01\x00\x02\x02\x46"}
        stream = await agent.chat.completions.create(model="m", messages=ASK, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "Hello"
        process.terminate()
        assert await process.wait() == 0


async def test_a_certificate_that_changes_is_shown_without_a_restart(authority: Any) -> None:
    async with served(authority) as port:
        trust = authority.trust()
        async with connected(port, trust) as (reader, writer):
            assert await shown(port, trust) == "one"
            authority.issue("two")
            assert await shown(port, trust) == "two"
            kept = authority.key_file.read_bytes()
            authority.key_file.write_bytes(kept.replace(b"PRIVATE", b"SPOILT"))
            assert await shown(port, trust) == "two"  # a pair that does not fit is not taken
            authority.key_file.write_bytes(kept)
            authority.issue("three")
            authority.key_file.chmod(0o644)
            assert await shown(port, trust) == "two"
            authority.key_file.chmod(0o600)  # as the log asks for
            assert await shown(port, trust) == "three"
            writer.write(HEALTH)  # the connection of the first certificate is still there
            assert b" 200 " in await reader.readuntil(b"\r\n")


def test_a_pair_that_does_not_fit_is_refused_at_the_start(authority: Any) -> None:
    certificate_of(str(authority.certificate), str(authority.key_file))
    authority.key_file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"https_key_file: .* chmod 0600"):
        certificate_of(str(authority.certificate), str(authority.key_file))
    authority.key_file.chmod(0o600)
    authority.certificate.write_bytes(b"")
    with pytest.raises(ConfigError, match="https_certificate_file"):
        certificate_of(str(authority.certificate), str(authority.key_file))


async def test_handshakes_take_places_and_end(authority: Any) -> None:
    before = counted("refused", reason="TLS_HANDSHAKE")
    async with served(authority, max_connections=2, head_timeout_ms=500) as port:
        async with connected(port) as (silent, _), connected(port) as (half, writer):
            writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
            async with connected(port) as (third, _):
                assert await ended(third) == b""  # no place for it
            assert await ended(silent) == b""
            assert await ended(half) == b""
        async with connected(port, authority.trust()) as (reader, writer):
            writer.write(HEALTH)
            assert b" 200 " in await reader.readuntil(b"\r\n")
        async with connected(port) as (plain, writer):
            writer.write(HEALTH)  # plain HTTP
            assert b"HTTP/1.1" not in await ended(plain)
    after = counted("refused", reason="TLS_HANDSHAKE")
    assert after >= before + 3


async def test_a_connection_over_tls_has_the_bounds_of_any_other(authority: Any) -> None:
    async with served(authority, max_headers=20, max_connections=2) as port:
        trust = authority.trust()

        async def is_refused() -> bool:
            async with connected(port, trust) as (reader, writer):
                writer.write(b"GET /healthz HTTP/1.1\r\n" + b"A: b\r\n" * 30)
                head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
            assert b" 431 " in head.splitlines()[0]
            return bool(orjson.loads(body)["error"]["code"] == "headers_too_large")

        for _ in range(4):  # each gives its place back
            assert await is_refused()
        async with AsyncExitStack() as stack:
            for _ in range(4):  # each takes the place of an idle one
                reader, writer = await stack.enter_async_context(connected(port, trust))
                writer.write(HEALTH)
                assert b" 200 " in await reader.readuntil(b"\r\n")


async def test_a_server_that_stops_does_not_wait_for_handshakes(authority: Any) -> None:
    async with AsyncExitStack() as stack:
        async with served(authority, head_timeout_ms=60_000, grace_ms=60_000) as port:
            reader, _ = await stack.enter_async_context(connected(port))
        assert await ended(reader) == b""
