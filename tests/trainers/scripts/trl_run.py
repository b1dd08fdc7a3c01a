"""TRL's own trainer for a few steps, on a mesh with real vLLM. Runs in .venv."""

import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from openai import AsyncOpenAI
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.demo.audit import Audit
from examples.trl_grpo import mesh
from rollmesh.client import MeshAddresses, Retries, Session
from rollmesh.client.sync import Client
from rollmesh.integrations.trl import MeshRollouts
from rollmesh.runtime.errors import InvalidFieldError, RunAbandonedError

_STEPS, _GROUPS, _SAMPLES = 3, 2, 4
_SAVED = 2
_FAILS, _IS_INTERRUPTED, _BRANCHES = 3, 5, 7
_RUNS = itertools.count()
_ORDER: dict[str, Any] = defaultdict(itertools.count)  # two runs of one question differ


async def converse(question: str, session: Session) -> dict[str, Any]:
    """Two turns. One run fails, one is interrupted, one asks twice. Rewards differ in a group."""
    run = next(_RUNS)
    if run == _FAILS:
        raise InvalidFieldError("question", "this agent cannot read it")  # not tried again
    answers: list[str] = []
    messages: list[Any] = [{"role": "user", "content": question}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(2):
            response = await client.chat.completions.create(
                model="policy",
                messages=messages,
                temperature=0.3,  # as many agents send it
            )
            answers.append(response.id)
            messages += [response.choices[0].message, {"role": "user", "content": "again"}]
            if run == _IS_INTERRUPTED:
                raise ConnectionError("this agent was interrupted")
        if run == _BRANCHES:
            await client.chat.completions.create(model="policy", messages=messages[:1])
    return {"reward": next(_ORDER[question]) % 2, "turn_rewards": {answers[0]: 0.25}}


class Watch(TrainerCallback):  # type: ignore[misc]  # the checkers do not see transformers
    """Looks at every step's rollouts and figures."""

    def __init__(self, rollouts: MeshRollouts) -> None:
        self.rollouts = rollouts
        self.audit = Audit()
        self.steps: list[dict[str, Any]] = []

    def on_log(self, _args: Any, _state: Any, _control: Any, **given: Any) -> None:
        logs = given["logs"]
        if "reward" not in logs:
            return
        rows = [row for row in self.rollouts.rows if row is not None]
        self.audit.received([row.session for row in rows])
        versions = np.concatenate([row.trajectory.policy_versions for row in rows])
        runs = np.concatenate([row.trajectory.policy_runs for row in rows])
        segments = [one for row in rows for one in row.trajectory.segments if one.sampled]
        self.steps.append(
            {
                "changed": sum("SAMPLING_CHANGED" in row.trajectory.reasons for row in rows),
                "sampling": sorted({(s.sampling.temperature, s.sampling.top_p) for s in segments}),
                "difference": logs["sampling/sampling_logp_difference/max"],
                "ratio": logs["sampling/importance_sampling_ratio/mean"],
                "grad_norm": logs["grad_norm"],
                "reward": logs["reward"],
                "failed": logs["failed_sessions"],
                "expected_reward": float(np.mean([row.reward for row in rows])),
                "policies": sorted(
                    {span.adapter for row in rows for span in row.trajectory.version_spans}
                ),
                "versions": sorted(set(versions[versions >= 0].tolist())),
                "runs": sorted(set(runs[runs >= 0].tolist())),
                "turns": sorted({row.trajectory.turns for row in rows}),
                "rewards": sorted({row.reward for row in rows}),
                "samples": len(self.rollouts.rows),
            }
        )


class Inspected(GRPOTrainer):  # type: ignore[misc]  # the checkers do not see trl
    """The published trainer, which also records its training data."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.same: list[bool] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mine = zip(self.rollout_func.rows, *map(output.get, _TRAINED_ON), strict=True)
        self.same += [row is None or _is_same(row, *tensors) for row, *tensors in mine]
        return output


_TRAINED_ON = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")


def _is_same(row: Any, *tensors: torch.Tensor) -> bool:
    """Whether the tensors hold the trajectory, token by token, and its mask."""
    prompt, prompt_mask, completion, completion_mask, trained = tensors
    ids = torch.cat([prompt[prompt_mask.bool()], completion[completion_mask.bool()]])
    mask = trained[completion_mask.bool()].bool()
    trajectory = row.trajectory
    behind = trajectory.prompt_tokens
    same_ids: bool = ids.tolist() == trajectory.token_ids.tolist()
    same_mask: bool = mask.tolist() == trajectory.loss_mask[behind:].tolist()
    return same_ids and same_mask


def delivered(addresses: MeshAddresses, count: int) -> list[tuple[str, str, bool]]:
    """Returns the sessions of the places with two attempts: outcome, attempt, superseded."""
    with Client(addresses) as client, client.subscribe("audit", unit="session") as deliveries:
        sessions = [next(deliveries).sessions[0] for _ in range(count)]
    retried = {(one.group_id, one.sample_index) for one in sessions if one.superseded}
    return [
        (one.outcome, one.metadata.get("attempt", "1"), one.superseded)
        for one in sessions
        if (one.group_id, one.sample_index) in retried
    ]


def trainer_of(given: dict[str, Any], watch: Watch, steps: int) -> Inspected:
    """A trainer that saves its second step."""
    folder = Path(given["folder"])
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if given["is_adapter"] else None
    questions = [f"What is {at} plus 2?" for at in range(_GROUPS * _STEPS)]
    trainer = Inspected(
        model=Qwen3ForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        args=GRPOConfig(
            output_dir=str(folder / "trained"),
            per_device_train_batch_size=_GROUPS * _SAMPLES,
            num_generations=_SAMPLES,
            max_completion_length=16,
            top_p=0.5,
            generation_kwargs={"top_p": 0.875},  # it wins
            max_steps=steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="steps",
            save_steps=_SAVED,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": questions}),
        reward_funcs=watch.rollouts.reward,
        rollout_func=watch.rollouts,
        callbacks=[watch],
        peft_config=adapter,
    )
    watch.rollouts.attach(trainer, delta=True)
    return trainer


def rollouts_of(addresses: MeshAddresses) -> MeshRollouts:
    return MeshRollouts(addresses, converse, retries=Retries(tries=2, delay_s=0.01))


def resumed(given: dict[str, Any], addresses: MeshAddresses, former: Inspected) -> dict[str, Any]:
    """Goes back to the checkpoint. The trainer before it still runs."""
    watch = Watch(rollouts_of(addresses))
    trainer = trainer_of(given, watch, _STEPS)
    saved = str(Path(given["folder"], "trained", f"checkpoint-{_SAVED}"))
    trainer.train(resume_from_checkpoint=saved)
    refused = ""
    try:
        former.vllm_generation.sync_weights()
    except RunAbandonedError as error:
        refused = str(error)
    return {
        "steps": watch.steps,
        "refused": refused,
        "trained": dict(watch.rollouts.counts),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    with mesh(Path(given["folder"]), adapters=8 if given["is_adapter"] else 0) as addresses:
        watch = Watch(rollouts_of(addresses))
        trainer = trainer_of(given, watch, _STEPS)
        trainer.train()
        attempts = delivered(addresses, _STEPS * _GROUPS * _SAMPLES + 1)
        with Client(addresses) as client:
            reported = [dict(step.metrics) for step in client.steps("trl")]
        again = resumed(given, addresses, trainer)
    result = {
        "attempts": attempts,
        "steps": watch.steps,
        "same": trainer.same,
        "counts": dict(watch.rollouts.counts),
        "drift_tokens": watch.audit.drift_tokens,
        "duplicated": watch.audit.duplicated,
        "resumed": again,
        "reported": reported,
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
