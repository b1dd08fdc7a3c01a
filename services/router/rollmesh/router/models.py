"""The models of a mesh: their engines, and the weights that those must hold."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from rollmesh.internal.v1 import peers_pb2
from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.engines import Engine, Fleet, Target
from rollmesh.router.kept import KeptWeights, restored, revision_of
from rollmesh.router.membership import Members
from rollmesh.router.pins import Pins
from rollmesh.runtime import clock
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.rpc import open_channel, to_status, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2, sampling_pb2

_DROP_S = 0.5
"""Longest time for which revisions are dropped, seconds."""


async def call_engine(
    engine: Engine,
    call: Callable[
        ["engine_pb2_grpc.EngineServiceAsyncStub"], Awaitable[engine_pb2.EngineResult | None]
    ],
) -> engine_pb2.EngineResult:
    """Calls an engine and returns its result, which `call` may give. A failed call has one too."""
    try:
        async with open_channel(engine.address) as channel:
            with typed_errors():
                result = await call(engine_pb2_grpc.EngineServiceStub(channel))
    except RollmeshError as error:
        return failed(engine, error)
    result = result or engine_pb2.EngineResult()
    result.engine_id = engine.engine_id
    return result


def failed(engine: Engine, error: RollmeshError) -> engine_pb2.EngineResult:
    """Returns the result of a failed call."""
    return engine_pb2.EngineResult(engine_id=engine.engine_id, status=to_status(error))


class Models:
    """The models of engines and gateways, and the kept weights of each.

    Invariant: the fleet's target of a model is `current` of its kept weights, and its offer is
    `offered`.
    """

    def __init__(self, fleet: Fleet, members: Members, config: RouterConfig) -> None:
        self.gathered_ms = clock.monotonic_ms() + config.gather_ms
        """When members have had the time to register again after this router's start."""
        self.pins = Pins(config)
        """The pins of weights."""
        self.fleet = fleet
        self.members = members
        self._data_dir = config.data_dir
        self._most_revisions = config.max_adapter_lag + 1
        self.all_kept: dict[str, KeptWeights] = {}
        """The kept weights by model."""
        self._locks: dict[str, asyncio.Lock] = {}

    async def restore(self) -> None:
        """Reads the kept weights of earlier runs, in a thread.

        Raises:
            StoreError: The folder cannot be read or written.
        """
        for kept in await asyncio.to_thread(restored, self._data_dir):
            self.all_kept[kept.model] = kept
            self.show(kept)

    def names(self) -> set[str]:
        """Returns the models of engines and gateways, and those with kept weights."""
        kept = {name for name, one in self.all_kept.items() if one.current or one.state.adapters}
        return self.members.models() | kept

    def weights(self) -> list[router_pb2.ModelWeights]:
        """Returns the target and the last version of every model, sorted by name."""
        return [
            router_pb2.ModelWeights(
                model=name,
                target_policy_version=self.kept(name).target_version,
                last_policy_version=self.kept(name).last_version,
                adapters=self.kept(name).retained,
                runs={one.run.adapter: one.run for one in self.kept(name).state.runs}.values(),
                pins=self.pins.shown(name),
            )
            for name in sorted(self.names())
        ]

    async def named(self, model: str, field: str = "model", *, waits: bool = True) -> str:
        """Returns the model that a call names. An empty name means the only model.

        Engines can register again for a while after this router's start. Until then it waits.

        Args:
            model: Name given in the call.
            field: Name of the field, for errors.
            waits: Whether to wait also if the model is known already, or is the only one so far.

        Raises:
            InvalidFieldError: The mesh does not have the model, or has several and none is named.
        """
        so_far = self.names()
        if waits or (model not in so_far if model else len(so_far) != 1):
            await self.gather()
        known = sorted(self.names())
        if model in known or (not model and len(known) == 1):
            return model or known[0]
        names = ", ".join(known) or "none: no engine or gateway is registered yet"
        problem = f"{model!r} is not in the mesh" if model else "is empty"
        raise InvalidFieldError(field, f"{problem}; give one of those there are ({names})")

    async def gather(self) -> None:
        """Waits until members have had the time to register again after this router's start."""
        wait_ms = self.gathered_ms - clock.monotonic_ms()
        await asyncio.sleep(max(wait_ms, 0) / 1000)

    def surviving(
        self, model: str, adapters: Sequence[peers_pb2.KeptAdapter]
    ) -> list[peers_pb2.KeptAdapter]:
        """Returns the adapters of a model that stay, in their order.

        Offers that are not accepted stay, and so do the newest revisions of a name and all that
        sessions name.
        """
        if len(adapters) <= self._most_revisions:
            return list(adapters)
        named = self.members.named_adapters(model)
        kept, count = list[peers_pb2.KeptAdapter](), Counter[str]()
        for one in reversed(adapters):
            name = one.header.adapter.name
            count[name] += one.accepted
            is_new = not one.accepted or count[name] <= self._most_revisions
            if is_new or revision_of(one.header.adapter) in named:
                kept.append(one)
        return kept[::-1]

    async def lost_adapters(self, hello: router_pb2.ReplicaHello) -> list[sampling_pb2.AdapterRef]:
        """Returns the revisions that a gateway's last report names and that are not retained.

        A drop that is under way did not know of the report, so its end is waited for. A longer
        work on the kept weights drops nothing.
        """
        lock = self.lock(hello.model)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DROP_S), lock:
                pass
        retained = self.kept(hello.model).retained
        return [one for one in hello.load.pinned_adapters if one not in retained]

    def kept(self, model: str) -> KeptWeights:
        """Returns the kept weights of a model."""
        kept = self.all_kept.get(model)
        if kept is None:
            kept = self.all_kept[model] = KeptWeights(self._data_dir, model)
        return kept

    def left(self, model: str) -> None:
        """Forgets a model whose last member has left, unless it has weights.

        The revision of weights that were forgotten remains, for peers that do not know of it.
        """
        kept = self.all_kept.get(model)
        if kept is None or kept.offered or kept.state.adapters or model in self.names():
            return
        if (lock := self._locks.get(model)) is None or not lock.locked():
            metrics.forget_target(model)
            self._locks.pop(model, None)
            if not kept.state.revision:
                del self.all_kept[model]

    def lock(self, model: str) -> asyncio.Lock:
        """Returns the lock that guards changes of a model's kept weights."""
        return self._locks.setdefault(model, asyncio.Lock())

    def show(self, kept: KeptWeights) -> None:
        """Tells the fleet which weights of a model are current and which are offered."""
        self.fleet.retain(kept.model, map(revision_of, kept.retained))
        self.fleet.aim(kept.model, _target(kept.current), _target(kept.offered))
        metrics.show_target(kept.model, kept.target_version)


def _target(header: engine_pb2.UpdateWeightsHeader | None) -> Target | None:
    return None if header is None else Target(header.policy_version, header.push_id)
