"""verl's own way of its weights, on two ranks of an actor, with the rollout it finds by name.

The worker's `update_weights` and the registries are verl's. The actor's network is two tensors
whose shards are gathered by both ranks. No Ray: the ranks are forks of this process.
"""

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from verl.workers import engine_workers
from verl.workers.config import RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

_RANKS = 2


class Engine:
    """A network in shards: giving it out needs every rank."""

    is_param_offload_enabled = False

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        return self._gathered(), None

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("model.a.weight", "model.b.weight"):
            shards = [torch.empty(2) for _ in range(_RANKS)]
            distributed.all_gather(shards, torch.full((2,), float(distributed.get_rank())))
            yield name, torch.cat(shards)


def update(worker: Any, global_steps: int | None) -> str:
    """Calls verl's method as its checkpoint manager does. Returns the error."""
    method = ActorRolloutRefWorker.update_weights
    try:
        asyncio.run(method(worker, global_steps=global_steps, mode="naive"))
    except Exception as error:  # the test reads it
        return f"{type(error).__name__}: {error}"
    return ""


def rank(number: int, given: dict[str, Any]) -> None:
    # What verl does to its accelerator between the steps: here is none.
    accelerator = SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
    engine_workers.get_torch_device = lambda: accelerator
    engine_workers.set_expandable_segments = lambda _: None
    engine_workers.log_gpu_memory_usage = lambda *_, **__: None
    distributed.init_process_group(
        "gloo", init_method=f"file://{given['folder']}/store", rank=number, world_size=_RANKS
    )
    settings = {"rollmesh": {"router": given["router"]}}
    config = RolloutConfig(name="rollmesh", free_cache_engine=False, engine_kwargs=settings)
    worker: Any = SimpleNamespace(
        config=SimpleNamespace(rollout=config),
        rollout=get_rollout_class("rollmesh", "async")(config, None, None),
        actor=SimpleNamespace(engine=Engine()),
        layered_summon=False,
        peft_merge=False,
        base_sync_done=True,
    )
    # Before the first step, after two, after a validation, the same again, and an older one.
    said = [update(worker, step) for step in (0, 1, given["step"], None, given["step"], 1)]
    if number == 0:
        (Path(given["folder"]) / "said.json").write_text(json.dumps(said))


def main() -> None:
    given = json.loads(sys.argv[1])
    given["folder"] = str(Path.cwd())
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number, given)) for number in range(_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    replica = get_rollout_replica_class("rollmesh")
    said = json.loads(Path("said.json").read_text())
    result = {"said": said, "servers": asyncio.run(launched(replica))}
    sys.stdout.write(json.dumps(result) + "\n")


async def launched(replica: Any) -> int:
    """Starts what verl takes for an inference server. Returns how many there are."""
    server = replica(0, RolloutConfig(name="rollmesh", engine_kwargs={}), None, gpus_per_node=1)
    await server.init_hybrid(SimpleNamespace(workers=[None]))
    await asyncio.gather(server.sleep(), server.wake_up(), server.abort_all_requests())
    return len(server.servers)


if __name__ == "__main__":
    main()
