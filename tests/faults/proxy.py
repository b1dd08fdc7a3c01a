"""A TCP proxy that fails as networks do: connections fall silent, break or are slow."""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

_CHUNK = 65_536


class Proxy:
    """Between clients and a server."""

    def __init__(self, server: str) -> None:
        """Takes the server's host:port."""
        self._server = server
        self._silenced: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._refusing = False
        self._delay_s = 0.0
        self.address = ""
        """host:port for the clients."""
        self.most = sys.maxsize
        """Bytes that a connection passes in one direction. What comes after them is lost."""
        self.is_full = asyncio.Event()
        """Set when a connection has lost something."""
        self.refused = 0
        """Connections that were closed at once."""

    def silence(self) -> None:
        """Silently stops forwarding on all existing connections."""
        self._silenced |= self._writers

    @contextmanager
    def partitioned(self) -> Iterator[None]:
        """Forwards nothing during the block, and what has waited after it."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Breaks all connections, and closes new ones at once during the block."""
        self._refusing = True
        for writer in self._writers:
            writer.transport.abort()
        try:
            yield
        finally:
            self._refusing = False

    @contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """Delays everything that is forwarded during the block."""
        self._delay_s = seconds
        try:
            yield
        finally:
            self._delay_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection until both of its ends are closed."""
        await self._open.wait()
        far = None if self._refusing else await self._connect()
        if far is None:
            self.refused += 1
            writer.close()
            return
        far_reader, far_writer = far
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, far_writer))
                group.create_task(self._pass(far_reader, writer))
        finally:
            self._writers -= ends - self._silenced

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connects to the server. None if it is away."""
        host, _, port = self._server.rpartition(":")
        with suppress(OSError):
            return await asyncio.open_connection(host, int(port))
        return None

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        with suppress(ConnectionError):  # of one end: the other is told below
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if passed >= self.most:
                    self.is_full.set()
                elif writer not in self._silenced:
                    writer.write(data)
                    await writer.drain()
                passed += len(data)
        if writer not in self._silenced:
            writer.close()

    def close(self) -> None:
        """Closes all connections."""
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def proxy_to(server: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    """Serves a proxy in front of `host:port` until the block ends, to clients over TLS if given."""
    proxy = Proxy(server)
    listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    proxy.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listening.close()
        proxy.close()
