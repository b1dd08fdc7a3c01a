"""Connections that do nothing: calls of others go on, and all of them end by themselves."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.runtime.access import CallerConfig, Identity
from rollmesh.runtime.process import raise_descriptor_limit
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.processes import ServiceProcess, running
from tests.runtime.rpc.http2 import GOAWAY, PREFACE, SETTINGS, Peer
from tests.runtime.services import NAME, ScriptedService, ask, served
from tests.trial_certificates import copy_certificates
from tests.waiting import until

MANY = 2_000
MOST_MB = 150
SOON_MS = 5_000
PLAIN, TLS = "plain text", "TLS"


def client_hello() -> bytes:
    """The first message of a TLS handshake."""
    sent = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="rollmesh")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def beginnings() -> list[bytes]:
    """What a connection may say before it falls silent: of HTTP/2, of TLS, and nothing."""
    hello = client_hello()
    return [b"", PREFACE[:8], PREFACE, hello[:6], hello[: len(hello) // 2], hello]


@pytest.fixture(params=[PLAIN, TLS])
def shown(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings of a router and of a trainer that calls it."""
    if request.param == PLAIN:
        return {"router": {}, "trainer": {}}
    certs = tmp_path / "certs"
    copy_certificates(certs)
    return {
        role: {
            "tls_ca_file": str(certs / "ca.crt"),
            "tls_certificate_file": str(certs / f"{role}.crt"),
            "tls_key_file": str(certs / f"{role}.key"),
        }
        for role in ("router", "trainer")
    }


async def call(router: ServiceProcess, identity: Identity) -> None:
    """Makes a call over a new connection."""
    async with open_channel(router.address, identity=identity, own_connection=True) as channel:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        with typed_errors():
            await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=60)


async def test_thousands_of_handshakes_cost_little_delay_no_caller_and_end(
    tmp_path: Path, shown: dict[str, dict[str, Any]]
) -> None:
    raise_descriptor_limit()
    identity = Identity(CallerConfig(**shown["trainer"]))
    flags = {"data_dir": tmp_path / "router", "handshake_timeout_ms": SOON_MS, **shown["router"]}
    async with running("router", tmp_path, **flags) as router, AsyncExitStack() as stack:
        process, kinds = psutil.Process(router.pid), beginnings()
        await call(router, identity)
        files, held = process.num_fds(), process.memory_info().rss
        for at in range(MANY):
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
            stack.callback(writer.close)
            writer.write(kinds[at % len(kinds)])
            if at % 200 == 0:
                await call(router, identity)
        await call(router, identity)
        assert (process.memory_info().rss - held) / 2**20 < MOST_MB
        await until(lambda: process.num_fds() < files + 16)  # without a word of the clients
        await call(router, identity)


@pytest.mark.parametrize("sent", range(6))
async def test_a_handshake_that_is_left_open_ends(
    sent: int, shown: dict[str, dict[str, Any]]
) -> None:
    settings = {"handshake_timeout_ms": 200, **shown["router"]}
    async with served(ScriptedService(), **settings) as (_, bound), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
        writer.write(beginnings()[sent])
        while await read(reader):  # the server closes it. It may say something before
            pass
        writer.close()


async def read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65_536)
    except ConnectionResetError:
        return b""


@asynccontextmanager
async def silent_peer(port: int, trainer: dict[str, Any]) -> AsyncIterator[Peer]:
    """A connection of HTTP/2 that makes no call."""
    context = None
    if trainer:
        context = ssl.create_default_context(cafile=trainer["tls_ca_file"])
        context.load_cert_chain(trainer["tls_certificate_file"], trainer["tls_key_file"])
        context.set_alpn_protocols(["h2"])
    name = "rollmesh" if trainer else None
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=name
    )
    try:
        writer.write(PREFACE)
        peer = Peer(reader, writer)
        peer.send(SETTINGS)
        yield peer
    finally:
        writer.transport.abort()  # asyncio waits for close_notify, gRPC sends none


async def test_a_connection_without_calls_is_closed_and_clients_connect_again(
    shown: dict[str, dict[str, Any]],
) -> None:
    settings = {"idle_timeout_ms": 500, **shown["router"], "tls_client_certificates": False}
    identity = Identity(CallerConfig(**shown["trainer"]))
    async with served(ScriptedService(), **settings) as (_, bound), asyncio.timeout(60):
        address = f"127.0.0.1:{bound.port}"
        async with open_channel(address, identity=identity, own_connection=True) as channel:
            await ask(channel, name=NAME)
            async with silent_peer(bound.port, shown["trainer"]) as peer:
                kinds = [kind async for kind, _ in peer.frames()]
            assert GOAWAY in kinds
            await ask(channel, name=NAME)


async def let_in(port: int, trainer: dict[str, Any]) -> bool:
    """Whether the server answers one more connection, which then ends."""
    try:
        async with silent_peer(port, trainer) as peer:
            return await anext(peer.frames(), None) is not None
    except OSError:  # closed in the handshake of TLS
        return False


async def test_connections_are_bounded_and_open_ones_continue(
    shown: dict[str, dict[str, Any]],
) -> None:
    settings = {"max_connections": 2, **shown["router"], "tls_client_certificates": False}
    trainer = shown["trainer"]
    async with served(ScriptedService(), **settings) as (_, bound), asyncio.timeout(60):
        address = f"127.0.0.1:{bound.port}"
        async with open_channel(
            address, identity=Identity(CallerConfig(**trainer)), own_connection=True
        ) as channel:
            await ask(channel, name=NAME)
            async with silent_peer(bound.port, trainer) as second:
                await anext(second.frames())
                assert not await let_in(bound.port, trainer)
                await ask(channel, name=NAME)
            await until(lambda: let_in(bound.port, trainer))
