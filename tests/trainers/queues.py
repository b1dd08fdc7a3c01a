"""A real TransferQueue and verl's own buffer over it; runs in the trainers' environment."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


@contextmanager
def running_queue() -> Iterator[None]:
    """Starts Ray and the queue, with places for the actors beyond the machine's cores."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80_000_000,
            _temp_dir=short,  # the paths of its sockets may have 107 characters
        )
        one_unit = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
        tq.init(OmegaConf.create(one_unit))
        try:
            yield
        finally:
            tq.close()
            ray.shutdown()


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
