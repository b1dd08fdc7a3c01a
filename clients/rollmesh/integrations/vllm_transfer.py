"""vLLM's own trainer side of weight transfers, pointed at the mesh.

vLLM's `WeightTransferTrainerFactory.trainer_init` takes a client with four methods that reach one
engine. This one reaches all engines of a mesh:

    sync = MeshWeightSync(client, "nccl")
    info = NCCLTrainerInitInfo(address, port, world_size=1 + sync.ranks, rank=0)
    source = ModuleSource(model)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=sync, source=source)
    ...
    sync.policy_version = step
    engine.send_weights()
"""

from collections.abc import Mapping
from typing import Any, Literal

from rollmesh.client import Transfer
from rollmesh.client.sync import Client
from rollmesh.mesh import weights_of
from rollmesh.runtime.codec import json_handles
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import router_pb2


class MeshWeightSync:
    """Implements vLLM's `VLLMWeightSyncClient`. May be called from any thread."""

    def __init__(
        self,
        client: Client,
        backend: str,
        *,
        ranks_per_engine: int = 1,
        mode: Literal["keep", "abort", "wait"] = "keep",
        model: str = "",
    ) -> None:
        """Reads the engines that are in the mesh now.

        Args:
            client: The synchronous client.
            backend: Backend that the engines were started with.
            ranks_per_engine: Workers of one engine: tensor times pipeline parallel size.
            mode: The treatment of running requests during an update.
            model: Name of the model. May be empty if the mesh has only one.
        """
        self._client = client
        self._backend = backend
        self._mode: Literal["keep", "abort", "wait"] = mode
        self._ranks_per_engine = ranks_per_engine
        replicas = client.replicas()
        self._model = weights_of(replicas, model).model
        self._engines = sorted(
            replica.hello.replica_id
            for replica in replicas.replicas
            if replica.hello.kind == router_pb2.REPLICA_KIND_ENGINE
            and replica.hello.model == self._model
        )
        self._updated = False
        self.policy_version: int | None = None
        """Version of the next weights. Set it before each `send_weights`."""

    @property
    def ranks(self) -> int:
        """Workers of all engines. The trainer's `world_size` is this number plus its own ranks."""
        return self._ranks_per_engine * len(self._engines)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Connects all engines. With ranks, each engine's follow those of the previous one."""
        by_engine = {}
        if "rank_offset" in init_info:
            first = int(init_info["rank_offset"])
            by_engine = {
                engine_id: {"rank_offset": first + place * self._ranks_per_engine}
                for place, engine_id in enumerate(self._engines)
            }
        self._client.init_weight_transfer(
            self._backend, init_info, by_engine=by_engine, model=self._model
        )

    def start_weight_update(self) -> None:
        """Begins a push.

        Raises:
            InvalidFieldError: `policy_version` is not set.
        """
        if self.policy_version is None:
            raise InvalidFieldError("policy_version", "is not set; set it before send_weights")
        self._updated = False

    def update_weights(self, update_info: Any) -> None:
        """Pushes. Returns when all engines sample with the new weights.

        Raises:
            InvalidFieldError: It is the second update of one push.
            WeightsPushError: An engine did not apply the weights.
        """
        if self.policy_version is None or self._updated:
            raise InvalidFieldError("update_info", "is split; send one update with packed=False")
        self._updated = True
        parts = update_info if isinstance(update_info, list) else [update_info]
        sent = [json_handles(part) for part in parts]
        transfer = Transfer(self._backend, [sent if isinstance(update_info, list) else sent[0]])
        self._client.push_weights(transfer, self.policy_version, mode=self._mode, model=self._model)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends a push: engines are done when `update_weights` returns.

        Raises:
            InvalidFieldError: vLLM passes another version.
        """
        if weight_version not in {None, str(self.policy_version)}:
            raise InvalidFieldError("weight_version", "is not policy_version; leave it out")
        self.policy_version = None
