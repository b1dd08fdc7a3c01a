"""The registered engines: which gateways can lease them, and why not."""

import itertools
from collections.abc import Callable, Collection

from rollmesh.router.leasing.circuit import CircuitState
from rollmesh.router.leasing.engines import (
    Engine,
    Target,
    fits,
    is_fenced,
    misfit,
    why_distrusted,
    why_unfit,
    will_sample,
)
from rollmesh.router.leasing.policies import Rank
from rollmesh.router.leasing.pools import Kind, Pool, kind_of
from rollmesh.router.leasing.ranking import Ranking
from rollmesh.v1 import router_pb2

_MOST_WHYS = 3


class Fleet:
    """The engines, by id, by model, and in a pool for each kind of gateway.

    Invariant: a pool holds the engines in service that fit its gateways.
    """

    def __init__(self, rank: Callable[[Engine], Rank]) -> None:
        """Starts empty.

        Args:
            rank: Ranks engines for a pick.
        """
        self.engines: dict[str, Engine] = {}
        self.on_change: Callable[[], None] = _ignore
        """Called after a change that may let waiting requests go on."""
        self.on_circuit: Callable[[Engine], None] = _ignore
        """Called after the circuit of an engine changed its state."""
        self.on_offer: Callable[[str], None] = _ignore
        """Called with the name of a model after the weights changed that its engines may hold."""
        self._rank = rank
        self._targets: dict[str, Target] = {}  # by model
        self._offered: dict[str, Target] = {}  # by model
        self._models: dict[str, dict[Engine, None]] = {}
        self._pools: dict[Kind, Pool] = {}
        self._opened: Ranking[Engine, tuple[int, int]] = Ranking()  # open circuits, by their end
        self._added = itertools.count(1)

    @property
    def models(self) -> Collection[str]:
        """The models of all engines."""
        return self._models.keys()

    @property
    def pools(self) -> Collection[Pool]:
        """The pools of the gateways that are connected."""
        return self._pools.values()

    @property
    def open_circuits(self) -> int:
        """Number of engines whose circuit is open."""
        return len(self._opened)

    def add(self, engine: Engine) -> None:
        """Adds an engine; no engine has its id."""
        engine.number = next(self._added)
        self.engines[engine.engine_id] = engine
        self._models.setdefault(engine.model, {})[engine] = None
        self.changed(engine)

    def remove(self, engine_id: str) -> Engine | None:
        """Removes and returns an engine; returns None if there is none of that id."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return None
        own = self._models[engine.model]
        del own[engine]
        if not own:
            del self._models[engine.model]
        self._opened.discard(engine)
        for pool in self.pools:
            pool.admit(engine, in_service=False)
        self.on_change()
        return engine

    def changed(self, engine: Engine) -> None:
        """Takes note of a change of an engine's state, such as its weights."""
        if self.engines.get(engine.engine_id) is not engine:
            return
        in_service = self._why_unfit(engine) is None
        for pool in self.pools:
            pool.admit(engine, in_service=in_service)
        self.on_change()

    def circuit_changed(self, engine: Engine) -> None:
        """Takes note of a change of the state of an engine's circuit."""
        if self.engines.get(engine.engine_id) is not engine:
            return
        if engine.circuit.state is CircuitState.OPEN:
            self._opened.set(engine, (engine.circuit.until_ms, engine.number))
        else:
            self._opened.discard(engine)
        self.changed(engine)
        self.on_circuit(engine)

    def half_open(self, now_ms: int) -> None:
        """Half-opens the circuits that were open for long enough."""
        while (due_ms := self.half_opens_ms()) is not None and due_ms <= now_ms:
            engine = self._opened.first()
            assert engine is not None
            engine.circuit.half_open()
            self.circuit_changed(engine)

    def half_opens_ms(self) -> int | None:
        """Returns when the next circuit half-opens; None if none is open."""
        engine = self._opened.first()
        return None if engine is None else engine.circuit.until_ms

    def aim(self, model: str, target: Target | None, offered: Target | None) -> None:
        """Sets the weights that the engines of a model must hold to be leased.

        Args:
            model: Name of the model.
            target: Weights of the last accepted push; None before the first.
            offered: Weights of a push that engines may hold although it is not accepted yet.
        """
        for shown, weights in ((self._targets, target), (self._offered, offered)):
            if weights is None:
                shown.pop(model, None)
            else:
                shown[model] = weights
        for engine in self._models.get(model, ()):
            self.changed(engine)
        self.on_offer(model)

    def offered_models(self) -> Collection[str]:
        """Returns the models to which weights were offered."""
        return self._targets.keys() | self._offered.keys()

    def newest_version(self, model: str) -> int | None:
        """Returns the highest version that engines of a model may hold; None before a push."""
        both = self._targets.get(model), self._offered.get(model)
        return max((one.policy_version for one in both if one is not None), default=None)

    def of_model(self, model: str) -> list[Engine]:
        """Returns the engines of a model; an empty name means all models."""
        return list(self._models.get(model, ()) if model else self.engines.values())

    def join(self, gateway: router_pb2.DispatchHello) -> Pool:
        """Returns the pool of a gateway that has connected."""
        pool = self._pools.get(kind_of(gateway))
        if pool is None:
            pool = self._pools[kind_of(gateway)] = Pool(gateway, self._rank)
            for engine in self.engines.values():
                pool.admit(engine, in_service=self._why_unfit(engine) is None)
        pool.users += 1
        return pool

    def leave(self, pool: Pool) -> None:
        """Drops the pool of a gateway that has left, unless others use it."""
        pool.users -= 1
        if not pool.users:
            del self._pools[kind_of(pool.gateway)]

    def touch(self, engine: Engine, sessions: int = 0) -> None:
        """Notes that the leases of an engine have changed, and by how many its sessions."""
        for pool in self.pools:
            pool.touch(engine, sessions)

    def freed(self, engine: Engine, now_ms: int) -> None:
        """Notes that a turn on an engine has ended."""
        for pool in self.pools:
            if engine in pool.engines:
                pool.freed(now_ms)

    def fenced(self, engine: Engine) -> bool:
        """Returns whether an engine is fenced: it does not hold the target weights of its model."""
        return is_fenced(engine, *self._weights(engine))

    def is_suspended(self, pool: Pool) -> bool:
        """Returns whether engines that fit a pool are there, and none of them samples now.

        Each is paused, sleeps, or is being brought up to date.
        """
        if not all(engine.paused for engine in pool.engines):
            return False
        model = pool.gateway.model
        return bool(pool.engines) or any(
            will_sample(engine, fenced=self.fenced(engine)) and fits(engine, pool.gateway)
            for engine in (self._models.get(model, ()) if model else self.engines.values())
        )

    def exclusion(self, engine: Engine) -> router_pb2.Exclusion | None:
        """Returns why some gateways of its model cannot lease an engine; None if all can."""
        if unfit := self._why_unfit(engine):
            return unfit
        for pool in self.pools:
            if pool.gateway.model == engine.model and (why := misfit(engine, pool.gateway)):
                return router_pb2.Exclusion(
                    reason=router_pb2.EXCLUSION_REASON_MISFIT, explanation=why
                )
        for gateway_id in engine.reports:
            return router_pb2.Exclusion(
                reason=router_pb2.EXCLUSION_REASON_FAULT,
                explanation=why_distrusted(engine, gateway_id),
            )
        return None

    def why_none(self, gateway: router_pb2.DispatchHello) -> str:
        """Returns why no engine can serve a turn of a gateway, for people."""
        engines = self.of_model(gateway.model)
        whys = (f"{one.engine_id}: {self._why_not(one, gateway)}" for one in engines)
        of_model = f" of model {gateway.model!r}" if gateway.model else ""
        return f"none of {len(engines)} engines{of_model} can serve; " + "; ".join(
            itertools.islice(whys, _MOST_WHYS)
        )

    def _why_not(self, engine: Engine, gateway: router_pb2.DispatchHello) -> str:
        unfit = self._why_unfit(engine)
        if unfit:
            return unfit.explanation
        return (
            misfit(engine, gateway)
            or why_distrusted(engine, gateway.gateway_id)
            or "it failed this turn"
        )

    def _why_unfit(self, engine: Engine) -> router_pb2.Exclusion | None:
        return why_unfit(engine, *self._weights(engine))

    def _weights(self, engine: Engine) -> tuple[Target | None, Target | None]:
        return self._targets.get(engine.model), self._offered.get(engine.model)


def _ignore(*_: object) -> None:
    """Listens to nothing."""
