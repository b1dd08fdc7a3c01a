"""`rollmesh tail` against a mesh of real processes."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

from tests.meshes import Mesh
from tests.waiting import until


@asynccontextmanager
async def tail(mesh: Mesh, *flags: str) -> AsyncIterator[Process]:
    addresses = ("--router", mesh.address("router"), "--collector", mesh.address("collector"))
    command = ("-m", "rollmesh.cli.tail", *addresses, *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode()


async def test_sessions_are_printed_as_they_end_also_after_the_collector_was_away(
    mesh: Mesh,
) -> None:
    async with mesh.client() as client:
        async with tail(mesh, "--last-ms=60000") as process:
            async with client.session(group_id="g", group_size=1) as first:
                first.reward = 0.5
            said = await line(process)
            assert f"{first.session_id}  COMPLETED  reward 0.500  turns 0" in said
            assert "group g 0" in said
            await mesh.processes["collector"].kill()
            assert process.stderr is not None
            async with asyncio.timeout(60):
                away = [await process.stderr.readline()]
            assert b"rollmesh tail" in away[0]
            await mesh.start("collector")
            async with client.session(metadata={"error": "a\x1b[2Jb"}) as second:
                pass
            said = await line(process)
            assert second.session_id in said
            assert said.endswith("a [2Jb\n")
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
            away += (await process.stderr.read()).splitlines(keepends=True)
            assert all(one != other for one, other in pairwise(away))  # a cause is told once


async def test_lines_are_chosen_by_run_and_outcome(mesh: Mesh) -> None:
    async with mesh.client() as client:
        for run_id in ("a", "b"):
            async with client.session(run_id=run_id):
                pass

        async def stored() -> bool:
            return (await client.stats()).sessions == 2

        await until(stored)
        flags = ("--json", "--last-ms=600000", "--run-id=b", "--outcome=COMPLETED")
        async with tail(mesh, *flags) as process:
            found = json.loads(await line(process))
    assert (found["run_id"], found["outcome"], found["reward"]) == ("b", "COMPLETED", None)
