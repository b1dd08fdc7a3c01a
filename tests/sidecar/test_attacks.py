"""A sidecar process under every attack at once: agents of others notice nothing."""

import asyncio
import resource
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.sidecar.scripted_gateway import KEY, ScriptedGateway, serving
from tests.sidecar.test_process import port_of, started
from tests.waiting import until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
PIECE = b"a" * 65_536
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "one header": (HEAD + b"X-Long: ", PIECE),
    "many headers": (HEAD, b"A: b\r\n" * 10_000),
    "a URL": (b"GET /", PIECE),
    "trailers": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n" * 10_000),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + PIECE + b"\r\n"),
    "pipelined requests": (b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
    "JSON": (
        HEAD + b"Content-Length: 30000000\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n[",
        b"[]," * 20_000,
    ),
    "no HTTP": (b"\x16\x03\x01", PIECE),
}
SLOW = {
    "silent": b"",
    "half a head": HEAD + b"X-Slow",
    "half a body": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
}
EACH = 15
"""Connections of each slow kind."""


async def flood(port: int, begin: bytes, more: bytes) -> None:
    """Sends without end, again and again, until it is cancelled."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(begin)
                for _ in range(200):
                    writer.write(more)
                    await writer.drain()
                await reader.read(100_000)
            finally:
                writer.transport.abort()


async def open_slow(port: int, begin: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    await writer.drain()
    return writer


def resident_mib(process: Process) -> float:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@asynccontextmanager
async def sidecar(*flags: str) -> AsyncIterator[tuple[Process, int, Callable[[], Awaitable[None]]]]:
    """Yields a process, its port, and an agent's turn."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(120))
        address = await stack.enter_async_context(serving(ScriptedGateway()))
        process = await stack.enter_async_context(started("--gateway", address, *flags))
        port = await port_of(process)
        base_url = f"http://127.0.0.1:{port}/sessions/{KEY}/v1"
        agent = await stack.enter_async_context(
            AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=60)
        )

        async def turn() -> None:
            answer = await agent.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}]
            )
            assert answer.choices[0].message.content == "Hello"

        await turn()
        yield process, port, turn


async def test_agents_get_their_answers_under_every_attack_at_once() -> None:
    async with sidecar("--max-connections-per-address", "200") as (process, port, turn):
        before = resident_mib(process)
        slow = [await open_slow(port, begin) for begin in SLOW.values() for _ in range(EACH)]
        floods = [asyncio.ensure_future(flood(port, *one)) for one in FLOODS.values()]
        try:
            for _ in range(5):
                await asyncio.gather(*(turn() for _ in range(4)))
            grown = resident_mib(process) - before
        finally:
            for one in floods:
                one.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            for writer in slow:
                writer.transport.abort()
        assert process.returncode is None
        assert grown < 200  # the bodies that are being received, above all
        await turn()


async def test_a_sidecar_without_file_descriptors_serves_again_once_there_are_some() -> None:
    async with sidecar() as (process, port, turn):
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard  # it takes what it is allowed
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
        held = [await open_slow(port, b"") for _ in range(100)]
        await turn()  # on the connection that it has
        for writer in held:
            writer.transport.abort()

        async def answers() -> bool:
            with suppress(httpx2.HTTPError):
                async with httpx2.AsyncClient(timeout=5) as http:
                    url = f"http://127.0.0.1:{port}/healthz"
                    return (await http.get(url)).status_code == 200
            return False

        await until(answers)
        assert process.returncode is None


@pytest.mark.parametrize("name", ["silent", "half a head", "half a body", "half a chunk"])
async def test_a_slow_client_is_cut_off_and_a_waiting_client_is_admitted(name: str) -> None:
    flags = ("--max-connections", "10", "--head-timeout-ms", "300", "--body-idle-timeout-ms", "300")
    async with sidecar(*flags) as (_, port, _):
        slow = [await open_slow(port, SLOW[name]) for _ in range(20)]

        async def is_admitted() -> bool:
            with suppress(httpx2.HTTPError):
                async with httpx2.AsyncClient(timeout=30) as http:
                    url = f"http://127.0.0.1:{port}/healthz"
                    return (await http.get(url)).status_code == 200
            return False

        await until(is_admitted)
        for writer in slow:
            writer.transport.abort()
