"""verl's own buffer over a TransferQueue. Runs in the trainers' environment."""

from typing import Any

import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


def buffer(**settings: Any) -> ReplayBuffer:
    return ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.2,
        **settings,
    )


def described(values: Any) -> dict[str, Any]:
    if not isinstance(values, torch.Tensor):
        return {"values": list(values)}
    rows = values.unbind() if values.is_nested else values
    return {"dtype": str(values.dtype), "values": [row.tolist() for row in rows]}
