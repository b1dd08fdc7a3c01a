"""A sidecar beside an agent in a sandbox, which has a way out to an HTTP proxy and no other."""

import asyncio
import json
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client
from rollmesh.v1 import router_pb2
from tests.locks import Locks
from tests.mesh.doors.sandbox import PORT, ROUTER, Proxy
from tests.meshes import delivered, scripted_mesh
from tests.paths import ROOT

UNSHARE = ("unshare", "--net", "--user", "--map-root-user")


def no_network() -> str:
    """Why there is no network of its own for a process. Empty if there is one."""
    if shutil.which("unshare") is None:
        return "there is no unshare command"
    done = subprocess.run([*UNSHARE, "true"], check=False, capture_output=True)
    return done.stderr.decode()


@asynccontextmanager
async def sandbox(path: Path, token_file: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *UNSHARE, sys.executable, "-m", "tests.mesh.doors.sandbox", path, token_file,
        cwd=ROOT, stdin=PIPE, stdout=PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(60):
            await process.wait()


async def turn(process: asyncio.subprocess.Process, base_url: str) -> dict[str, Any]:
    """Lets the agent in the sandbox ask once."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(base_url.encode() + b"\n")
    async with asyncio.timeout(120):
        line = await process.stdout.readline()
    said: dict[str, Any] = json.loads(line)
    return said


@pytest.mark.skipif(bool(problem := no_network()), reason=problem)
async def test_an_agent_without_a_network_is_served_and_its_tokens_reach_the_trainer(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    locks = Locks(tmp_path / "locks")
    rules = [("first", "The answer is 42.")]
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, rules, locks=locks) as mesh:
        trainer = replace(mesh.addresses, gateway="", sidecar=f"127.0.0.1:{PORT}")
        proxy, path = Proxy({ROUTER: mesh.address("router")}), tmp_path / "way-out"
        async with (
            Client(trainer) as client,
            proxy.serving(path),
            sandbox(path, locks.token_file("sidecar")) as process,
        ):
            async with client.session() as session:
                said = await turn(process, session.base_url)
                kinds = {one.hello.kind for one in (await client.replicas()).replicas}
                proxy.cut()
                again = await turn(process, session.base_url)
            result = await delivered(client, session)
        assert [one["content"] for one in (said, again)] == ["The answer is 42."] * 2
        assert result.turns == 2
        assert all(one.loss_mask.any() for one in result.trajectories)
        assert proxy.asked == {ROUTER, mesh.address("gateway")}
        assert kinds == {router_pb2.REPLICA_KIND_ENGINE, router_pb2.REPLICA_KIND_GATEWAY}
        assert again["mib"] < 100
