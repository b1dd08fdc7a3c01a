"""A verl rollout backed by a mesh, which replaces verl's inference servers.

verl imports this module in each of its processes and finds the rollout by name:

    VERL_USE_EXTERNAL_MODULES=rollmesh.integrations.verl.weights
    actor_rollout_ref.rollout.name=rollmesh
    +actor_rollout_ref.rollout.engine_kwargs.rollmesh.router=HOST:PORT

After a step, verl's checkpoint manager updates the rollout: the first rank of the actor pushes the
weights, with verl's `global_steps` as the policy version. With `model.lora_rank` it pushes the
adapter that `engine_kwargs.rollmesh.adapter` names, with `global_steps` + 1 as the version. With
`engine_kwargs.rollmesh.delta=true` it pushes only the elements that a step changed.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import distributed
from verl.workers.rollout import base, replica

from rollmesh.client import Client, MeshAddresses, WeightDeltas
from rollmesh.client.runs import numbered
from rollmesh.integrations.verl.settings import run_of
from rollmesh.mesh.scores import weights_of
from rollmesh.runtime.access.identity import CallerConfig
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1.sampling_pb2 import PolicyRun

NAME = "rollmesh"


class MeshReplica(replica.RolloutReplica):  # type: ignore[misc]  # verl has no types
    """Stands for verl's inference server. The engines belong to the mesh."""

    async def launch_servers(self) -> None:
        """Starts nothing."""


class MeshRollout(base.BaseRollout):  # type: ignore[misc]
    """Receives the weights of each rank of verl's actor."""

    _deltas: WeightDeltas | None = None

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
        tensors: dict[str, Any] = {}
        for name, tensor in weights:  # on every rank: gathering shards needs all of them
            if is_first:
                tensors[name] = tensor.detach().to("cpu", copy=True)
        if is_first and global_steps is not None:
            await self._push(tensors, global_steps, peft_config)

    async def _push(self, tensors: dict[str, Any], step: int, peft_config: Any) -> None:
        settings = (self.config.engine_kwargs or {}).get(NAME) or {}
        if not settings.get("router"):
            raise InvalidFieldError("rollout.engine_kwargs.rollmesh.router", "is missing; name it")
        files = {one.name: str(settings.get(one.name, "")) for one in fields(CallerConfig)}
        addresses = MeshAddresses(router=settings["router"], **files)
        model, adapter = str(settings.get("model", "")), str(settings.get("adapter", ""))
        if peft_config is not None and not adapter:
            field = "rollout.engine_kwargs.rollmesh.adapter"
            raise InvalidFieldError(field, "is missing; name the adapter of the rollouts")
        run = run_of(self.config.engine_kwargs) or PolicyRun()
        async with Client(addresses) as client:
            client.follow_run(run)
            present = weights_of(await client.replicas(), model)
            if peft_config is not None:
                version = numbered(run, step + 1)
                if not any(
                    (one.name, one.version) == (adapter, version) for one in present.adapters
                ):
                    await client.push_adapter(tensors, adapter, step + 1, peft_config, model=model)
                return
            if present.target_policy_version == numbered(run, step):
                return
            if settings.get("delta") and self._deltas is None:
                self._deltas = WeightDeltas()
            mode, delta = settings.get("mode", "keep"), self._deltas or False
            await client.push_weights(tensors, step, mode=mode, model=model, delta=delta)


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{MeshRollout.__name__}"  # noqa: SLF001
replica.RolloutReplicaRegistry.register(NAME, lambda: MeshReplica)
