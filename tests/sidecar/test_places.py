"""A sidecar beside an agent elsewhere: behind a path prefix, through a proxy, known by its URL."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.routing import Route

from rollmesh.mesh import GatewayDirectory
from rollmesh.runtime.config import ConfigError
from rollmesh.sidecar import ROUTES, SidecarConfig, advertised, make_app, prefixes
from tests.sidecar.scripted_gateway import KEY, ScriptedGateway, serving, sidecar_of
from tests.sidecar.test_process import port_of

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def test_paths_are_served_below_a_prefix_and_without_it_and_errors_keep_their_form() -> None:
    async with serving(ScriptedGateway()) as address:
        config = SidecarConfig(gateway=address, path_prefix="/team-a/mesh")
        async with sidecar_of(config) as url, httpx2.AsyncClient(base_url=url) as http:
            for root in ("", "/team-a/mesh"):
                path = f"{root}/sessions/{KEY}/v1"
                assert (await http.post(f"{path}/chat/completions", json=BODY)).status_code == 200
                assert (await http.get(f"{root}/healthz")).status_code == 200
                refused = await http.get(f"{path}/messages")
                assert (refused.status_code, refused.json()["type"]) == (405, "error")
                refused = await http.post(f"{path}/messages", content=b"{" * 40_000_000)
                assert (refused.status_code, refused.json()["type"]) == (413, "error")
            assert (await http.get("/team-b/mesh/healthz")).status_code == 404


@pytest.mark.parametrize("prefix", ["", "/agents"])
async def test_the_table_of_routes_has_every_route_and_no_other(prefix: str) -> None:
    config = SidecarConfig(path_prefix=prefix)
    async with aclosing(GatewayDirectory(config.router)) as directory:
        routes = make_app(config, directory).routes
    served = {
        f"{method} {route.path}"
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or {"ANY"}) - {"HEAD"}
    }
    assert len(served) == len(routes) == 2 * len(ROUTES) * (2 if prefix else 1)
    for before in prefixes(prefix):
        assert {name.replace(" ", f" {before}") for name in ROUTES} <= served


@pytest.mark.parametrize(
    "prefix", ["mesh", "/", "/mesh/", "/a//b", "/a?b", "/{x}", "/" + "a" * 200]
)
def test_a_prefix_that_is_no_path_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="path_prefix"):
        SidecarConfig(path_prefix=prefix)


@pytest.mark.parametrize(
    ("advertise", "door"),
    [
        ("", ("127.0.0.1:8000", False, "/mesh")),
        ("10.0.0.1:80", ("10.0.0.1:80", False, "/mesh")),
        ("https://agents.example.org", ("agents.example.org:443", True, "")),
        ("http://agents.example.org/a/b/", ("agents.example.org:80", False, "/a/b")),
        ("https://[::1]:8443/a", ("[::1]:8443", True, "/a")),
    ],
)
def test_a_sidecar_tells_the_router_how_agents_reach_it(advertise: str, door: object) -> None:
    assert advertised(SidecarConfig(advertise=advertise, path_prefix="/mesh"), 8000) == door


@pytest.mark.parametrize(
    "advertise",
    ["ftp://x", "https://", "https://u:p@x", "https://x/?a", "https://x:port", "https://x/{a}"],
)
def test_an_advertised_url_that_is_none_of_http_is_refused(advertise: str) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        advertised(SidecarConfig(advertise=advertise), 8000)


@asynccontextmanager
async def connect_proxy(target: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A proxy that takes CONNECT and leads everywhere to one address. Yields what it was asked."""
    asked: list[bytes] = []
    host, _, port = target.rpartition(":")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).splitlines()[0])
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    server = await asyncio.start_server(lead, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


async def test_a_sidecar_reaches_its_gateway_through_an_http_proxy_only() -> None:
    """Its name is known to the proxy alone."""
    async with (
        asyncio.timeout(60),
        serving(ScriptedGateway()) as address,
        connect_proxy(address) as (proxy, asked),
    ):
        environ = {**os.environ, "https_proxy": proxy}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollmesh.sidecar", "--port", "0", "--gateway",
            "gateway.mesh.invalid:7200",
            stdout=PIPE, env=environ,
        )  # fmt: skip
        try:
            base_url = f"http://127.0.0.1:{await port_of(process)}/sessions/{KEY}/v1"
            async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as agent:
                answer = await agent.chat.completions.create(**BODY)  # type: ignore[call-overload]
        finally:
            process.kill()
            await process.wait()
    assert answer.choices[0].message.content == "Hello"
    assert set(asked) == {b"CONNECT gateway.mesh.invalid:7200 HTTP/1.1"}
