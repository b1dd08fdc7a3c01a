"""Weights that are pushed by difference to real vLLM sample as torch says, whatever happens."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.mesh import Generation, Order, joined
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests import models
from tests.processes import running
from tests.router.routers import generating, running_router

pytestmark = [pytest.mark.long, pytest.mark.vllm]
PROMPT, REPLY, PUSHES, LANES = [5, 6, 7], 400, 6, 3


def order(tokens: int, temperature: float = 1.0) -> Order:
    request = engine_pb2.GenerateRequest(
        token_ids_u32le=np.array(PROMPT, "<u4").tobytes(),
        sampling=sampling_pb2.SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=temperature
        ),
    )
    return Order(Generation(request), "s", 8, 0, 60_000, 120_000, is_sent=lambda: True)


class Trainer:
    """A network of which each step changes one element in fifty."""

    def __init__(self, model: Path) -> None:
        import torch

        self.network = models.load_network(model)
        self.states: dict[int, dict[str, Any]] = {}
        self._dice = torch.Generator().manual_seed(0)

    def step(self, version: int) -> dict[str, Any]:
        """Returns the weights of a version."""
        import torch

        with torch.no_grad():
            for _, one in self.network.named_parameters():
                chosen = torch.rand(one.shape, generator=self._dice) < 0.02
                one.add_(chosen * torch.randn(one.shape, generator=self._dice) * 0.1)
        named = self.network.named_parameters()
        self.states[version] = {name: one.detach().clone() for name, one in named}
        return self.states[version]

    def logprobs(self, version: int, ids: list[int]) -> Any:
        """Returns the log-probability of each id, from the second on."""
        import torch

        with torch.no_grad():
            named = dict(self.network.named_parameters())
            for name, one in self.states[version].items():
                named[name].copy_(one)
            rows = torch.log_softmax(self.network(torch.tensor([ids])).logits[0], -1).numpy()
        return rows[:-1][np.arange(len(ids) - 1), ids[1:]]


async def test_differences_arrive_in_mid_answer_and_at_an_engine_that_died(tmp_path: Path) -> None:
    """An engine dies between two differences. Another one comes and gets all of them."""
    model = models.make_model_dir(tmp_path / "model", spread=0.1)
    trainer = Trainer(model)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        flags = {"router": router.address, "backend": "vllm", "model_path": model}
        flags |= {"dtype": "float32", "enforce_eager": True, "max_context_tokens": 512}

        async def engine(name: str) -> Any:
            started = running("engine", tmp_path / name, engine_id=name, **flags)
            return await stack.enter_async_context(started)

        first = await engine("first")
        client, failover = await stack.enter_async_context(generating(router))
        await client.push_weights(trainer.step(1), 1, delta=True)
        answers = list[Order]()
        begun = asyncio.Event()

        async def answer() -> None:
            """Samples one answer after another, until the newest weights sampled a token."""
            version = 0
            while version < PUSHES:
                answers.append(one := order(REPLY))
                async with aclosing(failover.run(one)) as runs:
                    async for _ in runs:
                        begun.set()
                version = one.generation.spans[-1].policy_version

        async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
            for _ in range(LANES):
                tasks.create_task(answer())
            await begun.wait()
            for version in range(2, PUSHES + 1):
                await client.push_weights(trainer.step(version), version, delta=True)
        (folder,) = (tmp_path / "router" / "weights").iterdir()
        sizes = sorted((one.stat().st_size for one in folder.glob("*.safetensors")), reverse=True)
        assert len(sizes) == PUSHES
        assert sizes[1] < sizes[0] / 5
        await first.kill()
        await engine("second")
        late = order(20)
        async with asyncio.timeout(120):
            async for _ in failover.run(late):
                pass
    mixed = [one for one in answers if len(one.generation.spans) > 1]
    assert mixed
    for run in (*mixed, late):
        sampled = joined(run.generation.runs)
        ids = [*PROMPT, *sampled.token_ids.tolist()]
        for span in run.generation.spans:
            expected = trainer.logprobs(span.policy_version, ids[: len(PROMPT) + span.end])
            own = expected[len(PROMPT) - 1 + span.start :]
            assert np.abs(own - sampled.logprobs[span.start : span.end]).max() < 1e-5
    assert [(one.engine_id, one.policy_version) for one in late.generation.spans] == [
        ("second", PUSHES)
    ]
