"""A TCP proxy whose connections can fall silent, as where a host has lost its power."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_CHUNK = 65_536


class Proxy:
    """Between clients and a server."""

    def __init__(self, server: str) -> None:
        """Takes the server's host:port."""
        self._server = server
        self._silenced: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        """host:port for the clients."""

    def silence(self) -> None:
        """Silently stops forwarding on all existing connections."""
        self._silenced |= self._writers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection until both of its ends are closed."""
        host, _, port = self._server.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, far_writer}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass(reader, far_writer))
            group.create_task(self._pass(far_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # of one end: the other is told below
            while data := await reader.read(_CHUNK):
                if writer not in self._silenced:
                    writer.write(data)
                    await writer.drain()
        if writer not in self._silenced:
            writer.close()

    def close(self) -> None:
        """Closes all connections."""
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def proxy_to(server: str) -> AsyncIterator[Proxy]:
    """Serves a proxy in front of `host:port` until the block ends."""
    proxy = Proxy(server)
    listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listening.close()
        proxy.close()
