"""Connections that do nothing: calls of others go on, and a handshake has a limited time."""

import asyncio
from pathlib import Path

import psutil
import pytest

from rollmesh.runtime.process.descriptors import raise_descriptor_limit
from rollmesh.runtime.rpc import server
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.processes import running
from tests.runtime.services import NAME, ScriptedService, ask, served

MANY = 2_000
MOST_MB = 150


@pytest.mark.parametrize("sent", [b"", b"PRI * HT", b"\x16\x03\x01\x02\x00\x01"])
async def test_thousands_of_connections_cost_little_and_others_are_answered(
    tmp_path: Path, sent: bytes
) -> None:
    raise_descriptor_limit()
    async with (
        running("router", tmp_path, port=0, data_dir=tmp_path / "router") as router,
        open_channel(router.address) as channel,
    ):
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        process, writers = psutil.Process(router.pid), list[asyncio.StreamWriter]()
        before = process.memory_info().rss
        try:
            for _ in range(MANY):
                _, writer = await asyncio.open_connection("127.0.0.1", router.port)
                writers.append(writer)
                writer.write(sent)
            with typed_errors():
                await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=120)
            async with open_channel(router.address) as other:  # a new connection beside them
                late: router_pb2_grpc.RouterServiceAsyncStub
                late = router_pb2_grpc.RouterServiceStub(other)
                with typed_errors():
                    await late.ListGateways(router_pb2.ListGatewaysRequest(), timeout=120)
            assert (process.memory_info().rss - before) / 2**20 < MOST_MB
        finally:
            for writer in writers:
                writer.close()


@pytest.mark.parametrize("sent", [b"", b"PRI * HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_handshake_that_is_left_open_ends(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    short = dict(server._OPTIONS) | {"grpc.server_handshake_timeout_ms": 200}  # noqa: SLF001
    monkeypatch.setattr(server, "_OPTIONS", list(short.items()))
    async with served(ScriptedService()) as (channel, bound), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", bound.port)
        writer.write(sent)
        while await reader.read(65_536):  # the server closes it; it may send its settings before
            pass
        writer.close()
        await ask(channel, name=NAME)
