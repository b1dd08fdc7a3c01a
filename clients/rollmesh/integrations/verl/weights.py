"""A verl rollout backed by a mesh, which replaces verl's inference servers.

verl imports this module in each of its processes and finds the rollout by name:

    VERL_USE_EXTERNAL_MODULES=rollmesh.integrations.verl.weights
    actor_rollout_ref.rollout.name=rollmesh
    +actor_rollout_ref.rollout.engine_kwargs.rollmesh.router=HOST:PORT

After a step, verl's checkpoint manager updates the rollout: the first rank of the actor pushes the
weights, with verl's `global_steps` as the policy version. With `model.lora_rank` it pushes the
adapter that `engine_kwargs.rollmesh.adapter` names, with `global_steps` + 1 as the version. With
`engine_kwargs.rollmesh.delta=true` it pushes only the elements that a step changed.

The trainer `separate_async` finds the checkpoint engine by the same name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import ray
from torch import distributed
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import base, replica

from rollmesh.client import Client, MeshAddresses, WeightDeltas, numbered
from rollmesh.integrations.verl.settings import run_of
from rollmesh.mesh import weights_of
from rollmesh.runtime.access import CallerConfig
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1.sampling_pb2 import PolicyRun

NAME = "rollmesh"


class MeshReplica(replica.RolloutReplica):  # type: ignore[misc]  # verl has no types
    """Stands for verl's inference server. The engines belong to the mesh."""

    async def init_standalone(self) -> None:
        """Starts one process without a GPU, because verl wants a receiver of weights."""
        self.rollout_mode = replica.RolloutMode.STANDALONE
        self.workers = [ray.remote(num_cpus=0)(_Receiver).remote()]

    async def launch_servers(self) -> None:
        """Starts nothing."""


class _Receiver:
    """Stands for a process of verl's inference servers that receives weights."""

    def execute_checkpoint_engine(self, method: str, *_args: Any, **_options: Any) -> None:
        """Does nothing: the actor pushes to the mesh."""

    def update_weights(self, global_steps: int | None = None) -> None:
        """Does nothing."""


class _Pushes:
    """Pushes the weights of an actor's steps."""

    def __init__(self, settings: Mapping[str, Any], field: str) -> None:
        """Takes the settings, and their name for errors."""
        self._settings, self._field = settings, field
        self._deltas = WeightDeltas() if settings.get("delta") else False

    async def push(self, tensors: dict[str, Any], step: int, peft_config: Any = None) -> None:
        """Pushes the weights of a step, unless the mesh has them."""
        settings = self._settings
        if not settings.get("router"):
            raise InvalidFieldError(f"{self._field}.router", "is missing; name it")
        files = {one.name: str(settings.get(one.name, "")) for one in fields(CallerConfig)}
        addresses = MeshAddresses(router=settings["router"], **files)
        model, adapter = str(settings.get("model", "")), str(settings.get("adapter", ""))
        if peft_config is not None and not adapter:
            problem = "is missing; name the adapter of the rollouts"
            raise InvalidFieldError(f"{self._field}.adapter", problem)
        run = run_of(settings) or PolicyRun()
        async with Client(addresses) as client:
            client.follow_run(run)
            present = weights_of(await client.replicas(), model)
            if peft_config is not None:
                held = [one.version for one in present.adapters if one.name == adapter]
                if max(held, default=0) != numbered(run, step + 1):
                    await client.push_adapter(tensors, adapter, step + 1, peft_config, model=model)
                return
            if present.target_policy_version == numbered(run, step):
                return
            mode = settings.get("mode", "keep")
            await client.push_weights(tensors, step, mode=mode, model=model, delta=self._deltas)


class MeshRollout(base.BaseRollout):  # type: ignore[misc]
    """Receives the weights of each rank of verl's actor."""

    _pushes: _Pushes | None = None

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the mesh's engines have their own accelerators."""

    async def release(self) -> None:
        """Does nothing: the mesh's engines have their own accelerators."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
        **_options: Any,
    ) -> None:
        """Pushes the weights of a step. Every rank calls it, the first one pushes.

        They are of the run that `Checkpoints` opened for the job. Weights whose version the mesh
        already has are not pushed: without a run, those before the first step are the model that
        the engines were started with.

        Raises:
            InvalidFieldError: The weights are a delta, or no router or adapter is configured.
            StaleVersionError: The mesh has a later version of the run.
            RunAbandonedError: Another job has opened a later run.
            WeightsPushError: An engine did not apply the weights.
        """
        if wire_format != "named_tensors":
            raise InvalidFieldError("checkpoint_engine.backend", f"sends {wire_format}; give naive")
        is_first = not distributed.is_initialized() or distributed.get_rank() == 0
        is_first = is_first and base_sync_done  # the engines have the base model of an adapter
        tensors = _gathered(weights, is_first=is_first)
        if not is_first or global_steps is None:
            return
        if self._pushes is None:
            settings = (self.config.engine_kwargs or {}).get(NAME) or {}
            self._pushes = _Pushes(settings, f"rollout.engine_kwargs.{NAME}")
        await self._pushes.push(tensors, global_steps, peft_config)


@CheckpointEngineRegistry.register(NAME)
class MeshCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Weights of an actor apart from the rollouts: `trainer.v1.trainer_mode=separate_async`.

    The first rank pushes them to the mesh. There is nothing to connect.
    """

    def __init__(self, bucket_size: int, *, is_master: bool = False, **settings: Any) -> None:
        """Takes the settings of `checkpoint_engine.engine_kwargs.rollmesh`.

        Raises:
            InvalidFieldError: An adapter is named.
        """
        field = f"checkpoint_engine.engine_kwargs.{NAME}"
        if settings.get("adapter"):
            raise InvalidFieldError(f"{field}.adapter", "is not served; give model.lora.merge=true")
        self._is_first = is_master
        self._pushes = _Pushes(settings, field)

    def prepare(self) -> dict[str, Any]:
        """Prepares nothing."""
        return {}

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Connects nothing."""
        return {}, {}

    def init_process_group(self, **_options: Any) -> None:
        """Connects nothing."""

    def finalize(self) -> None:
        """Frees nothing."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> None:
        """Pushes the weights of a step, as `MeshRollout.update_weights`."""
        tensors = _gathered(weights, is_first=self._is_first)
        if self._is_first and global_steps is not None:
            await self._pushes.push(tensors, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Refuses: the mesh's engines receive the weights.

        Raises:
            InvalidFieldError: Always.
        """
        raise InvalidFieldError(
            "checkpoint_engine.backend",
            "is rollmesh, whose engines receive the weights themselves; do not call this",
        )


def _gathered(weights: Iterable[tuple[str, Any]], *, is_first: bool) -> dict[str, Any]:
    """Copies the tensors to the host of the first rank. Gathering shards needs all ranks."""
    tensors: dict[str, Any] = {}
    for name, tensor in weights:
        if is_first:
            tensors[name] = tensor.detach().to("cpu", copy=True)
    return tensors


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{MeshRollout.__name__}"  # noqa: SLF001
replica.RolloutReplicaRegistry.register(NAME, lambda: MeshReplica)
