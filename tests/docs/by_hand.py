"""Starts five services by hand and lets an agent ask: `python -m tests.docs.by_hand FOLDER`.

A program of its own, so that a test can run it in a network of its own, in which all ports are
free. FOLDER is where the services are started. If it has a mesh file, each is given that.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.config import LOCAL_ROUTER

SCRIPTED = ("--backend=scripted", "--vocabulary-tokens=500", "--reply-tokens=4")
_LIMIT_S = 200.0
# The last to start is the one for which all others wait.
_ORDER = ("sidecar", "engine", "gateway", "collector", "router")


async def main(folder: Path) -> None:
    """Writes how many tokens an agent was answered."""
    os.chdir(folder)
    shared = ("--config=mesh.toml",) if Path("mesh.toml").exists() else ()
    async with asyncio.timeout(_LIMIT_S), AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                _running(service, *shared, *(SCRIPTED if service == "engine" else ()))
            )
            for service in _ORDER
        ]
        for process in processes:
            await _ready(process)
        async with (
            Client(MeshAddresses(router=LOCAL_ROUTER)) as client,
            client.session() as session,
        ):
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
                answer = await agent.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hello"}]
                )
        assert answer.usage is not None
        sys.stdout.write(f"{answer.usage.completion_tokens}\n")


@asynccontextmanager
async def _running(service: str, *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.cli", service, *flags, stdout=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _ready(process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"READY"):
            return
    raise AssertionError("a service ended before it was ready; its log has the reason")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
