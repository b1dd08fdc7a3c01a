"""Addresses that come over the wire, and what is dialled."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.runtime.errors import InvalidFieldError, RemoteError
from rollmesh.runtime.rpc import check_address, open_channel, target_of, typed_errors

REFUSED = """
unix:/tmp/x unix:///tmp/x unix-abstract:x dns:///a:1 dns://8.8.8.8/a:1 xds:///a vsock:2:80
ipv4:10.0.0.1:80 ipv4:10.0.0.1:80,10.0.0.2:80 ipv6:[::1]:80 unix:80 xds:443 UNIX:80 http://a:1
a:1/x a:1?x a:1#x user@a:1 a%2f:1 [fe80::1%25eth0]:80 a a: :1 a:0 a:65536 a:99999999999999999999
a:-1 a:+1 a:1:2 ::1:80 [::]:80 0.0.0.0:80 224.0.0.1:80 [ff02::1]:80 [1.2.3.4]:80 [a]:80
256.1.1.1:80 1.2.3:80 2130706433:80 0x7f.1:80 a..b:1 -a:1 a-:1 .a:1 \u00e4:1 a:\u0661
0x7f000001:80
"""


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "[::1]:65535",
        "[fe80::1:2]:80",
        "gateway:7400",
        "gateway-0.gateways.mesh.svc.cluster.local.:7400",
        "rollmesh_gateway_1:7400",
        "7.example.org:80",
    ],
)
def test_what_names_one_host_and_port_is_taken(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        pytest.param("", id="empty"),
        *REFUSED.split(),
        pytest.param("a b:1", id="a blank"),
        pytest.param("a:1\n", id="a line end"),
        pytest.param("a\0:1", id="a zero byte"),
        pytest.param("a" * 64 + ":1", id="a long label"),
        pytest.param("a." * 130 + "a:1", id="a long name"),
    ],
)
def test_what_names_anything_else_is_refused(address: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check_address(address, "hello.address")
    assert caught.value.field == "hello.address"
    assert len(caught.value.message) < 1500


async def test_no_scheme_but_tcp_is_dialled(tmp_path: Path) -> None:
    path, strangers = tmp_path / "socket", list[object]()

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        strangers.append(writer)
        writer.close()

    async with await asyncio.start_unix_server(note, path):
        for address in (f"unix:{path}", f"unix://{path}"):
            async with open_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                probe = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                with pytest.raises(RemoteError) as caught, typed_errors():
                    await probe
                assert caught.value.code == "UNAVAILABLE"
        reader, writer = await asyncio.open_unix_connection(path)
        assert not await reader.read()  # the listener was there
        writer.close()
    assert len(strangers) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_accepted_addresses_can_be_dialled(host: str) -> None:
    if host == "[::1]" and not _has_ipv6():
        pytest.skip("this host has no ::1")
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    try:
        async with open_channel(f"{host}:{port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), 30)
    finally:
        await server.stop(0)
    assert target_of(f"{host}:{port}").startswith("dns:///")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
