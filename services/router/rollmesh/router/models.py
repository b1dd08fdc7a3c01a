"""The models of a mesh: their engines, the weights that those must hold, and pins of them.

Pins are plain state, except for the wait. Pins and pushes of other routers are known by their last
list. Each is announced before the peers are asked, so of a pin and a push at two routers at least
one sees the other.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rollmesh.internal.v1 import peers_pb2
from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.engines import Engine, Fleet, Target
from rollmesh.router.kept import KeptWeights, restored, revision_of
from rollmesh.router.membership import Members
from rollmesh.runtime import clock, told
from rollmesh.runtime.errors import (
    InvalidFieldError,
    OverloadedError,
    RollmeshError,
    ShuttingDownError,
    WeightsPinnedError,
)
from rollmesh.runtime.rpc import open_channel, to_status, typed_errors
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2, sampling_pb2

_log = logging.getLogger(__name__)

# Pins of weights: an evaluation keeps the weights of a model until it ends, and pushes wait.

_MOST_PINS = 1_024
_HEARD_MS = 5_000
"""Time for which the last list of a peer tells of its pushes. A dead one has none."""
_SPARE_MS = 5_000
"""Time before the deadline of a push at which it gives up, to say why."""


@dataclass(frozen=True, slots=True)
class _Pin:
    """A pin. Times are monotonic milliseconds."""

    holder: str
    policy_version: int
    ends_ms: int
    lapses_ms: int
    """When it ends unless it is renewed."""

    @property
    def until_ms(self) -> int:
        return min(self.ends_ms, self.lapses_ms)


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last list of a peer for a model."""

    pins: list[_Pin]
    pushes: int
    heard_ms: int


class Pins:
    """The pins of all models, and the pushes of weights that wait or are under way."""

    def __init__(self, config: RouterConfig) -> None:
        self._pin_ms, self._most_ms = config.pin_ms, config.max_pin_ms
        self._own: dict[str, dict[str, _Pin]] = {}
        self._pushes: Counter[str] = Counter()
        self._peers: dict[tuple[str, str], _Heard] = {}
        """By the peer's address and by model."""
        self._changed = asyncio.Event()
        self._ended = False

    def hold(self, model: str, holder: str, policy_version: int, remaining_ms: int) -> bool:
        """Sets or renews a pin. Returns whether it is new, here and at the peers.

        Raises:
            InvalidFieldError: Its time is too long.
            OverloadedError: There are too many.
        """
        if remaining_ms > self._most_ms:
            raise InvalidFieldError(
                "remaining_ms",
                f"is {remaining_ms}; give at most {self._most_ms}, the router's max_pin_ms",
            )
        now_ms = clock.monotonic_ms()
        own = {at: pin for at, pin in self._own.get(model, {}).items() if pin.until_ms > now_ms}
        if len(own) >= _MOST_PINS:
            raise OverloadedError(f"{len(own)} evaluations pin the weights; wait until some end")
        known = {(pin.holder, pin.policy_version) for pin in self._of_model(model)}
        ends_ms, lapses_ms = now_ms + remaining_ms, now_ms + self._pin_ms
        self._own[model] = {**own, holder: _Pin(holder, policy_version, ends_ms, lapses_ms)}
        return (holder, policy_version) not in known

    def release(self, model: str, holder: str) -> None:
        """Ends a pin, if there is one."""
        self._own.get(model, {}).pop(holder, None)
        self._changed.set()

    def pushes(self, model: str) -> int:
        """Returns the number of pushes that wait or are under way, at all routers."""
        since_ms = clock.monotonic_ms() - _HEARD_MS
        return self._pushes[model] + sum(
            heard.pushes
            for (_, of), heard in self._peers.items()
            if of == model and heard.heard_ms > since_ms
        )

    @contextmanager
    def pushing(self, model: str) -> Iterator[None]:
        """Announces a push of weights: no new pin is granted until the block ends."""
        self._pushes[model] += 1
        try:
            yield
        finally:
            self._pushes[model] -= 1

    async def wait(self, model: str, limit_s: float | None) -> None:
        """Waits until no pin is left.

        Raises:
            WeightsPinnedError: The deadline is too close.
            ShuttingDownError: The router stops.
        """
        give_up_ms = math.inf
        if limit_s is not None:
            give_up_ms = clock.monotonic_ms() + int(limit_s * 1000) - _SPARE_MS
        is_logged = False
        while pins := self._of_model(model):
            now_ms, pin = clock.monotonic_ms(), max(pins, key=lambda pin: pin.ends_ms)
            left_s = (pin.ends_ms - now_ms) / 1000
            if now_ms >= give_up_ms:
                raise WeightsPinnedError(
                    f"{pin.holder} pins {told(pin.policy_version)} for up to {left_s:.0f} s more; "
                    "push again later, or end it",
                    policy_version=pin.policy_version,
                    retry_delay_ms=pin.until_ms - now_ms,
                )
            if not is_logged:
                found = fields(model=model, holder=pin.holder, at_most_s=round(left_s))
                _log.info("push waits for pinned weights", extra=found)
                is_logged = True
            at_ms = min(give_up_ms, *(one.until_ms for one in pins))
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(at_ms - clock.monotonic_ms(), 0) / 1000):
                    await self._changed.wait()
            if self._ended:
                raise ShuttingDownError("the router is shutting down; push at another one")

    def end(self) -> None:
        """Ends the waits, with an error."""
        self._ended = True
        self._changed.set()

    def stated(self) -> Iterator[peers_pb2.ModelPins]:
        """Yields this router's own pins and pushes, for its peers."""
        now_ms = clock.monotonic_ms()
        for model in {*self._own, *self._pushes}:
            pins = [pin for pin in self._own.get(model, {}).values() if pin.until_ms > now_ms]
            yield peers_pb2.ModelPins(
                model=model,
                pins=[_proto(pin, pin.until_ms - now_ms) for pin in pins],
                pushes=self._pushes[model],
            )

    def heard(self, peer: str, stated: Iterable[peers_pb2.ModelPins]) -> None:
        """Takes the pins and pushes of a peer in place of its former ones."""
        now_ms = clock.monotonic_ms()
        for key in [key for key in self._peers if key[0] == peer]:
            del self._peers[key]
        for one in stated:
            pins = [
                _Pin(pin.holder, pin.policy_version, until_ms, until_ms)
                for pin, until_ms in ((pin, now_ms + pin.remaining_ms) for pin in one.pins)
            ]
            self._peers[peer, one.model] = _Heard(pins, one.pushes, now_ms)
        self._changed.set()

    def shown(self, model: str) -> list[router_pb2.WeightPin]:
        """Returns the pins of a model as clients see them."""
        now_ms = clock.monotonic_ms()
        return [_proto(pin, pin.ends_ms - now_ms) for pin in self._of_model(model)]

    def _of_model(self, model: str) -> list[_Pin]:
        pins = [pin for (_, of), one in self._peers.items() if of == model for pin in one.pins]
        now_ms, own = clock.monotonic_ms(), self._own.get(model, {})
        both = {pin.holder: pin for pin in [*pins, *own.values()] if pin.until_ms > now_ms}
        return list(both.values())


def _proto(pin: _Pin, remaining_ms: int) -> router_pb2.WeightPin:
    return router_pb2.WeightPin(
        holder=pin.holder, policy_version=pin.policy_version, remaining_ms=max(remaining_ms, 1)
    )


# Models, their engines, and the weights that those must hold.

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
