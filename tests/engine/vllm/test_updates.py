"""Control calls in the middle of updates of the real model."""

import asyncio
import itertools
from contextlib import aclosing, suppress
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import WeightDeltas, file_of
from rollmesh.runtime.errors import SupersededError
from rollmesh.runtime.rpc import typed_errors
from tests.controls import RESUME, pause
from tests.engine.engines import LONG, PROMPT, Engine, Result
from tests.faults.test_deltas import Trainer
from tests.models import torch_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_tokens_are_of_the_version_that_they_are_said_to_be_of(
    vllm_engine: Engine, model_dir: Path, other_model_dir: Path
) -> None:
    """Resumes and pauses arrive all the time while six updates pass."""
    engine, models = vllm_engine, {}
    first = (await engine.info()).policy_version
    await engine.update(first + 1, model_dir)
    models[first + 1] = model_dir
    begun, updated = asyncio.Event(), asyncio.Event()

    async def disturb() -> None:
        """Ends with a resume, so that the generations do."""
        for pausing in itertools.cycle((False, True, False)):
            done = updated.is_set()
            with suppress(SupersededError), typed_errors():
                await engine.stub.ControlEngines(pause() if pausing and not done else RESUME)
            if done:
                return

    async def push() -> None:
        await begun.wait()
        for version in range(first + 2, first + 8):
            models[version] = other_model_dir if (version - first) % 2 == 0 else model_dir
            await engine.update(version, models[version])
        updated.set()

    results = list[Result]()
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for work in (disturb, disturb, push):
            group.create_task(work())
        while not updated.is_set():  # so that updates are in the middle of an answer
            results.append(Result())
            async with aclosing(engine.stream(engine.request(LONG, 1))) as responses:
                async for response in responses:
                    results[-1].take(response)
                    begun.set()
    await engine.stub.ControlEngines(RESUME)
    assert not (await engine.info()).paused
    assert max(len(result.spans) for result in results) > 1
    for result in results:
        ids, prompt = np.array(result.ids), len(PROMPT)
        for version, start, end in result.spans:
            rows = torch_logprobs(models[version], [*PROMPT, *result.ids[:end]])[prompt - 1 : -1]
            expected = rows[np.arange(end), ids[:end]][start:]
            assert np.abs(expected - result.logprobs[start:end]).max() < 1e-3, version
    assert len((await engine.generate(engine.request(5, 0))).ids) == 5
    await engine.update((await engine.info()).policy_version + 1, model_dir)


async def test_a_difference_in_the_middle_of_an_answer_samples_as_torch_says(
    vllm_engine: Engine, model_dir: Path
) -> None:
    """Again, if a busy machine sampled the whole answer before the difference arrived."""
    engine, trainer, deltas = vllm_engine, Trainer(model_dir), WeightDeltas()
    version = (await engine.info()).policy_version + 1
    whole = trainer.step(version)
    await engine.update(version, b"".join(file_of(whole)[1]), keep_file=True, push_id=str(version))
    deltas.pushed(whole, None, str(version))
    result = Result()
    while len(result.spans) < 2:
        result, version = Result(), version + 1
        weights = trainer.step(version)
        found = deltas.difference(weights)
        assert found is not None
        data = b"".join(file_of(found.tensors, found.checksums)[1])
        header = {"base_push_id": deltas.push_id, "push_id": str(version), "keep_file": True}
        async for response in engine.stream(engine.request(LONG, 1)):
            result.take(response)
            if result.messages == 1:
                await engine.update(version, data, **header)
        deltas.pushed(weights, found, str(version))
    assert [one for one, *_ in result.spans] == [version - 1, version]
    for one, start, end in result.spans:
        wanted = trainer.logprobs(one, [*PROMPT.tolist(), *result.ids[:end]])
        own = wanted[len(PROMPT) - 1 + start :]
        assert np.abs(own - result.logprobs[start:end]).max() < 1e-3, one
    await engine.update(version + 1, model_dir)
