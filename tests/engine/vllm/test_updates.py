"""Control calls in the middle of updates of the real model."""

import asyncio
import itertools
from contextlib import aclosing, suppress
from pathlib import Path

import numpy as np
import pytest

from rollmesh.runtime.errors import SupersededError
from rollmesh.runtime.rpc import typed_errors
from tests.controls import RESUME, pause
from tests.engine.engines import LONG, PROMPT, Engine, Result
from tests.models import torch_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]


async def test_tokens_are_of_the_version_that_they_are_said_to_be_of(
    vllm_engine: Engine, model_dir: Path, other_model_dir: Path
) -> None:
    """Resumes and pauses arrive all the time while six updates pass."""
    engine, models = vllm_engine, {}
    first = (await engine.info()).policy_version
    await engine.update(first + 1, model_dir)
    models[first + 1] = model_dir
    updated = asyncio.Event()

    async def disturb() -> None:
        """Ends with a resume, so that the generation does."""
        for pausing in itertools.cycle((False, True, False)):
            done = updated.is_set()
            with suppress(SupersededError), typed_errors():
                await engine.stub.ControlEngines(pause() if pausing and not done else RESUME)
            if done:
                return

    async def push() -> None:
        for version in range(first + 2, first + 8):
            models[version] = other_model_dir if (version - first) % 2 == 0 else model_dir
            await engine.update(version, models[version])
        updated.set()

    result = Result()
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        async with aclosing(engine.stream(engine.request(LONG, 1))) as responses:
            async for response in responses:
                result.take(response)
                if result.messages == 3:
                    for work in (disturb, disturb, push):
                        group.create_task(work())
        await updated.wait()
    await engine.stub.ControlEngines(RESUME)
    assert not (await engine.info()).paused
    assert len(result.spans) > 1
    ids, prompt = np.array(result.ids), len(PROMPT)
    for version, start, end in result.spans:
        rows = torch_logprobs(models[version], [*PROMPT, *result.ids[:end]])[prompt - 1 : -1]
        expected = rows[np.arange(end), ids[:end]][start:]
        assert np.abs(expected - result.logprobs[start:end]).max() < 1e-3, version
    assert len((await engine.generate(engine.request(5, 0))).ids) == 5
    await engine.update((await engine.info()).policy_version + 1, model_dir)
