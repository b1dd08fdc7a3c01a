"""The other routers of the mesh, and how kept weights are held equal between them.

A router asks its peers every second for their kept weights, and whenever it matters: when it
starts, before it brings an engine up to date, and when a peer asks it to. Of two different states
the later one wins (`KeptWeights` in peers.proto), and its files are fetched before it is adopted.
A push is on the disks of all peers that answer before it is offered to engines.

Two pushes that are accepted on the two sides of a cut network conflict: when the network is healed,
the one with the higher revision wins, and engines with the other are brought to it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from rollmesh.internal.v1 import peers_pb2, peers_pb2_grpc
from rollmesh.router.config import RouterConfig
from rollmesh.router.kept import Header, KeptWeights, sync, typed_errors
from rollmesh.router.models import Models
from rollmesh.runtime import contained
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.rpc import (
    Context,
    open_channel,
    read_stream,
    typed_errors as typed_rpc,
    write_chunks,
)
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_CHUNK_BYTES = 1024 * 1024
_AWAY = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_EVERY_S = 1.0
_LIST_S = 1.0
"""Time that a peer has to list its kept weights, seconds. A peer that does not is passed over."""


class Peers(peers_pb2_grpc.PeerServiceServicer):
    """Calls the other routers of the mesh, and serves their calls."""

    def __init__(
        self, models: Models, config: RouterConfig, adopted: Callable[[str], None]
    ) -> None:
        self._models = models
        self._config = config
        self._adopted = adopted
        own = {config.advertise, f"{config.host}:{config.port}", ""}
        addresses = dict.fromkeys(one.strip() for one in config.peers.split(","))
        self._addresses = [one for one in addresses if one not in own]

    async def ListKeptWeights(
        self, request: peers_pb2.ListKeptWeightsRequest, context: Context
    ) -> peers_pb2.ListKeptWeightsResponse:
        return peers_pb2.ListKeptWeightsResponse(
            kept=[one.state for one in self._models.all_kept.values() if one.state.revision],
            pins=self._models.pins.stated(),
        )

    async def FetchWeights(
        self, request: peers_pb2.FetchWeightsRequest, context: Context
    ) -> AsyncIterator[peers_pb2.FetchWeightsResponse]:
        path = self._models.kept(request.model).file_of_push(request.push_id)
        try:
            file = await asyncio.to_thread(path.open, "rb") if path is not None else None
        except OSError:
            file = None
        if file is None:
            raise InvalidFieldError("push_id", f"{request.push_id!r} is not kept; list what is")
        with file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield peers_pb2.FetchWeightsResponse(safetensors_chunk=chunk)

    async def SyncWeights(
        self, request: peers_pb2.SyncWeightsRequest, context: Context
    ) -> peers_pb2.SyncWeightsResponse:
        await self.sync()
        return peers_pb2.SyncWeightsResponse()

    async def keep_equal(self) -> None:
        """Asks the peers every second, until it is cancelled."""
        while self._addresses:
            await contained(self.sync, "comparing kept weights failed")
            await asyncio.sleep(_EVERY_S)

    async def sync(self) -> bool:
        """Adopts the peers' kept weights where they are later. Returns whether all answered."""
        answered = await asyncio.gather(
            *(self._from(one, partial(self._pull, one)) for one in self._addresses)
        )
        return all(answered)

    async def share(self) -> None:
        """Makes the peers adopt this router's kept weights. Those that are away ask later."""
        await asyncio.gather(*(self._from(one, self._poke) for one in self._addresses))

    async def _from(
        self,
        address: str,
        work: Callable[["peers_pb2_grpc.PeerServiceAsyncStub"], Awaitable[None]],
    ) -> bool:
        try:
            async with open_channel(address, own_connection=True) as channel:
                with typed_rpc():
                    await work(peers_pb2_grpc.PeerServiceStub(channel))
        except RollmeshError as error:
            level = logging.DEBUG if error.code in _AWAY else logging.WARNING
            _log.log(level, "kept weights not equal", extra=fields(peer=address, error=str(error)))
            return False
        return True

    async def _poke(self, stub: "peers_pb2_grpc.PeerServiceAsyncStub") -> None:
        await stub.ListKeptWeights(peers_pb2.ListKeptWeightsRequest(), timeout=_LIST_S)
        limit_s = self._config.control_timeout_ms / 1000  # it fetches the files first
        await stub.SyncWeights(peers_pb2.SyncWeightsRequest(), timeout=limit_s)

    async def _pull(self, address: str, stub: "peers_pb2_grpc.PeerServiceAsyncStub") -> None:
        request = peers_pb2.ListKeptWeightsRequest()
        response = await stub.ListKeptWeights(request, timeout=_LIST_S)
        self._models.pins.heard(address, response.pins)
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
        stub: "peers_pb2_grpc.PeerServiceAsyncStub",
        kept: KeptWeights,
        header: Header,
    ) -> None:
        request = peers_pb2.FetchWeightsRequest(model=kept.model, push_id=header.push_id)
        call = stub.FetchWeights(request, timeout=self._config.control_timeout_ms / 1000)
        async with aclosing(read_stream(call)) as responses:
            chunks = (one.safetensors_chunk async for one in responses)
            await receive(kept, header, chunks, 0, self._config.push_silence_ms)
        await asyncio.to_thread(kept.keep_part, header)


async def receive(
    kept: KeptWeights,
    header: Header,
    chunks: AsyncIterator[bytes],
    claimed: int,
    silence_ms: int,
) -> None:
    """Writes the chunks of a weights file to a partial file, which is removed if that fails.

    Raises:
        InvalidFieldError: The size differs from the announced one.
        StoreFullError: The disk has too little free space.
        StoreError: The file could not be written.
        DeadlineError: The sender paused for too long.
    """
    file = await asyncio.to_thread(kept.open_part, header, claimed)
    try:
        with typed_errors(kept.folder), file:
            await write_chunks(
                file, header.safetensors_bytes, chunks, silence_ms, "the router's push_silence_ms"
            )
            await asyncio.to_thread(sync, file)
    except BaseException:
        await asyncio.to_thread(kept.discard_part, header)
        raise
