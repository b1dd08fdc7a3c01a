"""verl's own code around a mesh: its submit, its replay buffer, its advantages.

What runs here is the trainer's side as it is in `verl.trainer.ppo.v1`, with the manager that it
loads by name. The actor's network is all that is left out.
"""

import asyncio
import itertools
import json
import logging
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.base import get_rollout_class

from rollmesh.client import MeshAddresses, Session
from rollmesh.client.sync import Client
from rollmesh.runtime.errors import RunAbandonedError
from tests.trainers.queues import buffer, described
from tests.trainers.transfer_queue_server import running_queue

_MANAGER = "rollmesh.integrations.verl.manager.AgentLoopManager"
_CHECKPOINTS = "rollmesh.integrations.verl.checkpoints.Checkpoints"


_REWARDS = itertools.count()
_INTERRUPTED: list[str] = []


async def solve(prompt: dict[str, Any], session: Session) -> dict[str, Any]:
    """Asks twice. Earns more with every sample of a group, so that advantages differ."""
    if prompt["extra_info"]["broken"]:
        raise RuntimeError("this agent is broken")
    messages = list(prompt["raw_prompt"])
    answers: list[str] = []
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(2):
            own = {"temperature": 0.3, "top_k": 5, "seed": 7}  # as many agents send them
            body = {"model": "policy", "messages": messages, **own}
            async with http.post(f"{session.base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 200, answer
            answers.append(answer["id"])
            message = answer["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "again"}]
    if prompt["extra_info"]["scored"]:
        return {"accuracy": 0.25}
    if prompt["uid"] == "flaky":
        if not _INTERRUPTED:
            _INTERRUPTED.append(session.session_id)
            raise ConnectionError("this agent was interrupted")
        return {"reward": 2.0, "turn_rewards": {answers[0]: 0.5}}
    return {"reward": float(next(_REWARDS)), "accuracy": 0.5}


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> Any:
    """What verl's reward manager calls."""
    return {"score": float(len(solution_str)), "truth": f"{data_source} {ground_truth}"}


def configuration(addresses: dict[str, str], samples: int, model: str) -> Any:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": model, "tokenizer_path": None},
                "rollout": {
                    "name": "rollmesh",
                    "engine_kwargs": {"rollmesh": {"router": addresses["router"]}},
                    "n": samples,
                    "temperature": 1.0,
                    "top_p": 0.875,
                    "top_k": -1,
                    "response_length": 64,
                    "val_kwargs": {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1},
                    "agent": {
                        "default_agent_loop": "solver",
                        "agent_loop_manager_class": _MANAGER,
                    },
                },
            },
            "algorithm": {
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
                "norm_adv_by_std_in_grpo": True,
            },
            "reward": {
                "custom_reward_function": {"path": __file__, "name": "compute_score"},
                "reward_manager": {"source": "register", "name": "naive"},
                "reward_model": {"enable": False},
            },
            "trainer": {
                "checkpoint_callback_class": _CHECKPOINTS,
                "default_local_dir": str(Path("checkpoints").absolute()),
                "resume_mode": "disable",
            },
            "rollmesh": {
                **addresses,
                "runners": {"solver": "verl_run:solve"},
                "retries": {"tries": 2, "delay_s": 0.01},
                "limits": {"grace_s": 5.0},
            },
        }
    )


def prompts(
    uids: list[str], broken: list[bool], *, validate: bool = False, **more: list[Any]
) -> Any:
    """Makes a batch as verl's data loader does."""
    columns: dict[str, list[Any]] = {
        "uid": uids,
        "raw_prompt": [
            [{"role": "user", "content": f"What is 6 plus {at}?"}] for at in range(len(uids))
        ],
        "data_source": ["sums"] * len(uids),
        "reward_model": [{"style": "rule", "ground_truth": "7"}] * len(uids),
        "extra_info": [
            {"index": at, "broken": is_broken, "scored": validate}
            for at, is_broken in enumerate(broken)
        ],
        "index": list(range(len(uids))),
        "tools_kwargs": [{}] * len(uids),
        **more,
    }
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    arrays["dummy_tensor"] = torch.zeros(len(uids), 1, dtype=torch.uint8)
    batch = tu.get_tensordict(arrays)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    tu.assign_non_tensor_data(batch, "validate", validate)
    return batch


def validation(manager: Any) -> dict[str, Any]:
    """One prompt of the validation set, scored by verl's own reward manager."""
    tag = {"is_prompt": True, "status": "pending", "global_steps": 1}
    tq.kv_batch_put(keys=["checked"], partition_id="val", tags=[tag])
    manager.generate_sequences(prompts(["checked"], [False], validate=True))
    sampled, _ = buffer().sample(global_steps=1, partition_id="val", batch_size=1)
    data = tq.kv_batch_get(keys=sampled.keys, partition_id="val")
    names = ("responses", "rm_scores", "extra_fields")
    return {
        "keys": list(sampled.keys),
        **{name: described(data[name])["values"][0] for name in names},
    }


def without_trajectories(trainer: Any) -> str:
    """A step whose only session fails, which ends verl. Returns what verl prints."""
    batch = prompts(["hopeless"], [True], __rollout_n__=[1])
    PPOTrainer._submit_batch_to_rollout(trainer, batch)  # noqa: SLF001 - verl's own step
    try:
        buffer().sample(global_steps=1, partition_id="train", batch_size=1)
    except RuntimeError:
        return traceback.format_exc()
    return ""


