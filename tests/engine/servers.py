"""`vllm serve` as a process that an engine attaches to, and that tests kill and start again."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

from tests.processes import reserved_port
from tests.waiting import until

EXTENSION = "rollmesh.engine.vllm.worker_extension.WeightReceiver"
_START_S = 600.0
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its path: on a CPU, `uni` becomes a worker that busy-waits and starves control calls."""
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


class VllmServer:
    """A vLLM server on a port that stays its own while it is down."""

    def __init__(self, holder: socket.socket, log: Path) -> None:
        self.port = holder.getsockname()[1]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, model: Path, *flags: str, **environment: str) -> None:
        """Starts it. `environment` adds to its environment, or empties a variable."""
        command = [
            # `vllm serve` without its command line, which looks for a package named vllm.
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "2048",
            "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "64",
            "--distributed-executor-backend", _EXECUTOR, *flags,
        ]  # fmt: skip
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True, stdout=output, stderr=output,
            )  # fmt: skip

    async def until_healthy(self) -> None:
        await until(lambda: asyncio.to_thread(self._is_healthy), limit_s=_START_S)

    async def kill(self) -> None:
        """SIGKILL to the server and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def call(self, path: str, body: bytes | None = None) -> str:
        """Calls a route, with POST if there is a body."""
        return await asyncio.to_thread(self._call, path, body)

    def _call(self, path: str, body: bytes | None = None) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            return text

    def _is_healthy(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, self._log.read_text()[-4000:]
        try:
            self._call("/health")
        except OSError:
            return False
        return True


@asynccontextmanager
async def vllm_server(folder: Path) -> AsyncIterator[VllmServer]:
    """A server that is not started yet, and is killed at the end."""
    with reserved_port() as holder:
        server = VllmServer(holder, folder / "vllm-server.log")
        try:
            yield server
        finally:
            await server.kill()


FLAGS = ("--enable-scale-out", "--worker-extension-cls", EXTENSION, "--max-logprobs", "257")
"""Those with which an attached server can do all that it can."""
