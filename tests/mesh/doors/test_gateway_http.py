"""Gateways that serve agents in their own process."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.client import Client, MeshAddresses
from tests.meshes import Mesh, delivered, scripted_mesh

SAID: list[Any] = [{"role": "user", "content": "What is 6 times 7?"}]
RULES = [("What is 6 times 7?", "The answer is 42.")]
TIMEOUT_S = 300


@asynccontextmanager
async def gateway(
    mesh: Mesh, name: str, relay: str = "", **flags: object
) -> AsyncIterator[tuple[Any, int]]:
    """Runs `rollmesh gateway --http 0`. Yields the process and the port of its HTTP."""
    settings = {
        "port": 0,
        "gateway_id": name,
        "router": mesh.address("router"),
        "collector": mesh.address("collector"),
        "data_dir": mesh.folder / name,
        "model_path": mesh.model,
        **flags,
    }
    arguments = [f"--{one.replace('_', '-')}={value}" for one, value in settings.items()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", "gateway", "--http", "0", *arguments),
        env=os.environ | ({"ROLLMESH_SIDECAR_RELAY": relay} if relay else {}),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        http = json.loads((await process.stdout.readline()).removeprefix(b"HTTP "))
        assert (await process.stdout.readline()).startswith(b"READY ")
        yield process, http["port"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def turns(client: openai.AsyncOpenAI, messages: list[Any]) -> list[str]:
    """The answer to the same question whole and streamed."""
    whole = await client.chat.completions.create(model="policy", messages=messages)
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return [whole.choices[0].message.content or "", "".join(pieces)]


async def test_agents_are_answered_by_the_asked_gateway_wherever_the_session_is(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh,
        gateway(mesh, "gateway-2", mesh.address("relay")) as (process, port),
        AsyncExitStack() as stack,
    ):
        ports = {name: mesh.address(name).rpartition(":")[2] for name in ("relay", "agents")}
        await mesh.run("cli.relay", "relay", port=ports["relay"], http_port=ports["agents"])
        addresses = MeshAddresses(
            router=mesh.address("router"), collector=mesh.address("collector")
        )
        client = await stack.enter_async_context(Client(addresses))
        sessions = [await client.open_session(client.session_request()) for _ in range(4)]
        assert all(one.base_url.startswith(f"http://127.0.0.1:{port}/") for one in sessions)
        journals = {one.session_id[:8] for one in sessions}
        assert len(journals) == 2  # both gateways have sessions
        for session in sessions:
            agent = mesh.openai(session)
            assert await turns(agent, SAID) == ["The answer is 42."] * 2
            far = session.base_url.replace(f"127.0.0.1:{port}", mesh.address("agents"))
            assert await turns(mesh.agent(far, "none"), SAID) == ["The answer is 42."] * 2
            with pytest.raises(openai.BadRequestError) as refused:
                await agent.chat.completions.create(model="policy", messages=SAID, n=10_000)
            assert refused.value.param == "n"
            session.reward = 1.0
            await client.close_session(session)
            assert len((await delivered(client, session)).trajectories) >= 1
        with pytest.raises((openai.ConflictError, openai.NotFoundError)):
            await turns(mesh.openai(sessions[0]), SAID)
        process.terminate()
        assert await process.wait() == 0
