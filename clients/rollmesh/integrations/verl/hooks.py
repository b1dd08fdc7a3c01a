"""Where verl's own code meets the mesh: its reward loop, the numbers of its steps, its errors."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollmesh.batches import difference_metrics, rows_of
from rollmesh.client import SessionResult
from rollmesh.integrations.verl.queue import main_last, token_columns

_READ = ("prompts", "responses", "input_ids", "attention_mask", "position_ids")


class RewardLoop:
    """Calls verl's reward workers in turn."""

    def __init__(self, workers: Sequence[Any]) -> None:
        """Takes the handles of verl's reward workers, which are Ray actors."""
        self._workers = itertools.cycle(workers)

    async def score(
        self, result: SessionResult, prompt: Mapping[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Returns the reward of a session and verl's extra reward info.

        As in verl, the last trajectory of the session is scored. There must be one to train on.
        """
        columns = token_columns(main_last(rows_of([replace(result, reward=0.0)]))[-1])
        tensors = {name: columns[name].unsqueeze(0) for name in _READ}
        said = {
            **prompt,
            "__num_turns__": int(columns["num_turns"]),
            "tool_extra_fields": {},
            "prompt_len": len(columns["prompts"]),
            "response_len": len(columns["responses"]),
        }
        objects = {name: np.fromiter([value], object) for name, value in said.items()}
        data = DataProto(batch=TensorDict(tensors, batch_size=[1]), non_tensor_batch=objects)
        scored = await next(self._workers).compute_score.remote(data)
        return float(scored["reward_score"]), dict(scored.get("reward_extra_info") or {})


_NUMBERS = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl_reference",
    "actor/ppo_kl": "kl_step",
    "actor/pg_clipfrac": "clip_ratio",
}
_END_OF_STEP = "_compute_metrics"  # verl has no hook for it
_METRICS = vars(PPOTrainer)[_END_OF_STEP]
_COLUMNS = ["old_log_probs", "rollout_log_probs", "response_mask"]


def observe(report: Callable[[int, list[str], dict[str, float]], None]) -> None:
    """Makes verl's trainers report each step, while its rows are still in the queue."""

    @functools.wraps(_METRICS)
    def with_report(
        trainer: Any,
        batch: Any,
        metrics: dict[str, Any],
        *args: Any,
        global_steps: int,
        **more: Any,
    ) -> None:
        _METRICS(trainer, batch, metrics, *args, global_steps=global_steps, **more)
        numbers = {ours: metrics[name] for name, ours in _NUMBERS.items() if name in metrics}
        uids = list(dict.fromkeys(key.partition("_")[0] for key in batch.keys))
        report(global_steps, uids, numbers | _differences(batch))

    setattr(PPOTrainer, _END_OF_STEP, with_report)


def _differences(batch: Any) -> dict[str, float]:
    """Compares verl's log-probabilities before the step with the sampled ones."""
    own = [not tag.get("is_padding", False) for tag in batch.tags]
    keys = [key for key, is_own in zip(batch.keys, own, strict=True) if is_own]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=_COLUMNS)
    if not set(data.keys()).issuperset(_COLUMNS):
        return {}
    rows = zip(*(data[name].unbind() for name in _COLUMNS), strict=True)
    found = [(verls - ours)[mask.bool()].double().numpy() for verls, ours, mask in rows]
    return difference_metrics(np.concatenate(found)) if found else {}


_SAMPLES = {buffer: buffer.sample for buffer in (ReplayBuffer, ReplayBufferAsync)}


def explain(failed: Counter[str], errors: Callable[[], Sequence[str]]) -> None:
    """Makes verl's replay buffers name the failed sessions of this process's manager.

    verl prints `training/rollout_failure/failed_sessions` with a step's metrics. Its error about
    groups without trajectories ends with the texts of the agents' errors. `errors` returns a line
    for each of the first distinct errors.
    """
    seen: Counter[str] = Counter()

    def explained(sample: Callable[..., tuple[Any, dict[str, Any]]]) -> Callable[..., Any]:
        @functools.wraps(sample)
        def with_failures(
            buffer: Any, global_steps: int, partition_id: str, batch_size: int
        ) -> tuple[Any, dict[str, Any]]:
            try:
                batch, metrics = sample(buffer, global_steps, partition_id, batch_size)
            except RuntimeError as error:
                for line in errors():
                    error.add_note(line)
                raise
            total = failed[partition_id]
            prefix = "validation" if partition_id == "val" else "training"
            metrics[f"{prefix}/rollout_failure/failed_sessions"] = total - seen[partition_id]
            seen[partition_id] = total
            return batch, metrics

        return with_failures

    for buffer, sample in _SAMPLES.items():
        buffer.sample = explained(sample)
