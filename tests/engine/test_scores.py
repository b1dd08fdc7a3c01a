"""A scoring beside an update of weights, in one process: an update comes while the model scores."""

import asyncio
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from rollmesh.engine import (
    Adapters,
    Control,
    EngineConfig,
    Generations,
    ScoreInput,
    Scores,
    ScriptedBackend,
)
from rollmesh.v1 import engine_pb2

IDS = np.arange(2, 8, dtype="<u4")


class SlowlyScoring(ScriptedBackend):
    """Answers the first scoring when the test says so, as of the version with which it began."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.scored = 0
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def score(self, request: ScoreInput) -> Scores | None:
        found = await super().score(request)
        self.scored += 1
        self.begun.set()
        await self.may_end.wait()
        return found


async def test_a_sequence_is_scored_again_by_the_weights_that_came_meanwhile(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(save({"w": np.zeros(1, np.float32)}))
    config = EngineConfig(backend="scripted")
    backend = SlowlyScoring(config)
    control = Control(backend)
    adapters = Adapters(backend, control, config, asyncio.Event())
    generations = Generations(backend, control, adapters, config)
    request = engine_pb2.ScoreTokensRequest(request_id="r", token_ids_u32le=IDS.tobytes())

    async def score() -> list[engine_pb2.ScoreTokensResponse]:
        return [message async for message in generations.score(request)]

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(score())
        await backend.begun.wait()
        await control.update(weights, 7, engine_pb2.PAUSE_MODE_KEEP)
        backend.may_end.set()
        (answer,) = await scoring
    assert (answer.policy_version, backend.scored) == (7, 2)
    assert "r" not in generations
