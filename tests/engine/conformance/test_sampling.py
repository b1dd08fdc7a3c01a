"""What all backends sample: ids, log-probabilities, masks, and where an answer ends."""

import asyncio
import json
import zlib
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from rollmesh.runtime.errors import InvalidConstraintError, InvalidFieldError
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.engine.engines import ATTACHED, PROMPT, Engine

# The first vLLM test waits for the model to start.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_whole_and_streamed_answers_are_the_same(engine: Engine) -> None:
    greedy = {"temperature": 0.0}
    whole = await engine.generate(engine.request(24, 0, sampling=greedy))
    streamed = await engine.generate(engine.request(24, 4, sampling=greedy))
    assert (whole.messages, len(whole.ids)) == (1, 24)
    assert streamed.messages >= 6
    assert streamed.ids == whole.ids  # nothing repeated, nothing missing
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    for result in (whole, streamed):
        assert len(result.logprobs) == 24
        assert result.finish.reason == sampling_pb2.FINISH_REASON_LENGTH
        assert result.spans[0][1] == 0
        assert result.spans[-1][2] == 24
        assert result.finish.prompt_tokens == len(PROMPT)
        assert result.finish.prompt_crc32 == zlib.crc32(PROMPT.tobytes())


@pytest.mark.parametrize("chunk", [0, 5], ids=["whole", "streamed"])
async def test_the_most_likely_ids_come_with_each_sampled_one(engine: Engine, chunk: int) -> None:
    greedy = {"temperature": 0.0}
    request = engine.request(24, chunk, sampling=greedy, top_logprobs=3)
    result = await engine.generate(request)
    assert len(result.top_ids) == len(result.ids) == 24
    assert [row[0] for row in result.top_ids] == result.ids
    assert [row[0] for row in result.top_logprobs] == pytest.approx(result.logprobs, abs=1e-4)
    for ids, logprobs in zip(result.top_ids, result.top_logprobs, strict=True):
        assert len(set(ids)) == 3
        assert logprobs == sorted(logprobs, reverse=True)
    plain = await engine.generate(engine.request(24, chunk, sampling=greedy))
    assert (plain.top_ids, plain.ids) == ([], result.ids)


async def test_masked_tokens_are_not_sampled_and_log_probs_stay_the_models(engine: Engine) -> None:
    if (await engine.info()).backend == "scripted":
        pytest.skip("a script is to keep the masks itself")
    greedy = {"temperature": 0.0}
    plain = await engine.generate(engine.request(12, 0, sampling=greedy, top_logprobs=20))
    # The second most likely one, by ways to take the most likely out.
    second = plain.top_ids[0][1]
    ways: dict[str, Any] = {
        "allowed_token_ids": [second],
        "logit_bias": {second: 100.0},
        "bad_sequences": [sampling_pb2.TokenSequence(token_ids=plain.ids[:1])],
    }
    backend = (await engine.info()).backend
    refused = {"vllm-http": {"bad_sequences"}, "sglang": set(ways)}.get(backend, set())
    for name, masks in ways.items():
        asked = engine.request(1, 0, sampling=greedy | {name: masks})
        if name in refused:
            with pytest.raises(
                InvalidFieldError, match=rf"sampling\.{name}: (is not sent|changes)"
            ):
                await engine.generate(asked)
            continue
        result = await engine.generate(asked)
        assert result.ids == [second], name
        assert result.logprobs == pytest.approx([plain.top_logprobs[0][1]], abs=1e-4), name
    banned = engine.request(1, 0, sampling=greedy, banned_token_ids=plain.ids[:1])
    if backend in ATTACHED:
        with pytest.raises(InvalidFieldError, match="banned_token_ids: is not sent"):
            await engine.generate(banned)
        return
    result = await engine.generate(banned)
    assert result.ids == [second]
    assert result.logprobs == pytest.approx([plain.top_logprobs[0][1]], abs=1e-4)
    # The last id of a longer sequence is masked only after the others.
    long = sampling_pb2.TokenSequence(token_ids=plain.ids[:3])
    sampling = greedy | {"bad_sequences": [long]}
    result = await engine.generate(engine.request(3, 0, sampling=sampling))
    assert result.ids[:2] == plain.ids[:2]
    assert result.ids[2] == plain.top_ids[2][1]


async def test_ids_that_are_no_text_are_not_sampled_under_a_constraint_either(
    engine: Engine,
) -> None:
    if (await engine.info()).backend == "scripted":
        pytest.skip("a script is to keep the masks itself")
    form = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = json.dumps({"type": "structural_tag", "format": form})
    constraint = engine_pb2.Constraint(structural_tag_json=tag)

    async def sampled(*banned: int) -> list[int]:
        greedy = {"temperature": 0.0}
        request = engine.request(
            1, 0, sampling=greedy, constraint=constraint, banned_token_ids=banned
        )
        request.generate.sampling.ignore_eos = False
        return (await engine.generate(request)).ids

    if (await engine.info()).backend in ATTACHED:
        with pytest.raises(InvalidConstraintError, match="is not sent to an attached server"):
            await sampled()
        return
    (first,) = await sampled()
    assert await sampled(first) != [first]


async def test_a_stop_token_ends_the_answer_and_is_named(engine: Engine) -> None:
    greedy = await engine.generate(engine.request(24, 0, sampling={"temperature": 0.0}))
    stop = greedy.ids[7]
    request = engine.request(24, 0, sampling={"temperature": 0.0, "stop_token_ids": [stop]})
    request.generate.sampling.ignore_eos = False
    result = await engine.generate(request)
    assert result.ids == greedy.ids[: greedy.ids.index(stop) + 1]
    assert result.finish.reason == sampling_pb2.FINISH_REASON_STOP
    assert result.finish.stop_token_id == stop


async def test_the_context_limit_is_a_length(engine: Engine) -> None:
    prompt = np.full(2044, 5, "<u4").tobytes()
    result = await engine.generate(engine.request(100, 0, token_ids_u32le=prompt))
    assert len(result.ids) == 4
    assert result.finish.reason == sampling_pb2.FINISH_REASON_LENGTH


async def test_a_collected_answer_comes_in_few_messages_the_first_token_at_once(
    engine: Engine,
) -> None:
    asked = engine.request(600, 512)
    asked.collect_ms = 60_000
    async with asyncio.timeout(120), aclosing(engine.stream(asked)) as responses:
        sizes = [len(response.token_ids_u32le) // 4 async for response in responses]
    assert sum(sizes) == 600
    assert max(sizes) <= 512
    assert sizes[0] < 600  # it says that the engine survived the prompt
    assert len(sizes) <= 3
