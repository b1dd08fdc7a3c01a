"""On-policy distillation through the mesh: a student's own answers, scored by a teacher.

    python -m examples.distill --steps 20

Both models are made on the fly with one tokenizer. The student has learned from demonstrations of
mixed quality and the teacher from good ones. In each step the student's agents run in sessions, the
teacher scores the tokens that they sampled, and the student is trained towards the teacher's most
likely tokens at each position (Agarwal et al. 2024, "On-Policy Distillation of Language Models").
"""

import argparse
import asyncio
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from examples.demo.audit import Audit
from examples.demo.grpo import Row, row_scores
from examples.demo.mesh import running_mesh
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from examples.demo.run import AGENT_TIMEOUT_S, DELIVERY_TIMEOUT_S, Agents, Plan, shared_client
from rollmesh.batches import rows_of
from rollmesh.client import Client, MeshAddresses, Scores, rollout

_TOP_K = 32
_RATE, _GRADIENT_CLIP = 5e-4, 1.0


class Student:
    """Holds the weights being trained."""

    def __init__(self, model_path: Path) -> None:
        """Loads the policy."""
        self._model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_RATE, weight_decay=0.0)

    def step(self, rows: Sequence[Row], scores: Sequence[Scores]) -> float:
        """Makes one update. Returns the loss before it.

        The loss is the divergence from the teacher to the student over the teacher's most likely
        tokens, nats for each sampled token.
        """
        masks = [row.loss_mask for row in rows]
        found = zip(scores, masks, strict=True)
        ids = np.concatenate([one.top_ids[mask] for one, mask in found])
        found = zip(scores, masks, strict=True)
        wanted = torch.tensor(np.concatenate([one.top_logprobs[mask] for one, mask in found]))
        student = row_scores(self._model, list(rows), 1.0).full.gather(1, torch.tensor(ids))
        loss = (wanted.exp() * (wanted - student)).sum(1).mean()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _GRADIENT_CLIP)
        self._optimizer.step()
        return float(loss.item())

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the tensors under their checkpoint names, tied ones once."""
        return {name: one.detach() for name, one in self._model.named_parameters()}


@dataclass(slots=True)
class Run:
    """The record of a run so far."""

    audit: Audit = field(default_factory=Audit)
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


async def distil(addresses: MeshAddresses, model: Path, plan: Plan) -> Run:
    """Trains the student on what it sampled, step by step."""
    student, run = Student(model), Run()
    async with (
        Client(addresses) as client,
        client.subscribe("student", unit="session", credits=plan.groups * plan.samples) as sessions,
        shared_client() as openai,
    ):
        for step in range(plan.steps):
            summary = await rollout(
                client,
                plan.tasks(step),
                runner=Agents(openai, run.audit, repeat(0.0)),
                n=plan.samples,
                model="policy",
                concurrency=plan.concurrency,
                timeout_s=AGENT_TIMEOUT_S,
                progress=False,
            )
            async with asyncio.timeout(DELIVERY_TIMEOUT_S):
                delivered = [await anext(sessions) for _ in range(plan.groups * plan.samples)]
            for delivery in delivered:
                run.audit.received(delivery.sessions)
            rows = rows_of(delivered, untrained="leave_out")
            scores = await client.score(
                rows, model="teacher", top_k=_TOP_K, same_vocabulary_as="policy"
            )
            trained = [
                Row(one.token_ids, one.loss_mask, one.logprobs, 0.0)
                for one in (row.trajectory for row in rows)
            ]
            run.losses.append(await asyncio.to_thread(student.step, trained, scores))
            run.rewards.append(summary.mean_reward or 0.0)
            await client.push_weights(student.weights(), step + 1, model="policy")
            await sessions.acknowledge(*delivered)
            print(
                f"step {step + 1:2d}  loss {run.losses[-1]:.4f}  reward {run.rewards[-1]:.3f}",
                file=sys.stderr,
            )
    return run


async def _run(folder: Path, plan: Plan) -> Run:
    mesh = running_mesh(folder, folder / "student", CONTEXT_TOKENS, teacher=folder / "teacher")
    async with mesh as addresses:
        return await distil(addresses, folder / "student", plan)


def main() -> int:
    """Returns the exit code: 0 if the loss fell and nothing was lost."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--supervised", type=int, default=500, help="steps that make each model")
    parser.add_argument("--folder", type=Path, default=Path("var/distill"))
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(2)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder: Path = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, faults in (("student", 0.34), ("teacher", 0.0)):
        make_policy(folder / name, seed=options.seed, steps=options.supervised, fault=faults)
    plan = Plan(seed=options.seed, steps=options.steps, groups=16, samples=2)
    run = asyncio.run(_run(folder, plan))
    result = {
        "loss_first": round(run.losses[0], 4),
        "loss_last": round(float(np.mean(run.losses[-3:])), 4),
        "reward_first": round(run.rewards[0], 4),
        "reward_last": round(float(np.mean(run.rewards[-3:])), 4),
        "steps": len(run.losses),
        "seconds": round(time.monotonic() - started, 1),
        "drift_tokens": run.audit.drift_tokens,
        "lost": run.audit.lost,
        "duplicated": run.audit.duplicated,
    }
    print(json.dumps(result))
    fell = result["loss_last"] < result["loss_first"]
    return 0 if fell and not result["drift_tokens"] + result["lost"] + result["duplicated"] else 1


if __name__ == "__main__":
    sys.exit(main())
