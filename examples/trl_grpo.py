"""TRL's GRPOTrainer trains the demo's policy through the mesh, on CPU, in minutes.

    python -m examples.trl_grpo --steps 30

The policy is made on the fly, the engine is vLLM, and the agent is the demo's, written against the
`openai` package only. TRL contributes loss, advantages, importance weights and steps.
"""

import argparse
import asyncio
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from openai import AsyncOpenAI
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.demo.agent import ask
from examples.demo.audit import Audit
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS
from examples.demo.run import write_policy
from examples.demo.tasks import Task, make_tasks, reward
from rollmesh.client import MeshAddresses, Session
from rollmesh.integrations.trl import MeshRollouts

_GROUPS, _SAMPLES = 16, 8
_RATE, _WARM_UP = 4e-4, 4


class Agents:
    """Runs the demo's agent on a question."""

    def __init__(self, tasks: list[Task]) -> None:
        """Takes the tasks, used to look up questions."""
        self._tasks = {task.question: task for task in tasks}

    async def __call__(self, question: str, session: Session) -> float:
        """Runs one session. Returns its reward."""
        async with AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, timeout=60
        ) as client:
            attempt = await ask(client, question)
        return reward(self._tasks[question], attempt.calls, attempt.answer)


@dataclass
class Report(TrainerCallback):  # type: ignore[misc]  # transformers is untyped for the checkers
    """Collects the trainer's log, and audits the data it trains on."""

    rollouts: MeshRollouts
    audit: Audit = field(default_factory=Audit)
    rewards: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)

    def on_log(self, _args: Any, _state: Any, _control: Any, **given: Any) -> None:
        """Collects the figures of one step."""
        logs = given["logs"]
        if "reward" not in logs:
            return
        self.audit.received([row.session for row in self.rollouts.rows if row is not None])
        self.rewards.append(float(logs["reward"]))
        self.differences.append(float(logs["sampling/sampling_logp_difference/mean"]))
        print(
            f"step {len(self.rewards):2d}  reward {self.rewards[-1]:.3f}"
            f"  log-prob difference {self.differences[-1]:.1e}",
            file=sys.stderr,
        )


def main() -> int:
    """Returns the exit code: 0 if the policy learned and no token drifted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("var/trl"))
    parser.add_argument("--policy", type=Path, help="folder of the first policy; else it is made")
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(2)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder: Path = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_policy(folder / "policy", options.seed, options.policy)
    with mesh(folder) as addresses:
        report = train(folder, addresses, seed=options.seed, steps=options.steps)
    result = {
        "reward_first": round(float(np.mean(report.rewards[:2])), 4),
        "reward_last": round(float(np.mean(report.rewards[-3:])), 4),
        "steps": len(report.rewards),
        "seconds": round(time.monotonic() - started, 1),
        "drift_tokens": report.audit.drift_tokens,
        "logprob_mean_abs_diff": float(f"{np.mean(report.differences):.3g}"),
        **report.rollouts.counts,
    }
    print(json.dumps(result))
    learned = result["reward_last"] > result["reward_first"] + 0.1
    return 0 if learned and not result["drift_tokens"] else 1


def train(
    folder: Path,
    addresses: MeshAddresses,
    *,
    seed: int,
    steps: int,
    groups: int = _GROUPS,
    samples: int = _SAMPLES,
) -> Report:
    """Trains the policy in `folder` / policy. Returns the report."""
    tasks = make_tasks(groups * steps, seed * 100_000 + 1000)
    rollouts = MeshRollouts(addresses, Agents(tasks), timeout_s=60.0)
    config = GRPOConfig(
        output_dir=str(folder / "trained"),
        per_device_train_batch_size=groups * samples,
        num_generations=samples,
        max_completion_length=CONTEXT_TOKENS,
        max_steps=steps,
        learning_rate=_RATE,
        lr_scheduler_type="linear",
        warmup_steps=_WARM_UP,
        adam_beta2=0.98,
        max_grad_norm=0.1,
        beta=0.0,
        loss_type="dapo",
        epsilon_high=0.28,
        scale_rewards="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=seed,
    )
    report = Report(rollouts)
    trainer = GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [task.question for task in tasks]}),
        reward_funcs=rollouts.reward,
        rollout_func=rollouts,
        callbacks=[report],
    )
    rollouts.attach(trainer)
    trainer.train()
    return report


@contextmanager
def mesh(folder: Path, adapters: int = 0) -> Iterator[MeshAddresses]:
    """Runs a mesh for a program without an event loop.

    Args:
        folder: Has the policy. Data and logs go there too.
        adapters: Number of adapter revisions for which the engine has room.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = running_mesh(folder, folder / "policy", CONTEXT_TOKENS, adapters=adapters)
    addresses = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
    try:
        yield addresses
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
