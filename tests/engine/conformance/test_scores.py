"""What all backends say of given tokens. A scoring is held and ended as a generation is."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.runtime.errors import (
    GenerationAbortedError,
    InvalidFieldError,
    RequestIdInUseError,
    WeightsDroppedError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import server_pb2, server_pb2_grpc
from tests.controls import ABORT, ABORT_ALL, RESUME, WAKE_UP, pause, sleep
from tests.engine.engines import LONG, PROMPT, Engine

# The first vLLM test waits for the model to start.
pytestmark = pytest.mark.asyncio(loop_scope="session")
IDS = np.arange(2048, dtype=np.uint32) * 7 % 300 + 2
"""As many as the context has."""


async def given_ids(engine: Engine) -> bool:
    """Whether an engine says that it scores given ids."""
    async with open_channel(engine.process.address) as channel:
        stub: Any = server_pb2_grpc.ServerServiceStub(channel)
        info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest())
    return server_pb2.CAPABILITY_SCORE_GIVEN_IDS in info.capabilities


async def test_a_sampled_answer_is_scored_as_it_was_sampled(engine: Engine) -> None:
    asked = engine.request(24, 0, sampling={"temperature": 0.0}, top_logprobs=3)
    result = await engine.generate(asked)
    scored = await engine.score([*PROMPT, *result.ids], start=len(PROMPT), top_k=3)
    assert scored.logprobs == pytest.approx(result.logprobs, abs=1e-4)
    assert scored.top_ids.tolist() == result.top_ids
    assert scored.top_logprobs == pytest.approx(np.array(result.top_logprobs), abs=1e-4)
    assert scored.version == (await engine.info()).policy_version


async def test_scores_begin_where_they_are_asked_for(engine: Engine) -> None:
    whole = await engine.score(IDS[:100], top_k=2)
    assert whole.logprobs.shape == (99,)
    assert whole.top_ids.shape == whole.top_logprobs.shape == (99, 2)
    for start in (1, 40, 99):
        part = await engine.score(IDS[:100], start=start)
        assert part.top_ids.shape == (100 - start, 0)
        assert part.logprobs == pytest.approx(whole.logprobs[start - 1 :], abs=1e-4)


async def test_a_sequence_may_be_as_long_as_the_context_in_messages_of_a_mebibyte(
    engine: Engine,
) -> None:
    assert (await engine.info()).max_context_tokens == len(IDS)
    scored = await engine.score(IDS, top_k=256)
    assert scored.top_logprobs.shape == (2047, 256)
    assert len(scored.sizes) > 3
    assert max(scored.sizes) <= 1024 * 1024
    assert (np.diff(scored.top_logprobs) <= 0).all()
    short = await engine.score(IDS[:3], top_k=256)
    assert short.top_logprobs == pytest.approx(scored.top_logprobs[:2], abs=1e-4)


async def test_given_ids_are_scored_or_refused_by_their_field(engine: Engine) -> None:
    top = await engine.score(IDS[:20], start=5, top_k=4)
    given = top.top_ids[:, ::-1].astype(np.int64)
    given[::2, 0] = -1
    if not await given_ids(engine):
        with pytest.raises(InvalidFieldError, match="give top_k, or ask another engine") as caught:
            await engine.score(IDS[:20], start=5, ids_u32le=given)
        assert caught.value.field == "ids_u32le"
        return
    scored = await engine.score(IDS[:20], start=5, ids_u32le=given)
    wanted = np.where(given < 0, -np.inf, top.top_logprobs[:, ::-1])
    assert scored.logprobs == pytest.approx(top.logprobs)
    assert scored.top_logprobs.tolist() == wanted.tolist()
    assert scored.top_ids.shape == (15, 0)


@pytest.mark.parametrize(
    ("ids", "fields", "reason", "name"),
    [
        ([], {}, "PROMPT_EMPTY", "token_ids_u32le"),
        ([5], {}, "INVALID_FIELD", "start"),
        ([5, 6], {"start": 2}, "INVALID_FIELD", "start"),
        ([5, 9999], {}, "TOKEN_OUT_OF_VOCABULARY", "token_ids_u32le"),
        ([5] * 2049, {}, "PROMPT_TOO_LONG", "token_ids_u32le"),
        ([5, 6], {"top_k": 257}, "INVALID_FIELD", "top_k"),
        ([5, 6], {"request_id": ""}, "INVALID_FIELD", "request_id"),
        ([5, 6], {"model": "another"}, "MODEL_MISMATCH", "model"),
    ],
)
async def test_a_bad_request_names_its_field_and_the_engine_goes_on(
    engine: Engine, ids: list[int], fields: dict[str, Any], reason: str, name: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await engine.score(ids, **fields)
    assert (caught.value.reason, caught.value.field) == (reason, name)
    assert len((await engine.score([5, 6])).logprobs) == 1


async def test_a_pause_holds_a_scoring_and_a_resume_lets_it_end(engine: Engine) -> None:
    await engine.stub.ControlEngines(pause())
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        scoring = group.create_task(engine.score(IDS[:50], request_id="held"))
        await engine.until(lambda info: info.running + info.waiting == 1)
        with pytest.raises(RequestIdInUseError):
            await engine.score(IDS[:50], request_id="held")
        assert not scoring.done()
        await engine.stub.ControlEngines(RESUME)
        assert len((await scoring).logprobs) == 49
    await engine.until(lambda info: info.running + info.waiting == 0)


async def test_a_scoring_that_waits_for_new_weights_is_of_them(engine: Engine) -> None:
    before = (await engine.info()).policy_version
    await engine.stub.ControlEngines(pause())
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        scoring = group.create_task(engine.score(IDS[:50]))
        await engine.until(lambda info: info.running + info.waiting == 1)
        await engine.update(before + 1, engine.weights)
        assert not scoring.done()
        await engine.stub.ControlEngines(RESUME)
        assert (await scoring).version == before + 1


@pytest.mark.parametrize("way", ["abort", "pause", "sleep"])
async def test_an_abort_ends_a_scoring_with_an_error_that_says_so(engine: Engine, way: str) -> None:
    calls = {"abort": ABORT_ALL, "pause": pause(ABORT), "sleep": sleep()}
    await engine.stub.ControlEngines(pause())
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        scoring = group.create_task(outcome(engine))
        await engine.until(lambda info: info.running + info.waiting == 1)
        await engine.stub.ControlEngines(calls[way])
        assert isinstance(await scoring, GenerationAbortedError)
    await engine.stub.ControlEngines(WAKE_UP)
    await engine.stub.ControlEngines(RESUME)
    assert len((await engine.score(IDS[:50])).logprobs) == 49


async def outcome(engine: Engine) -> Any:
    try:
        return await engine.score(IDS[:50])
    except GenerationAbortedError as error:
        return error


async def test_a_caller_that_leaves_ends_its_scoring(engine: Engine) -> None:
    await engine.stub.ControlEngines(pause())
    async with asyncio.timeout(120):
        scoring = asyncio.ensure_future(engine.score(IDS[:50]))
        await engine.until(lambda info: info.running + info.waiting == 1)
        scoring.cancel()
        await engine.until(lambda info: info.running + info.waiting == 0)
    await engine.stub.ControlEngines(RESUME)


async def test_nothing_is_scored_by_weights_that_a_sleep_dropped(
    engine: Engine, other_model_dir: Path
) -> None:
    await engine.stub.ControlEngines(sleep(2))
    await engine.stub.ControlEngines(WAKE_UP)
    with pytest.raises(WeightsDroppedError):
        await engine.score(IDS[:50])
    await engine.update((await engine.info()).policy_version, other_model_dir)
    assert len((await engine.score(IDS[:50])).logprobs) == 49


async def test_scorings_and_a_generation_share_an_engine(engine: Engine) -> None:
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        generation = group.create_task(engine.generate(engine.request(LONG, 1)))
        await engine.until(lambda info: info.running == 1 or generation.done())
        scored = [group.create_task(engine.score(IDS[:500], top_k=1)) for _ in range(4)]
        alone = await scored[0]
        for one in scored:
            assert (await one).logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len(generation.result().ids) == LONG
