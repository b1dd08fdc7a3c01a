"""Scorings of a teacher beside pushes of its weights, and beside its sleep.

Each sequence is scored, by one version of the weights: one that the teacher had during the call.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses, Scores
from rollmesh.v1 import engine_pb2
from tests.models import torch_logprobs
from tests.pairs.meshwork import LIMIT_S, TENSORS
from tests.processes import running
from tests.router.engines import reason_of
from tests.router.routers import running_router
from tests.waiting import until

VOCABULARY = 365
Push = Callable[[int], Mapping[str, Any] | Path]
"""Returns the weights of a version."""


@dataclass
class Work:
    """The engines of a teacher, and sequences that are scored one after another."""

    client: Client
    weights: Push
    batch: list[np.ndarray]
    scored: list[tuple[int, int, int, Scores]] = field(default_factory=list)
    """Index of the sequence, the last version that was pushed before the call, that of the push
    that had begun at its end, and the scores."""
    pushed: int = 0
    begun: int = 0
    ends: bool = False

    async def push(self, mode: Any = "keep") -> list[engine_pb2.EngineResult]:
        """Pushes weights under the next version."""
        self.begun += 1
        given = self.weights(self.begun)
        results = await self.client.push_weights(
            given, self.begun, mode=mode, allow_partial=True, model="teacher"
        )
        if not any(map(reason_of, results)):
            self.pushed = self.begun
        return results

    async def score(self, at: int) -> None:
        """Has every eighth sequence scored, again and again."""
        while not self.ends:
            before, at = self.pushed, (at + 8) % len(self.batch)
            scores = await self.client.score(
                self.batch[at], top_k=2, timeout_s=LIMIT_S, model="teacher"
            )
            self.scored.append((at, before, self.begun, scores))

    async def until_more(self) -> None:
        """Waits for two more scores of each caller."""
        count = len(self.scored) + 16
        await until(lambda: len(self.scored) >= count, LIMIT_S)


@asynccontextmanager
async def teachers(
    folder: Path, weights: Push, batch: list[np.ndarray], *names: str, **flags: Any
) -> AsyncIterator[Work]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(folder))
        flags = {"router": router.address, "model": "teacher", **flags}
        for name in names:
            engine = running("engine", folder / name, engine_id=name, **flags)
            await stack.enter_async_context(engine)
        addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
        client = await stack.enter_async_context(Client(addresses))
        yield Work(client, weights, batch)


async def pushes(work: Work) -> None:
    for mode in ("keep", "abort", "wait", "keep"):
        assert set(map(reason_of, await work.push(mode))) == {""}
        await work.until_more()


async def sleeps(work: Work) -> None:
    for level in (1, 2):
        await work.client.sleep_engines(level, "teacher")
        await work.client.wake_up_engines("teacher")
        await work.until_more()


async def pushes_into_sleeps(work: Work) -> None:
    """A teacher that sleeps takes no weights. One that slept with level 2 gets them again."""
    for level in (1, 2):
        async with asyncio.TaskGroup() as tasks:
            sleeping = tasks.create_task(work.client.sleep_engines(level, "teacher"))
            pushing = tasks.create_task(work.push())
            await sleeping
        assert set(map(reason_of, pushing.result())) <= {"", "ENGINE_ASLEEP"}
        await work.client.wake_up_engines("teacher")
        assert set(map(reason_of, await work.push())) == {""}
        await work.until_more()


async def check_beside(work: Work, act: Callable[[Work], Awaitable[None]]) -> None:
    """Scores while something happens, and checks the versions."""
    await work.push()
    async with asyncio.timeout(3 * LIMIT_S), asyncio.TaskGroup() as tasks:
        for at in range(8):
            tasks.create_task(work.score(at))
        await work.until_more()
        await act(work)
        work.ends = True
    for at, before, begun, scores in work.scored:
        assert before <= scores.policy_version <= begun, (at, before, begun)


@pytest.mark.parametrize("act", [pushes, sleeps, pushes_into_sleeps])
async def test_scores_are_of_one_version_that_the_teacher_had(
    tmp_path: Path, act: Callable[[Work], Awaitable[None]]
) -> None:
    rng = np.random.default_rng(3)
    batch = [rng.integers(2, VOCABULARY, 5 + at).astype(np.uint32) for at in range(32)]
    flags = {"backend": "scripted", "vocabulary_tokens": VOCABULARY, "tokens_per_second": 20}
    async with teachers(tmp_path, lambda _: TENSORS, batch, "a", "b", **flags) as work:
        await check_beside(work, act)
        for at, _, _, scores in work.scored:
            assert scores.logprobs[1:] == pytest.approx((batch[at] % 97 / -50)[1:])
        assert {scores.engine_id for *_, scores in work.scored} == {"a", "b"}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("act", [pushes, sleeps, pushes_into_sleeps])
async def test_scores_of_vllm_are_those_of_torch_for_their_version(
    tmp_path: Path,
    model_dir: Path,
    other_model_dir: Path,
    act: Callable[[Work], Awaitable[None]],
) -> None:
    models = [model_dir, other_model_dir]  # by turns
    rng = np.random.default_rng(3)
    batch = [rng.integers(2, 300, 400 + at).astype(np.uint32) for at in range(32)]
    flags = {"backend": "vllm", "model_path": model_dir, "dtype": "float32", "enforce_eager": True}
    flags |= {"max_context_tokens": 512}
    async with teachers(tmp_path, lambda version: models[version % 2], batch, "a", **flags) as work:
        await check_beside(work, act)
    for at, _, _, scores in work.scored:
        rows = torch_logprobs(models[scores.policy_version % 2], batch[at])[:-1]
        own = rows[np.arange(len(rows)), batch[at][1:]]
        assert np.abs(own - scores.logprobs[1:]).max() < 1e-3, scores.policy_version
