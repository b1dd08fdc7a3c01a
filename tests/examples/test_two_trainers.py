"""Two trainers in one mesh, each of an adapter of its own on the same base model."""

import asyncio
from pathlib import Path

import pytest
import torch

from examples.demo.grpo import StepReport
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.run import Plan, Run
from examples.grpo_sync import train
from rollmesh.client import Client
from rollmesh.v1 import collector_pb2

_STEPS, _TRAINERS = 3, ("first", "second")
pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1500)]


async def test_each_trainer_gets_the_tokens_of_its_own_adapter_alone(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", seed=0)
    torch.set_num_threads(1)
    used: dict[str, list[int]] = {name: [] for name in _TRAINERS}
    async with running_mesh(
        tmp_path, tmp_path / "policy", CONTEXT_TOKENS, adapters=12
    ) as addresses:

        async def run(name: str, seed: int) -> Run:
            def note(_: Run, report: StepReport) -> None:
                used[name].append(report.groups_used)

            plan = Plan(
                seed=seed, steps=_STEPS, groups=6, samples=4, concurrency=12, rate=2e-2, rank=8,
                adapter=name,
            )  # fmt: skip
            return await train(addresses, tmp_path / "policy", plan, note)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(name, at)) for at, name in enumerate(_TRAINERS)]
        async with Client(addresses) as client:
            for name in _TRAINERS:
                assert await client.policy_version(adapter=name) == _STEPS + 1
            stats = {one.name: one for one in (await client.stats()).consumers}
    for name, task in zip(_TRAINERS, running, strict=True):
        found = task.result()
        assert sum(used[name][:-1]) > 0  # so the adapters differ
        assert max(found.differences) < 1e-5  # to the trainer's own adapter
        assert (found.audit.lost, found.audit.duplicated, found.audit.drift_tokens) == (0, 0, 0)
        assert found.audit.sessions == _STEPS * 24
        filtered = {one.reason: one.units for one in stats[name].filtered}
        assert filtered.keys() <= {
            collector_pb2.FILTER_REASON_NOTHING_LEFT,
            collector_pb2.FILTER_REASON_ADAPTER,
        }
