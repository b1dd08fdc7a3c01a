"""Failed sessions in verl's own output: its metrics of a step, and the error that ends a run."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

_SAMPLES = {buffer: buffer.sample for buffer in (ReplayBuffer, ReplayBufferAsync)}


def explain(failed: Counter[str], errors: Callable[[], Sequence[str]]) -> None:
    """Makes verl's replay buffers name the failed sessions of this process's manager.

    verl prints `training/rollout_failure/failed_sessions` with a step's metrics. Its error about
    groups without trajectories ends with the texts of the agents' errors.

    Args:
        failed: Failed sessions so far by partition, "train" or "val".
        errors: Returns a line for each of the first distinct errors.
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