def job(config: Any, step: int) -> tuple[Any, Any, Any]:
    """Begins a job as verl does. Returns its checkpoint callback, pushes of a step, and manager."""
    callback = build_checkpoint_callback(config)  # before the workers get their configuration
    rollout = OmegaConf.to_container(config.actor_rollout_ref.rollout)
    actor = get_rollout_class("rollmesh", "async")(SimpleNamespace(**rollout), None, None)

    def push(step: int) -> None:
        weights = [("w", torch.full((1,), float(step)))]
        asyncio.run(actor.update_weights(iter(weights), global_steps=step))

    push(step)
    reward_worker = ray.remote(RewardLoopWorker).remote(config)
    fqn = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    manager = load_class_from_fqn(fqn, "AgentLoopManager").create(
        config=config,
        llm_client=None,
        teacher_client=None,
        reward_loop_worker_handles=[reward_worker],
    )
    return callback, push, manager


def step_of(trainer: Any, uid: str, **more: Any) -> list[dict[str, Any]]:
    """Rolls a prompt out, alone in the queue. Returns the tags of its rows."""
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")
    batch = prompts([uid], [False], **more)
    PPOTrainer._submit_batch_to_rollout(trainer, batch)  # noqa: SLF001 - verl's own step
    sampled, _ = buffer().sample(trainer.global_steps, "train", 1)
    return list(sampled.tags)


def resumed(config: Any, addresses: dict[str, str], push: Any, trainer: Any) -> dict[str, Any]:
    """The job goes on after its checkpoint of step 1, and another one resumes from that."""
    for step in (1, 2):
        push(step)
    abandoned = step_of(trainer, "abandoned", index=[9])
    config = OmegaConf.create(OmegaConf.to_container(config))
    config.trainer.resume_mode = "auto"
    with Client(MeshAddresses(**addresses)) as client:
        _, push_again, manager = job(config, 1)
        pushed = [client.policy_version()]
        refused = ""
        try:
            push(3)
        except RunAbandonedError as error:
            refused = str(error)
        push_again(2)
        pushed.append(client.policy_version())
        again = SimpleNamespace(**{**vars(trainer), "agent_loop_manager": manager})
        found = step_of(again, "found")  # the prompt that was "first" in the job before
        tags = step_of(again, "resumed", index=[9])
        filtered = [one.removed[0] for one in client.filtered("verl")]
        manager.close()
    return {
        "abandoned": abandoned,
        "found": found,
        "tags": tags,
        "pushed": pushed,
        "refused": refused,
        "filtered": [(one.session_id, one.reason) for one in filtered],
    }


class Said(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def compared(batch: Any) -> None:
    """Puts the log-probabilities of an actor that differ from the sampled ones by a hundredth."""
    columns = {"keys": batch.keys, "partition_id": batch.partition_id}
    data = tq.kv_batch_get(**columns, select_fields=["rollout_log_probs"])
    data["old_log_probs"] = data.pop("rollout_log_probs") + 0.01
    tq.kv_batch_put(**columns, fields=data)


def main() -> None:
    given = json.loads(sys.argv[1])
    config = configuration(given["addresses"], given["samples"], given["model"])
    with running_queue():
        callback, push, manager = job(config, 0)
        trainer: Any = SimpleNamespace(
            config=config,
            trainer_mode="sync",
            global_steps=1,
            agent_loop_manager=manager,
            use_critic=False,
            _rollout_moe_lb_metrics_accumulator=None,
            _get_n_gpus_for_throughput=lambda: 1,
        )
        uids = ["first", "second", "third", "flaky"]
        batch = prompts(uids, [uid == "third" for uid in uids])
        PPOTrainer._submit_batch_to_rollout(trainer, batch)  # noqa: SLF001 - verl's own step
        sampled, metrics = buffer().sample(1, "train", len(uids))
        before = tq.kv_batch_get(keys=sampled.keys, partition_id="train")
        PPOTrainer._compute_advantage(trainer, sampled, {})  # noqa: SLF001 - verl's own step
        after = tq.kv_batch_get(
            keys=sampled.keys, partition_id="train", select_fields=["advantages"]
        )
        compared(sampled)
        said = Said()
        logging.getLogger("rollmesh").addHandler(said)
        numbers = {"actor/entropy": 0.5, "actor/grad_norm": float("nan")}
        timing = {"step": 1.0, "gen": 1.0}
        PPOTrainer._compute_metrics(  # noqa: SLF001 - verl's own step
            trainer, sampled, numbers, timing, global_steps=1, epoch=0
        )
        validated = validation(manager)
        ended = without_trajectories(trainer)
        folder = Path(config.trainer.default_local_dir, "global_step_1")
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("1")
        callback.on_save(trainer, 1, str(folder))
        went_back = resumed(config, given["addresses"], push, trainer)
        manager.close()
    columns = {name: described(before[name]) for name in before.keys()}  # noqa: SIM118
    result = {
        "keys": list(sampled.keys),
        "tags": list(sampled.tags),
        "columns": columns,
        "metrics": metrics,
        "validated": validated,
        "ended": ended,
        "said": said.messages,
        "resumed": went_back,
        "advantages": described(after["advantages"])["values"],
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
