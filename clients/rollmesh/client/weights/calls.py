"""The client's calls about weights and the replicas that hold them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rollmesh.client.connections import CALL_S, Connections
from rollmesh.client.weights.push import (
    Transfer,
    init_transfers,
    push_weights,
    weights_of,
)
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import router_pb2


class WeightCalls(Connections):
    """Pushes weights through the router."""

    async def push_weights(
        self,
        weights: Mapping[str, Any] | Path | Transfer,
        policy_version: int,
        *,
        mode: Literal["keep", "abort", "wait"] = "keep",
        allow_partial: bool = False,
        model: str = "",
    ) -> list[router_pb2.EngineResult]:
        """Gives all engines of a model new weights; what is sampled next carries the version.

        Args:
            weights: torch tensors or NumPy arrays by the checkpoint's names, where no disk is
                shared; a directory of safetensors files, where every engine can read it; or a
                `Transfer`, where GPUs of trainer and engines share NCCL or a machine, after
                `init_weight_transfer`. Late engines wait for the push after a `Transfer`.
            policy_version: Above the last one, which `policy_version` returns.
            mode: What happens to running requests; "keep" lets them go on with the new weights.
            allow_partial: Whether an engine that failed is told by its result only.
            model: Name of the model; empty where the mesh has one.

        Returns:
            One result per engine.

        Raises:
            WeightsPushError: An engine did not take them.
        """
        return await push_weights(
            self._router(), weights, policy_version, mode, model, allow_partial=allow_partial
        )

    async def policy_version(self, model: str = "") -> int:
        """Returns the highest policy version that engines were offered; 0 before the first push."""
        return weights_of(await self.replicas(), model).last_policy_version

    async def forget_weights(self, model: str = "") -> router_pb2.ForgetWeightsResponse:
        """Makes the router forget what was pushed, so that the next push may have any version."""
        request = router_pb2.ForgetWeightsRequest(model=model)
        with typed_errors():
            return await self._router().ForgetWeights(request, timeout=CALL_S)

    async def init_weight_transfer(
        self,
        backend: str,
        init_info: Mapping[str, Any],
        by_engine: Mapping[str, Any] | None = None,
        model: str = "",
    ) -> list[router_pb2.EngineResult]:
        """Makes all engines join the trainer by a transfer backend; it joins in another thread.

        Args:
            backend: Name of the backend that the engines were started with: nccl, ipc.
            init_info: What vLLM's `init_weight_transfer_engine` takes.
            by_engine: Fields of `init_info` that differ, such as `rank_offset`, by engine id.
            model: Name of the model; empty where the mesh has one.

        Raises:
            WeightsPushError: An engine did not join.
        """
        return await init_transfers(self._router(), backend, init_info, by_engine or {}, model)

    async def replicas(self) -> router_pb2.ListReplicasResponse:
        """Returns who is in the mesh."""
        request = router_pb2.ListReplicasRequest()
        with typed_errors():
            return await self._router().ListReplicas(request, timeout=CALL_S)
