"""Generations with an adapter outlive their engines, and late engines get its revision."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np
import pytest

from rollmesh.mesh import Generation, Order, joined
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests import models
from tests.engine.engines import CONFIG
from tests.processes import running
from tests.router.routers import generating, running_router

REPLY, LONG = 400, 1900
ADAPTER = sampling_pb2.AdapterRef(name="math", version=3)


PROMPT = [5, 6, 7]
LORA = {**CONFIG, "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def order(tokens: int = REPLY) -> Order:
    request = engine_pb2.GenerateRequest(
        token_ids_u32le=np.array(PROMPT, "<u4").tobytes(),
        sampling=sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
        adapter=ADAPTER,
    )
    return Order(Generation(request), "s", 8, 0, 60_000, 120_000, is_sent=lambda: True)


async def test_a_killed_engines_generation_continues_on_a_late_engine_with_the_same_revision(
    tmp_path: Path,
) -> None:
    """The second engine starts after the push, and the first dies in the middle of an answer."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        flags = {"router": router.address, "max_adapters": 2, "backend": "scripted"}
        flags |= {"reply_tokens": REPLY, "tokens_per_second": 400}
        first = await stack.enter_async_context(
            running("engine", tmp_path / "1", engine_id="first", **flags)
        )
        client, failover = await stack.enter_async_context(generating(router))
        matrices = {"w": np.zeros(4, np.float32)}
        await client.push_adapter(matrices, "math", 3, CONFIG)
        whole = order()
        async for _ in failover.run(whole):
            pass
        await stack.enter_async_context(
            running("engine", tmp_path / "2", engine_id="second", **flags)
        )
        cut = order()
        async with asyncio.timeout(60), aclosing(failover.run(cut)) as runs:
            async for _ in runs:
                if cut.generation.taken > 20 and cut.generation.engine_id == "first":
                    await first.kill()
        spans = [(one.engine_id, one.adapter, one.policy_version) for one in cut.generation.spans]
        assert spans == [("first", "math", 3), ("second", "math", 3)]
        assert cut.generation.token_ids().tolist() == whole.generation.token_ids().tolist()
        assert len(cut.generation.token_ids()) == REPLY


@pytest.mark.long
@pytest.mark.vllm
async def test_a_pinned_revision_continues_on_another_vllm_with_the_log_probs_of_torch(
    tmp_path: Path,
) -> None:
    """An engine dies in the middle of an answer, after a later revision was pushed."""
    model = models.make_model_dir(tmp_path / "model", spread=0.1)
    pushed = {version: models.make_adapter(model, version, LORA) for version in (3, 4)}
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        flags = {"router": router.address, "backend": "vllm", "model_path": model}
        flags |= {"dtype": "float32", "enforce_eager": True, "max_context_tokens": 2048}
        flags |= {"max_adapters": 5, "max_adapter_rank": 4}
        engines = {}
        for name in ("first", "second"):
            engine = running("engine", tmp_path / name, engine_id=name, **flags)
            engines[name] = await stack.enter_async_context(engine)
        client, failover = await stack.enter_async_context(generating(router))
        for version, tensors in pushed.items():
            await client.push_adapter(tensors, "math", version, LORA)
        cut, killed = order(LONG), ""
        async with asyncio.timeout(120), aclosing(failover.run(cut)) as runs:
            async for _ in runs:
                if cut.generation.taken > 20 and not killed:
                    killed = cut.generation.engine_id
                    await engines[killed].kill()
    (other,) = engines.keys() - {killed}
    spans = [(one.engine_id, one.adapter, one.policy_version) for one in cut.generation.spans]
    assert spans == [(killed, "math", 3), (other, "math", 3)]
    sampled = joined(cut.generation.runs)
    assert len(sampled.token_ids) == LONG
    ids = np.concatenate([PROMPT, sampled.token_ids]).astype(np.int64)
    for version, is_it in ((3, True), (4, False)):
        rows = models.merged_logprobs(model, ids, pushed[version], LORA)
        own = rows[len(PROMPT) - 1 : -1][np.arange(LONG), sampled.token_ids]
        assert (np.abs(own - sampled.logprobs).max() < 1e-4) == is_it
