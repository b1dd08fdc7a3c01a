"""vLLM and SGLang as processes that an engine attaches to, and that tests kill and start again."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

from tests.paths import ROOT
from tests.processes import reserved_port
from tests.waiting import until

EXTENSION = "rollmesh.engine.vllm.worker_extension.WeightReceiver"
_START_S = 600.0
_SGLANG = ROOT / ".venv-sglang"
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its path: on a CPU, `uni` becomes a worker that busy-waits and starves control calls."""


class VllmServer:
    """vLLM on a port that stays its own while it is down."""

    backend = "vllm-http"
    flags: tuple[str, ...] = (
        "--enable-scale-out", "--worker-extension-cls", EXTENSION, "--max-logprobs", "257",
    )  # fmt: skip
    """Those with which an attached server can do all that it can."""

    def __init__(self, holder: socket.socket, log: Path) -> None:
        self.port = holder.getsockname()[1]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, model: Path, *flags: str, **environment: str) -> None:
        """Starts it. `environment` adds to its environment, or empties a variable."""
        given = ("--port", str(self.port), *self.flags, *flags)
        command = [sys.executable, "-m", *self._command(model), *given]
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, **self._environment(), **environment},
                start_new_session=True, stdout=output, stderr=output,
            )  # fmt: skip

    def _command(self, model: Path) -> list[str]:
        return [
            # `vllm serve` without its command line, which looks for a package named vllm.
            "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--max-model-len", "2048", "--enforce-eager", "--dtype", "float32",
            "--max-num-seqs", "64", "--distributed-executor-backend", _EXECUTOR,
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip

    async def until_healthy(self) -> None:
        await until(lambda: asyncio.to_thread(self._is_healthy), limit_s=_START_S)

    async def kill(self) -> None:
        """SIGKILL to the server and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def rename(self, name: str) -> None:
        """Names the weights, as another process would."""
        body: dict[str, str | bool] = {"new_version": name}
        if self.backend == "sglang":
            body["abort_all_requests"] = False
        await self.call("/update_weight_version", json.dumps(body).encode())

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
        except (OSError, AssertionError):  # SGLang answers 503 while it starts
            return False
        return True


class SglangServer(VllmServer):
    """SGLang as published, on a CPU: `sitecustomize` replaces its GPU packages."""

    backend = "sglang"
    flags = ()

    def _command(self, model: Path) -> list[str]:
        assert (_SGLANG / ".ready").exists(), "SGLang is missing: run `make .venv-sglang/.ready`"
        return [
            "sglang.launch_server", "--model-path", str(model), "--device", "cpu",
            "--dtype", "float32", "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--context-length", "2055", "--max-total-tokens", "40000",
            "--max-running-requests", "64", "--sleep-on-idle",
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        folders = (_SGLANG, Path(__file__).parent / "sglang_on_cpu")
        return {
            "PYTHONPATH": os.pathsep.join(map(str, folders)), "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip


@asynccontextmanager
async def server_of(kind: type[VllmServer], folder: Path) -> AsyncIterator[VllmServer]:
    """A server that is not started yet, and is killed at the end."""
    with reserved_port() as holder:
        server = kind(holder, folder / "server.log")
        try:
            yield server
        finally:
            await server.kill()
