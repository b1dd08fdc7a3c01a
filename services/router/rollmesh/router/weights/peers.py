"""What routers keep of the weights, held equal between peers.

A router asks its peers every second what they keep, and whenever it matters: when it starts, when
it is about to bring an engine up to date, and when a peer asks it to. Of two different states the
later one wins (`KeptWeights` in router.proto), and its files are fetched before it is adopted. A
push is on the disks of all peers that answer before it is offered to engines.

Two pushes that are accepted on the two sides of a cut network conflict: when the cut is healed, the
one with the higher revision wins, and the engines that hold the other are brought to it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from rollmesh.mesh.routers.preference import addresses_of
from rollmesh.router.config import RouterConfig
from rollmesh.router.weights.kept import KeptWeights, sync, typed_errors
from rollmesh.router.weights.models import Models
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, read_stream, typed_errors as typed_rpc
from rollmesh.runtime.rpc.uploads import write_chunks
from rollmesh.runtime.tasks import contained
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)
_AWAY = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_EVERY_S = 1.0
_LIST_S = 1.0
"""Time that a peer has to say what it keeps; one that does not is passed over, seconds."""


class Peers:
    """The other routers of the mesh."""

    def __init__(
        self, models: Models, config: RouterConfig, adopted: Callable[[str], None]
    ) -> None:
        """Takes the models, the settings, and what to call with a model whose weights changed."""
        self._models = models
        self._config = config
        self._adopted = adopted
        own = {config.advertise, f"{config.host}:{config.port}"}
        self._addresses = [one for one in addresses_of(config.peers) if one not in own]

    async def keep_equal(self) -> None:
        """Asks the peers every second, until it is cancelled."""
        while self._addresses:
            await contained(self.sync, "kept weights could not be compared")
            await asyncio.sleep(_EVERY_S)

    async def sync(self) -> bool:
        """Adopts what peers keep where it is later; returns whether all of them answered."""
        answered = await asyncio.gather(*(self._from(one, self._pull) for one in self._addresses))
        return all(answered)

    async def share(self) -> None:
        """Makes the peers adopt what this router keeps; those that are away ask for it later."""
        await asyncio.gather(*(self._from(one, self._poke) for one in self._addresses))

    async def _from(
        self,
        address: str,
        work: Callable[["router_pb2_grpc.RouterServiceAsyncStub"], Awaitable[None]],
    ) -> bool:
        try:
            async with open_channel(address, own_connection=True) as channel:
                with typed_rpc():
                    await work(router_pb2_grpc.RouterServiceStub(channel))
        except RollmeshError as error:
            is_away = error.code in _AWAY
            level = logging.DEBUG if is_away else logging.WARNING
            _log.log(level, "kept weights not equal", extra=fields(peer=address, error=str(error)))
            return False
        return True

    async def _poke(self, stub: "router_pb2_grpc.RouterServiceAsyncStub") -> None:
        await stub.ListKeptWeights(router_pb2.ListKeptWeightsRequest(), timeout=_LIST_S)
        limit_s = self._config.control_timeout_ms / 1000  # it fetches the files first
        await stub.SyncWeights(router_pb2.SyncWeightsRequest(), timeout=limit_s)

    async def _pull(self, stub: "router_pb2_grpc.RouterServiceAsyncStub") -> None:
        request = router_pb2.ListKeptWeightsRequest()
        response = await stub.ListKeptWeights(request, timeout=_LIST_S)
        for state in response.kept:
            async with self._models.lock(state.model):
                kept = self._models.kept(state.model)
                if not kept.is_behind(state):
                    continue
                for header in await asyncio.to_thread(kept.missing, state):
                    await self._fetch(stub, kept, header)
                await asyncio.to_thread(kept.adopt, state)
                self._models.show(kept)
            _log.info(
                "weights adopted from a peer",
                extra=fields(
                    model=state.model,
                    revision=state.revision,
                    policy_version=kept.target_version,
                    offered=kept.last_version,
                ),
            )
            self._adopted(state.model)

    async def _fetch(
        self,
        stub: "router_pb2_grpc.RouterServiceAsyncStub",
        kept: KeptWeights,
        header: engine_pb2.UpdateWeightsHeader,
    ) -> None:
        request = router_pb2.FetchWeightsRequest(model=kept.model, push_id=header.push_id)
        call = stub.FetchWeights(request, timeout=self._config.control_timeout_ms / 1000)
        file = await asyncio.to_thread(kept.open_part, header, 0)
        try:
            with typed_errors(kept.folder), file:
                async with aclosing(read_stream(call)) as responses:
                    await write_chunks(
                        file,
                        header.safetensors_bytes,
                        _chunks(responses),
                        self._config.push_silence_ms,
                        "the router's push_silence_ms",
                    )
                await asyncio.to_thread(sync, file)
            await asyncio.to_thread(kept.keep_part, header)
        except BaseException:
            await asyncio.to_thread(kept.discard_part, header)
            raise


async def _chunks(
    responses: AsyncIterator[router_pb2.FetchWeightsResponse],
) -> AsyncIterator[bytes]:
    async for response in responses:
        yield response.safetensors_chunk
