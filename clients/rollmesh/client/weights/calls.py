"""The client's calls about weights and the replicas that hold them."""

import uuid
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
        """Pushes weights to all engines of a model; tokens sampled afterwards carry the version.

        If the router dies in the middle, the push is repeated, at another router or at the same one
        when it is back, for a minute; the tensors must stay as they are until this returns. A
        `Transfer` is not repeated: push the next version.

        Args:
            weights: torch tensors or NumPy arrays by parameter name; a directory of safetensors
                files that every engine can read; or, after `init_weight_transfer`, a `Transfer`
                over NCCL or CUDA IPC. An engine that joins after a `Transfer` waits for the next
                push.
            policy_version: Must be higher than the last one, which `policy_version` returns.
            mode: What happens to running requests; "keep" continues them with the new weights.
            allow_partial: Whether a failed engine is only reported in its result.
            model: Name of the model; may be empty if the mesh has only one.

        Returns:
            One result per engine.

        Raises:
            WeightsPushError: An engine did not apply them.
        """
        return await push_weights(
            self._routers, weights, policy_version, mode, model, allow_partial=allow_partial
        )

    async def policy_version(self, model: str = "") -> int:
        """Returns the highest policy version pushed so far; 0 before the first push."""
        return weights_of(await self.replicas(), model).last_policy_version

    async def forget_weights(self, model: str = "") -> router_pb2.ForgetWeightsResponse:
        """Makes the routers forget the pushed weights; the next push may have any version.

        Returns:
            The version until now; 0 if nothing was kept, or if the router died after it forgot.
        """
        request = router_pb2.ForgetWeightsRequest(model=model, request_id=uuid.uuid4().hex)
        return await self._routers.repeat(
            lambda router: router.ForgetWeights(request, timeout=CALL_S)
        )

    async def init_weight_transfer(
        self,
        backend: str,
        init_info: Mapping[str, Any],
        by_engine: Mapping[str, Any] | None = None,
        model: str = "",
    ) -> list[router_pb2.EngineResult]:
        """Connects all engines to the trainer, which must connect meanwhile in another thread.

        This is not repeated if the router is lost: the trainer connects once. Make the call again,
        and let the trainer connect again.

        Args:
            backend: Backend that the engines were started with: nccl, ipc.
            init_info: Argument of vLLM's `init_weight_transfer_engine`.
            by_engine: Fields of `init_info` that differ, such as `rank_offset`, by engine id.
            model: Name of the model; may be empty if the mesh has only one.

        Raises:
            WeightsPushError: An engine did not connect.
        """
        return await init_transfers(
            await self._routers.stub(), backend, init_info, by_engine or {}, model
        )

    async def replicas(self) -> router_pb2.ListReplicasResponse:
        """Returns the replicas in the mesh."""
        request = router_pb2.ListReplicasRequest()
        return await self._routers.ask(
            lambda stub, limit_s: stub.ListReplicas(request, timeout=limit_s), CALL_S
        )
