"""verl's own way of its weights, on two ranks of an actor, with the rollout it finds by name.

The worker's `update_weights` and the registries are verl's. The actor's network is two tensors
whose shards are gathered by both ranks, or with `adapter` a base model and PEFT's matrices. No Ray:
the ranks are forks of this process.
"""

import asyncio
import json
import multiprocessing
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig
from torch import distributed
from verl.workers import engine_workers
from verl.workers.config import RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from rollmesh.batches import rows_of
from rollmesh.client import Client, MeshAddresses
from rollmesh.integrations.verl import queue_rows

_RANKS = 2


class Engine:
    """A network in shards: giving it out needs every rank."""

    is_param_offload_enabled = False

    def __init__(self, *, is_adapter: bool) -> None:
        self._is_adapter = is_adapter

    def get_per_tensor_param(
        self, *, base_sync_done: bool = True, **_: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        if not self._is_adapter:
            return self._gathered("model.a.weight", "model.b.weight"), None
        config = LoraConfig(r=1, target_modules=["a"]).to_dict()
        if not base_sync_done:
            return self._gathered("model.a.weight"), config
        names = [f"base_model.model.model.a.lora_{one}.weight" for one in "AB"]
        return self._gathered(*names), config

    def _gathered(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
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
    adapter = given.get("adapter", "")
    own = {"router": given["router"], "adapter": adapter, "delta": given.get("delta", False)}
    settings = {"rollmesh": own}
    config = RolloutConfig(name="rollmesh", free_cache_engine=False, engine_kwargs=settings)
    worker: Any = SimpleNamespace(
        config=SimpleNamespace(rollout=config),
        rollout=get_rollout_class("rollmesh", "async")(config, None, None),
        actor=SimpleNamespace(engine=Engine(is_adapter=given["is_adapter"])),
        layered_summon=False,
        peft_merge=False,
        base_sync_done=not given["is_adapter"],
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
    if given.get("adapter"):
        result["tags"] = asyncio.run(rolled_out(given))
    sys.stdout.write(json.dumps(result) + "\n")


async def rolled_out(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a session on the adapter. Returns the tags of its rows, as verl's queue has them."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    async with Client(MeshAddresses(**given["addresses"])) as client:
        async with client.session(adapters=[given["adapter"]]) as session:
            request = urllib.request.Request(  # noqa: S310 - of the mesh
                f"{session.base_url}/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with await asyncio.to_thread(urllib.request.urlopen, request, timeout=60) as answer:
                answer.read()
            session.reward = 1.0
        async with client.subscribe("verl", unit="session") as deliveries, asyncio.timeout(240):
            (result,) = (await anext(deliveries)).sessions
    prompt = {"uid": "u", "global_steps": given["step"]}
    return queue_rows(rows_of([result]), prompt).tags


async def launched(replica: Any) -> int:
    """Starts what verl takes for an inference server. Returns how many there are."""
    server = replica(0, RolloutConfig(name="rollmesh", engine_kwargs={}), None, gpus_per_node=1)
    await server.init_hybrid(SimpleNamespace(workers=[None]))
    await asyncio.gather(server.sleep(), server.wake_up(), server.abort_all_requests())
    return len(server.servers)


if __name__ == "__main__":
    main()
