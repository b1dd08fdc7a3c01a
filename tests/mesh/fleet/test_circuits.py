"""What an engine answers, and what that does to its circuit."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.runtime.codec import pack_ids, pack_logprobs
from rollmesh.runtime.errors import EngineDeadError, RollmeshError
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2
from tests.meshes import Mesh, scripted_mesh
from tests.router.engines import Answers, NotingEngine, noting_engine
from tests.waiting import until

OPEN_MS = 4_000
"""So long that an open circuit is seen, however slowly one looks."""
CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


def answer(request: engine_pb2.GenerateRequest) -> engine_pb2.TokenChunk:
    response = engine_pb2.TokenChunk(
        token_ids_u32le=pack_ids(np.array([2], np.uint32)),
        logprobs_f32le=pack_logprobs(np.array([-0.5], np.float32)),
        policy_version=0,
        prompt_crc32=zlib.crc32(request.token_ids_u32le),
    )
    response.finish.reason = sampling_pb2.FINISH_REASON_STOP
    response.finish.stop_token_id = 2
    response.finish.prompt_tokens = len(request.token_ids_u32le) // 4
    response.finish.prompt_crc32 = zlib.crc32(request.token_ids_u32le)
    response.finish.version_spans.add(start=0, end=1)
    return response


def failing(error: RollmeshError, times: int) -> Any:
    """Returns answers that fail a number of times."""
    left = [error] * times

    async def answers(request: engine_pb2.GenerateRequest) -> Answers:
        if left:
            raise left.pop()
        yield answer(request)

    return answers


@pytest.fixture
async def fleet(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[tuple[Mesh, NotingEngine]]:
    """A mesh whose only engine does what a test says."""
    first = {"router": {"metrics_port": 0, "circuit_first_ms": OPEN_MS}}
    async with scripted_mesh(tmp_path, tokenizer_dir, first=first) as mesh:
        assert await mesh.processes["engine"].terminate() == 0  # so it leaves the router
        async with noting_engine(mesh.address("router"), "noting") as engine:
            yield mesh, engine


async def circuit(mesh: Mesh) -> router_pb2.CircuitState.ValueType:
    async with mesh.client() as client:
        replicas = (await client.replicas()).replicas
    return next(one.circuit for one in replicas if one.hello.replica_id == "noting")


async def test_an_open_circuit_is_visible(fleet: tuple[Mesh, NotingEngine]) -> None:
    mesh, engine = fleet
    engine.answers = failing(EngineDeadError("it died"), 3)
    states: set[router_pb2.CircuitState.ValueType] = set()
    async with mesh.client() as client, client.session() as session:
        turn = asyncio.ensure_future(mesh.openai(session).chat.completions.create(**CHAT))

        async def opened() -> bool:
            states.add(await circuit(mesh))
            return router_pb2.CIRCUIT_STATE_OPEN in states

        await until(opened)
        said = await turn  # when the circuit is half-open, the engine is tried again
    assert said.choices[0].finish_reason == "stop"
    await until(lambda: _is_closed(mesh))
    found = await mesh.processes["router"].samples("rollmesh_router_circuit_changes_total")
    assert {name.partition("{")[2]: count for name, count in found.items()} == {
        'state="open"}': 1,
        'state="half-open"}': 1,
        'state="closed"}': 1,
    }


async def _is_closed(mesh: Mesh) -> bool:
    return await circuit(mesh) == router_pb2.CIRCUIT_STATE_CLOSED
