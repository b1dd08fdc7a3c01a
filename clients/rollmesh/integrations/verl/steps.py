"""The numbers of verl's steps, for `Client.report_step`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollmesh.batches import difference_metrics

_NAMES = {
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
    """Makes verl's trainers report each step, while its rows are still in the queue.

    Args:
        report: Takes the step, the uids of its prompts, and its numbers.
    """

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
        numbers = {ours: metrics[name] for name, ours in _NAMES.items() if name in metrics}
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
