"""verl's manager and its replay buffer, with tasks of a Harbor server as prompts."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.import_utils import load_class_from_fqn

from rollmesh.integrations.harbor import HarborRunner
from tests.trainers.queues import buffer, described
from tests.trainers.scripts.verl_run import configuration, prompts
from tests.trainers.transfer_queue_server import running_queue

_GIVEN: dict[str, Any] = json.loads(sys.argv[1])
solver = HarborRunner(**_GIVEN["runner"])


def main() -> None:
    config = configuration(_GIVEN["addresses"], _GIVEN["samples"], _GIVEN["model"])
    config.rollmesh.runners = {"solver": "verl_harbor_run:solver"}
    tasks: list[str] = _GIVEN["tasks"]
    uids = [str(at) for at in range(len(tasks))]
    with running_queue():
        fqn = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
        manager = load_class_from_fqn(fqn, "AgentLoopManager").create(config=config)
        batch = prompts(uids, [False] * len(uids), task=tasks)
        trainer: Any = SimpleNamespace(
            config=config, trainer_mode="sync", global_steps=1, agent_loop_manager=manager
        )
        PPOTrainer._submit_batch_to_rollout(trainer, batch)  # noqa: SLF001 - verl's own step
        sampled, _ = buffer().sample(global_steps=1, partition_id="train", batch_size=len(uids))
        read = tq.kv_batch_get(keys=sampled.keys, partition_id="train")
        manager.close()
    columns = ("input_ids", "rm_scores", "extra_fields", "task")
    print(json.dumps({name: described(read[name])["values"] for name in columns}))  # noqa: T201


if __name__ == "__main__":
    main()
