"""vLLM's NCCL transfer engines with the wire replaced by what runs on CPU: a store over TCP.

All else is vLLM's own: the init and update information, the reload by layers, and the order in
which the trainer's side calls the engine's.
"""

from contextlib import suppress
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

BACKEND = "store"


def register() -> None:
    """Called by vLLM in each of its processes, as an entry point of `vllm.general_plugins`."""
    with suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(BACKEND, StoreEngine)


def join(info: Any, rank: int) -> Any:
    return StatelessProcessGroup.create(
        info.master_address, info.master_port, rank, info.world_size, store_timeout=20
    )


class StoreEngine(NCCLWeightTransferEngine):  # type: ignore[misc]  # mypy has no vLLM
    """The worker's side."""

    model_update_group: Any

    def init_transfer_engine(self, init_info: Any) -> None:
        if self.model_update_group is not None:  # NCCL would keep both, and the former's memory
            raise RuntimeError("the former group was not left")
        self.model_update_group = join(init_info, init_info.rank_offset)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        group: Any = self.model_update_group
        if group is None:
            raise RuntimeError("not initialized")
        for name in update_info.names:
            tensor = group.broadcast(torch.empty(0), src=0)
            if not len(tensor.flatten()):
                raise RuntimeError(f"the trainer broke off at {name}")
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        self.model_update_group = None


class StoreTrainer(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side. It can break off."""

    breaks_at: int | None = None

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        import vllm.distributed.weight_transfer.nccl_engine as module

        module.open_trainer_endpoint = lambda info: join(info, 0)
        return super().trainer_init(init_info, client=client, source=source)

    def _broadcast(self, source: Any, meta: Any) -> None:
        group: Any = self.model_update_group
        for at, (_, tensor) in enumerate(source):
            if at == self.breaks_at:
                group.broadcast(torch.empty(0), src=0)
                return
            group.broadcast(tensor.detach().contiguous(), src=0)

    def _post_send_sync(self) -> None:
        return
