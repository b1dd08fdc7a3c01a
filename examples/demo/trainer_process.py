"""A trainer in a separate process, because trainer and agents would block each other in one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray

from examples.demo.grpo import Row, StepReport, Trainer
from examples.demo.run import Plan

Weights: TypeAlias = dict[str, NDArray[Any]]
Step: TypeAlias = Callable[[list[list[Row]]], Awaitable[tuple[StepReport, Weights]]]
"""Trains on groups. Returns the report and the new weights under their checkpoint names."""


@asynccontextmanager
async def trainer_process(plan: Plan, model: Path, threads: int) -> AsyncIterator[Step]:
    """Runs a trainer with `threads` torch threads. Yields its step once the policy is loaded."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn"), _load, (plan, model, threads)) as pool:
        await loop.run_in_executor(pool, _loaded)
        yield lambda groups: loop.run_in_executor(pool, _step, groups)


_trainers: list[Trainer] = []
"""In the trainer's process: its only trainer."""


def _load(plan: Plan, model: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    _trainers.append(plan.trainer(model))


def _loaded() -> bool:
    return bool(_trainers)


def _step(groups: list[list[Row]]) -> tuple[StepReport, Weights]:
    (trainer,) = _trainers
    report = trainer.step(groups)
    return report, {name: tensor.numpy() for name, tensor in trainer.weights().items()}
