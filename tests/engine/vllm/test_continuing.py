"""What vLLM makes of a generation that goes on from tokens of another one."""

import uuid
from typing import Any

import numpy as np
import pytest

from rollmesh.mesh import Generation, Sampled, why_not_continued
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.engine.engines import LONG, Engine, Result, torch_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
TOKENS = 24


def request(engine: Engine, **sampling: Any) -> engine_pb2.GenerateRequest:
    given = {"temperature": 0.0, **sampling}
    return engine.request(TOKENS, 0, sampling=given).generate


async def rest(engine: Engine, whole: engine_pb2.GenerateRequest, ids: list[int]) -> Result:
    """What is sampled after `ids`, which an engine sampled before it was lost."""
    before = Sampled(np.array(ids, np.uint32), np.zeros(len(ids), np.float32))
    asked = Generation(whole, runs=[before], taken=len(ids)).begin("", uuid.uuid4().hex)
    return await engine.generate(
        engine_pb2.StreamedGenerate(generate=asked, max_chunk_tokens=8, collect_ms=1)
    )


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"repetition_penalty": 1.3}, id="repetition penalty"),
        pytest.param({"min_tokens": TOKENS // 2}, id="min_tokens"),
        pytest.param({"logit_bias": {9: 2.5}}, id="logit bias"),
    ],
)
async def test_a_continued_answer_is_the_one_that_was_begun(
    vllm_engine: Engine, model_dir: Any, sampling: dict[str, Any]
) -> None:
    whole = request(vllm_engine, **sampling)
    assert not why_not_continued(whole)
    undisturbed = await vllm_engine.generate(
        engine_pb2.StreamedGenerate(generate=whole, max_chunk_tokens=TOKENS)
    )
    assert len(undisturbed.ids) == TOKENS
    for at in (1, TOKENS // 2, TOKENS - 1):
        result = await rest(vllm_engine, whole, undisturbed.ids[:at])
        assert [*undisturbed.ids[:at], *result.ids] == undisturbed.ids
        assert result.logprobs == pytest.approx(undisturbed.logprobs[at:], abs=1e-5)
        assert result.finish.reason == sampling_pb2.FINISH_REASON_LENGTH
        joined = [*undisturbed.logprobs[:at], *result.logprobs]
        assert np.abs(torch_logprobs(model_dir, undisturbed.ids) - joined).max() < 1e-4


async def test_a_message_says_which_weights_sampled_it(
    vllm_engine: Engine, other_model_dir: Any
) -> None:
    """In the middle of a generation, because a killed engine never says it at the end."""
    first = (await vllm_engine.info()).policy_version - 1
    versions, result = list[int](), Result()
    while len(set(versions)) < 2:  # again, if the whole answer was sampled before the update
        first, versions, result = first + 1, [], Result()
        async for response in vllm_engine.stream(vllm_engine.request(LONG, 4)):
            assert response.HasField("prompt_crc32") == (not result.messages)
            versions += [response.policy_version] * (len(response.token_ids_u32le) // 4)
            if not result.messages:
                await vllm_engine.update(first + 1, other_model_dir)
            result.take(response)
    assert set(versions) == {first, first + 1}
    expected = [
        span.policy_version
        for span in result.finish.version_spans
        for _ in range(span.end - span.start)
    ]
    assert versions == expected


async def test_a_collected_answer_is_sent_before_it_ends(vllm_engine: Engine) -> None:
    asked = vllm_engine.request(LONG, 2_048)
    asked.collect_ms = 1
    assert (await vllm_engine.generate(asked)).messages > 3


@pytest.mark.long
async def test_a_slow_model_sends_each_token_of_a_collected_answer(vllm_engine: Engine) -> None:
    asked = vllm_engine.request(LONG, 2_048, sampling={"temperature": 0.0})
    asked.collect_ms = 1
    sizes: list[int] = []
    result = Result()
    async for message in vllm_engine.stream(asked):
        sizes.append(len(message.token_ids_u32le) // 4)
        result.take(message)
    assert 1 in sizes[1:-1]
    whole = await vllm_engine.generate(engine_pb2.StreamedGenerate(generate=asked.generate))
    assert result.ids == whole.ids
    assert len(whole.ids) == LONG
