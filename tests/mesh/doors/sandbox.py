"""A sandbox: a network of its own, from which one socket leads to an HTTP proxy, and nothing else.

It is `unshare --net` around `python -m tests.mesh.doors.sandbox SOCKET TOKEN_FILE`, which runs a
sidecar and, for each base URL on its standard input, one turn of an agent.
"""

import array
import asyncio
import fcntl
import json
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

PORT = 8000
ROUTER = "router.mesh.invalid:7100"
"""Only the proxy knows its name."""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


async def pipe(reader: StreamReader, writer: StreamWriter) -> None:
    """Passes bytes on until the end."""
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class Proxy:
    """Takes CONNECT on a socket of the file system."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self.asked: set[str] = set()
        """Where it was asked to connect to."""
        self._open: set[StreamWriter] = set()

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._lead, path):
            yield
            self.cut()

    def cut(self) -> None:
        """Cuts all connections."""
        for writer in self._open:
            writer.transport.abort()

    async def _lead(self, reader: StreamReader, writer: StreamWriter) -> None:
        method, target, _ = (await reader.readuntil(b"\r\n\r\n")).split(maxsplit=2)
        assert method == b"CONNECT"
        self.asked.add(target.decode())
        host, _, port = self._names.get(target.decode(), target.decode()).rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self._open |= {writer, back}
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(pipe(reader, back), pipe(there, writer))
        self._open -= {writer, back}


def raise_loopback() -> None:
    """Brings up the loopback interface of this network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", b"lo".ljust(16, b"\0") + bytes(24))
        fcntl.ioctl(any_socket, _GET_FLAGS, request)
        request[16] |= _UP
        fcntl.ioctl(any_socket, _SET_FLAGS, request)


async def turn(base_url: str) -> dict[str, Any]:
    """An agent that knows its base URL alone. The key is in it."""
    async with AsyncOpenAI(base_url=base_url, api_key="any") as agent:
        reply = await agent.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "first"}]
        )
    return {"content": reply.choices[0].message.content, "id": reply.id}


async def main(path: str, token_file: str) -> None:
    raise_loopback()

    async def lead(reader: StreamReader, writer: StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(path)
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    way_out = await asyncio.start_server(lead, "127.0.0.1", 0)
    proxy = f"http://127.0.0.1:{way_out.sockets[0].getsockname()[1]}"
    sidecar = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.sidecar", f"--port={PORT}", f"--router={ROUTER}",
        "--register=false", f"--token-file={token_file}",
        env={**os.environ, "https_proxy": proxy}, stdout=PIPE,
    )  # fmt: skip
    assert sidecar.stdout is not None
    await sidecar.stdout.readline()
    try:
        for base_url in sys.stdin:
            said = await turn(base_url.strip())
            status = Path(f"/proc/{sidecar.pid}/status").read_text()
            said["mib"] = int(status.partition("VmRSS:")[2].split()[0]) // 1024
            sys.stdout.write(f"{json.dumps(said)}\n")
            sys.stdout.flush()
    finally:
        sidecar.terminate()
        await sidecar.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
