"""Scores of the real model are torch's: with a full prefix cache, side by side, beside updates."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.controls import RESET_PREFIX_CACHE, RESUME, pause
from tests.engine.engines import LONG, PROMPT, Engine, Scored
from tests.mesh.protocols.test_openai import ask, user
from tests.meshes import Mesh, delivered
from tests.models import make_model_dir, torch_logprobs
from tests.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
IDS = np.random.default_rng(7).integers(2, 300, 2048).astype(np.uint32)
LANES = 4


def difference(scored: Scored, model: Path, ids: np.ndarray, start: int = 1) -> float:
    """The largest difference to torch's log-softmax, of the tokens and of the most likely ids."""
    rows = torch_logprobs(model, ids)[start - 1 : -1]
    own = rows[np.arange(len(rows)), ids[start:]]
    most_likely = -np.sort(-rows, axis=1)[:, : scored.top_ids.shape[1]]
    of_ids = np.take_along_axis(rows, scored.top_ids.astype(np.int64), axis=1)
    wanted = np.concatenate([own, most_likely.ravel(), of_ids.ravel()])
    top = scored.top_logprobs.ravel()
    return float(np.abs(wanted - np.concatenate([scored.logprobs, top, top])).max())


async def test_torch_agrees_also_when_the_prefix_cache_has_the_sequence(
    vllm_engine: Engine, tmp_path: Path, model_dir: Path
) -> None:
    """By weights of a common size: those of other tests make float32 itself differ by more."""
    engine, ids, model = vllm_engine, IDS[:300], make_model_dir(tmp_path / "model", spread=0.05)
    await engine.update((await engine.info()).policy_version + 1, model)
    await engine.until(lambda info: info.running == 0)
    await engine.stub.ControlEngines(RESET_PREFIX_CACHE)
    for count in (2, 3, 300):
        for top_k in (0, 1, 5, 20):
            scored = await engine.score(ids[:count], top_k=top_k)
            assert difference(scored, model, ids[:count]) < 1e-5, (count, top_k)
    # The scorings have filled the cache, as a generation shows.
    result = await engine.generate(engine.request(8, 0, token_ids_u32le=ids.tobytes()))
    assert result.finish.cached_tokens >= 128
    answer = np.array([*ids, *result.ids], np.uint32)
    scored = await engine.score(answer, start=300, top_k=5)
    assert len(scored.logprobs) == 8
    assert difference(scored, model, answer, 300) < 1e-5
    assert scored.logprobs == pytest.approx(result.logprobs, abs=1e-5)
    assert difference(await engine.score(IDS), model, IDS) < 1e-5
    await engine.update((await engine.info()).policy_version + 1, model_dir)


async def test_sequences_that_are_scored_side_by_side_keep_their_own_scores(
    vllm_engine: Engine, model_dir: Path
) -> None:
    engine = vllm_engine
    sequences = [IDS[at : at + 40 + at] for at in range(12)]
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        generation = group.create_task(engine.generate(engine.request(200, 1)))
        scored = [
            group.create_task(engine.score(ids, top_k=at % 4)) for at, ids in enumerate(sequences)
        ]
        await engine.stub.ControlEngines(pause())
        await engine.stub.ControlEngines(RESUME)
    for task, ids in zip(scored, sequences, strict=True):
        assert difference(task.result(), model_dir, ids) < 1e-4
    result = generation.result()
    whole = torch_logprobs(model_dir, [*PROMPT, *result.ids])[len(PROMPT) - 1 : -1]
    assert np.abs(whole[np.arange(200), result.ids] - result.logprobs).max() < 1e-4


async def test_no_sequence_is_scored_by_the_weights_before_and_after_an_update(
    vllm_engine: Engine, model_dir: Path, other_model_dir: Path
) -> None:
    """Long sequences, some of which are in the middle of their steps when an update comes."""
    engine, ended = vllm_engine, list[tuple[int, Scored]]()
    first = (await engine.info()).policy_version
    models = {first: model_dir}

    async def until_scored_by(version: int) -> None:
        await until(lambda: any(scored.version == version for _, scored in ended))

    async def score(lane: int) -> None:
        """Scores one sequence after another, until the newest weights have scored one."""
        version, at = -1, lane
        while version < first + 3:
            scored = await engine.score(np.roll(IDS, at)[:LONG], top_k=2)
            ended.append((at, scored))
            version, at = scored.version, at + LANES

    async with asyncio.timeout(500), asyncio.TaskGroup() as group:
        for lane in range(LANES):
            group.create_task(score(lane))
        for version in range(first, first + 3):
            await until_scored_by(version)
            models[version + 1] = model_dir if version == first + 1 else other_model_dir
            await engine.update(version + 1, models[version + 1])
    assert {scored.version for _, scored in ended} == models.keys()
    # The last sequence of each weights is the likeliest to have been in the middle of an update.
    for version, model in models.items():
        for at, scored in [one for one in ended if one[1].version == version][-LANES:]:
            assert difference(scored, model, np.roll(IDS, at)[:LONG]) < 1e-3, version
    await engine.update(first + 4, model_dir)


async def test_a_policy_scores_its_own_trajectory_as_it_was_sampled(vllm_mesh: Mesh) -> None:
    async with vllm_mesh.client() as client:
        async with client.session() as session:
            for said in ("What is 6 plus 7?", "Are you sure?"):
                await ask(vllm_mesh.openai(session), user(said))
        (trajectory, *_) = (await delivered(client, session)).trajectories
        scores = await client.score(trajectory, top_k=3, same_vocabulary_as="policy")
    trained = trajectory.loss_mask
    assert trained.any()
    assert scores.logprobs[trained] == pytest.approx(trajectory.logprobs[trained], abs=1e-4)
    assert (scores.top_logprobs.max(axis=1)[trained] >= scores.logprobs[trained] - 1e-4).all()
