"""Hostile clients in a separate process, on their own connections.

They send requests that no well-behaved client sends, a few per second, each bounded in size and
time, to the sidecar's HTTP server and to every RPC of every service. Their responses do not matter
here. The effect on other clients does. Arguments: the mesh's addresses as JSON, and a seed. The
process ends when its standard input does.
"""

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import httpx2

from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import (
    collector_pb2,
    gateway_pb2,
    router_pb2,
)

_PAUSE_S = 0.2
_LIMIT_S = 10.0
_SESSION_TURNS = 50
_SERVICES = {
    "router": router_pb2.DESCRIPTOR,
    "gateway": gateway_pb2.DESCRIPTOR,
    "collector": collector_pb2.DESCRIPTOR,
}


def _chat(**fields: Any) -> bytes:
    body = {"model": "policy", "messages": [{"role": "user", "content": "go on"}], **fields}
    return json.dumps(body).encode()


def _results(count: int) -> list[dict[str, Any]]:
    """Returns tool results that belong to no tool call."""
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": "x"} for at in range(count)]
    return [{"role": "user", "content": "a"}, *results]


BODIES: tuple[bytes, ...] = (
    b"{",
    b"\xff\xfe\x00",
    b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
    _chat(messages=_results(5_000)),
    _chat(messages=[{"role": "user", "content": "word " * 400_000}]),
    _chat(n=16, max_tokens=4),
    _chat(n=1_000_000),
    _chat(seed=2**63 - 1, n=4, max_tokens=2),
    _chat(model="m" * 1_000_000),
    _chat(temperature="NaN"),
    _chat(tools=[{"type": "function", "function": {"name": "f" * 500_000}}]),
    _chat(stop=["x"] * 1_000),
    _chat(messages=[{"role": "user", "content": "\ud800"}]),
    _chat(messages=[]),
)
RAW: tuple[bytes, ...] = (
    b"GET /healthz HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n",
    b"GET /" + b"u" * 1_000_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 500,
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n12",
    b"\x00" * 1_000,
    b"GET /healthz HTT",
)


class Hostile:
    """All attackers."""

    def __init__(self, addresses: MeshAddresses, client: Client, seed: int) -> None:
        """Takes the addresses, a client of the mesh, and the seed."""
        self._addresses = addresses
        self._client = client
        self._random = random.Random(seed)
        self._session: Session | None = None
        self._turns = 0
        self.stopping = False

    async def run(self) -> None:
        """Attacks until stopped."""
        attacks: list[Callable[[], Awaitable[None]]]
        attacks = [self._body, self._stream_and_leave, self._raw, self._rpc]
        while not self.stopping:
            attack = self._random.choice(attacks)
            with suppress(TimeoutError, OSError, RollmeshError, grpc.RpcError, httpx2.HTTPError):
                async with asyncio.timeout(_LIMIT_S):
                    await attack()
            await asyncio.sleep(_PAUSE_S)
        if self._session is not None:
            with suppress(RollmeshError):
                await self._client.close_session(self._session, outcome="ABORTED")

    async def _opened(self) -> Session:
        if self._session is None or self._turns >= _SESSION_TURNS:
            if self._session is not None:
                await self._client.close_session(self._session, outcome="ABORTED")
            self._session = await self._client.open_session(gateway_pb2.CreateSessionRequest())
            self._turns = 0
        self._turns += 1
        return self._session

    async def _body(self) -> None:
        await self._post(self._random.choice(BODIES))

    async def _post(self, body: bytes) -> None:
        session = await self._opened()
        headers = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
        url = f"{session.base_url}/chat/completions"
        async with httpx2.AsyncClient(timeout=_LIMIT_S) as http:
            await http.post(url, content=body, headers=headers)

    async def _stream_and_leave(self) -> None:
        session = await self._opened()
        headers = {"authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with httpx2.AsyncClient(timeout=_LIMIT_S) as http:
            body = _chat(stream=True)
            async with http.stream("POST", url, content=body, headers=headers) as answer:
                async for _ in answer.aiter_raw():
                    return

    async def _raw(self) -> None:
        host, _, port = self._addresses.sidecar.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self._random.choice(RAW))
            await writer.drain()
            async with asyncio.timeout(1):
                await reader.read(65_536)
        finally:
            writer.close()

    async def _rpc(self) -> None:
        """Sends arbitrary bytes instead of a message to a random RPC of a random service."""
        name = self._random.choice(list(_SERVICES))
        (service,) = _SERVICES[name].services_by_name.values()
        method = self._random.choice(list(service.methods))
        async with open_channel(getattr(self._addresses, name)) as channel:
            call: Any = channel.stream_stream(f"/{service.full_name}/{method.name}")
            sent = [self._random.randbytes(self._random.choice([0, 1, 30, 4_000]))]
            async for _ in call(iter(sent), timeout=2):
                return


async def main(addresses: str, seed: str) -> None:
    """Runs the attackers."""
    at = MeshAddresses.from_json(addresses)
    async with Client(at) as client, asyncio.TaskGroup() as group:
        hostile = Hostile(at, client, int(seed))
        group.create_task(hostile.run())
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        hostile.stopping = True


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
