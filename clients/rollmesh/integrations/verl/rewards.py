"""verl's own reward loop, for sessions whose agent gave no reward."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tensordict import TensorDict
from verl.protocol import DataProto

from rollmesh.batches import rows_of
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
        objects = {name: _one(value) for name, value in said.items()}
        data = DataProto(batch=TensorDict(tensors, batch_size=[1]), non_tensor_batch=objects)
        scored = await next(self._workers).compute_score.remote(data)
        return float(scored["reward_score"]), dict(scored.get("reward_extra_info") or {})


def _one(value: Any) -> Any:
    array = np.empty(1, dtype=object)
    array[0] = value
    return array
