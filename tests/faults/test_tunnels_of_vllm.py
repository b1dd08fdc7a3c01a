"""Turns over a tunnel to a real vLLM are those that the same engine gives directly."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import Trajectory
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests.engine.engines import Engine
from tests.engine.servers import VllmServer, server_of
from tests.faults.test_tunnels import cut, far_mesh
from tests.meshes import delivered
from tests.models import make_model_dir

TURN_TOKENS = 300
LONG_TURN: dict[str, Any] = {
    "model": "policy",
    "temperature": 0.0,
    "max_tokens": TURN_TOKENS,
    "extra_body": {"ignore_eos": True},
}


@asynccontextmanager
async def flags_of(
    folder: Path, model: Path, *, attached: bool
) -> AsyncIterator[dict[str, object]]:
    """Flags of an engine that has the model, or is attached to a server that has it."""
    flags: dict[str, object] = {"backend": "vllm", "model_path": model}
    if not attached:
        yield flags | {"dtype": "float32", "enforce_eager": True, "max_context_tokens": 2048}
        return
    async with server_of(VllmServer, folder) as server:
        await server.start(model)
        await server.until_healthy()
        yield flags | {"attach": server.url}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("attached", [False, True])
async def test_turns_have_the_tokens_and_log_probs_that_the_engine_gives_directly(
    tmp_path: Path, *, attached: bool
) -> None:
    """The connections are cut in the middle of the second answer."""
    model = make_model_dir(tmp_path / "model", spread=0.1)
    async with (
        flags_of(tmp_path, model, attached=attached) as flags,
        far_mesh(tmp_path, model, **flags) as (mesh, links),
        mesh.client() as client,
    ):
        async with client.session() as session:
            agent, messages = mesh.openai(session), list[Any]()
            for said in ("What is 12 plus 30?", "I am not sure.", "Use the tools."):
                messages.append({"role": "user", "content": said})
                text = ""
                async for chunk in await agent.chat.completions.create(
                    messages=messages, stream=True, **LONG_TURN
                ):
                    if len(messages) == 3 and not text:
                        cut(links)
                    text += chunk.choices[0].delta.content or ""
                messages.append({"role": "assistant", "content": text})
        (trajectory,) = (await delivered(client, session)).trajectories
        assert "MIGRATED" in trajectory.reasons
        async with open_channel(mesh.address("engine")) as channel:
            process = mesh.processes["engine"]
            engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), model)
            await check_turns(engine, trajectory)


async def check_turns(engine: Engine, trajectory: Trajectory) -> None:
    turns = [(one.start, one.end) for one in trajectory.segments if one.sampled]
    assert [end - start for start, end in turns] == [TURN_TOKENS] * 3
    for start, end in turns:
        prompt = trajectory.token_ids[:start].astype("<u4").tobytes()
        greedy = {"temperature": 0.0}
        request = engine.request(end - start, 0, token_ids_u32le=prompt, sampling=greedy)
        direct = await engine.generate(request)
        assert direct.ids == trajectory.token_ids[start:end].tolist()
        assert np.abs(np.subtract(direct.logprobs, trajectory.logprobs[start:end])).max() < 1e-4
