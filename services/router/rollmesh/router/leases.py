"""Engines, sessions and leases: plain state and one placement rule.

Invariants after every step:

* `engine.leases` is the number of leases on that engine; never negative.
* `engine.sessions` is the set of sessions placed on that engine; a session has at most one engine.
* A stream that ended holds no leases.
"""

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollmesh.runtime.errors import EnginesBusyError, InvalidLeaseError, NoEngineError
from rollmesh.v1 import router_pb2

IMBALANCE_FACTOR = 1.5
"""A session leaves an engine with more than this many times the mean number of sessions ..."""
IMBALANCE_MARGIN = 8
"""... and at least this many more than the mean."""
_NO_ENGINE_MS, _BUSY_MS = 200, 100
_MOST_WHYS = 3


class Target(NamedTuple):
    """The weights that an engine of a model must hold to be leased."""

    policy_version: int
    push_id: str


@dataclass(slots=True, eq=False)
class Engine:
    """One engine."""

    engine_id: str
    address: str
    model: str
    capacity: int
    policy_version: int = 0
    draining: bool = False
    push_id: str = ""
    """Id of the push that delivered its weights; empty for its initial weights."""
    tokenizer_sha256: str = ""
    """Empty if it has no tokenizer; such an engine is compatible with any gateway."""
    vocabulary_tokens: int = 0
    fault: str = ""
    """The impossible answer that took it out of service. Cleared when it registers again."""
    update_error: str = ""
    """Why its last weight update failed; empty if it succeeded."""
    leases: int = 0
    sessions: set[str] = field(default_factory=set)
    last_picked: int = 0
    """Sequence number of its last pick, so that ties rotate."""


def misfit(engine: Engine, gateway: router_pb2.DispatchHello) -> str:
    """Returns why an engine cannot serve a gateway of its model; empty if it can."""
    if not engine.tokenizer_sha256 or not gateway.tokenizer_sha256:
        return ""
    if engine.tokenizer_sha256 != gateway.tokenizer_sha256:
        return (
            f"its tokenizer ({engine.tokenizer_sha256[:12]}) is not that of gateway "
            f"{gateway.gateway_id} ({gateway.tokenizer_sha256[:12]})"
        )
    sizes = engine.vocabulary_tokens, gateway.vocabulary_tokens
    if all(sizes) and sizes[0] != sizes[1]:
        return f"it has {sizes[0]} token ids, and gateway {gateway.gateway_id} has {sizes[1]}"
    return ""


def is_overloaded(engine: Engine, mean_sessions: float) -> bool:
    """Returns whether sessions should leave an engine to balance the load."""
    held = len(engine.sessions)
    return held > IMBALANCE_FACTOR * mean_sessions and held >= mean_sessions + IMBALANCE_MARGIN


def pick(
    engines: Collection[Engine],
    *,
    placed: Engine | None,
    sibling: Engine | None,
    mean_sessions: float,
) -> Engine | None:
    """Picks one of the engines that can be leased now.

    A session stays on its engine (`placed`), and a new session joins the siblings of its group
    (`sibling`), unless that engine is overloaded. Otherwise the engine with the fewest sessions
    wins; ties go to the fewest leases, then to the least recently picked.
    """
    for wanted in (placed, sibling):
        if wanted is not None and wanted in engines and not is_overloaded(wanted, mean_sessions):
            return wanted
    return min(
        engines,
        key=lambda engine: (len(engine.sessions), engine.leases, engine.last_picked),
        default=None,
    )


class LeaseTable:
    """The router's state; every method is one synchronous step."""

    def __init__(self) -> None:
        """Starts empty."""
        self.engines: dict[str, Engine] = {}
        self.targets: dict[str, Target] = {}
        """The weights that engines must hold, by model; none before the first push."""
        self.offered: dict[str, Target] = {}
        """Pushes that engines may hold although they are not accepted yet, by model."""
        self._held: dict[str, dict[str, Engine]] = {}  # stream -> lease -> engine
        self._gateways: dict[str, router_pb2.DispatchHello] = {}  # by stream
        self._placed: dict[str, Engine] = {}  # by session
        self._owners: dict[str, str] = {}  # session -> stream that used it last
        self._group_of: dict[str, str] = {}
        self._groups: dict[str, dict[str, None]] = {}  # group -> sessions, oldest first
        self._picks = 0

    def __repr__(self) -> str:
        """Returns the counts: "2 engines, 3 sessions, 1 leases"."""
        leases = sum(map(len, self._held.values()))
        return f"{len(self.engines)} engines, {len(self._placed)} sessions, {leases} leases"

    def add_engine(self, engine: Engine) -> None:
        """Adds an engine; the state of an earlier engine with the same id is dropped."""
        self.remove_engine(engine.engine_id)
        self.engines[engine.engine_id] = engine

    def remove_engine(self, engine_id: str) -> None:
        """Removes an engine with its leases and placements."""
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return
        for session_id in tuple(engine.sessions):
            self._unplace(session_id)
        for leases in self._held.values():
            for lease_id in [id_ for id_, holder in leases.items() if holder is engine]:
                del leases[lease_id]

    def open_stream(self, stream_id: str, gateway: router_pb2.DispatchHello) -> None:
        """Opens a gateway's stream."""
        self._held[stream_id] = {}
        self._gateways[stream_id] = gateway

    def close_stream(self, stream_id: str) -> None:
        """Closes a gateway's stream: releases its leases and forgets its sessions."""
        for lease_id in tuple(self._held.get(stream_id, ())):
            self.release(stream_id, lease_id)
        self._held.pop(stream_id, None)
        self._gateways.pop(stream_id, None)
        for session_id in [id_ for id_, owner in self._owners.items() if owner == stream_id]:
            self.forget(session_id)

    def acquire(
        self,
        stream_id: str,
        lease_id: str,
        session_id: str,
        *,
        group_id: str = "",
        excluded: Iterable[str] = (),
    ) -> router_pb2.LeaseGrant:
        """Grants a lease for one turn of a session.

        Raises:
            InvalidLeaseError: An id is missing or in use, or the gateway has to name its model.
            NoEngineError: No engine can serve the turn.
            EnginesBusyError: Every engine that can serve it is full.
        """
        if not lease_id or not session_id or lease_id in self._held[stream_id]:
            raise InvalidLeaseError(
                "acquire",
                "lease_id and session_id must be set, and no lease may have this lease_id",
            )
        gateway, models = self._gateways[stream_id], sorted(self.models())
        if not gateway.model and len(models) > 1:
            known = ", ".join(models)
            raise InvalidLeaseError("acquire", f"model: is empty; give one of {known}")
        own = [one for one in self.engines.values() if gateway.model in {"", one.model}]
        left_out = set(excluded)
        sound = [
            engine
            for engine in own
            if engine.engine_id not in left_out
            and self._unfit(engine) is None
            and not misfit(engine, gateway)
        ]
        if not sound:
            raise NoEngineError(self._why_none(own, gateway), retry_delay_ms=_NO_ENGINE_MS)
        free = [engine for engine in sound if engine.leases < engine.capacity]
        engine = pick(
            free,
            placed=self._placed.get(session_id),
            sibling=self._sibling(session_id, group_id),
            mean_sessions=sum(len(e.sessions) for e in sound) / len(sound),
        )
        if engine is None:
            raise EnginesBusyError(f"all {len(sound)} engines are full", retry_delay_ms=_BUSY_MS)
        self._picks += 1
        engine.last_picked = self._picks
        engine.leases += 1
        self._held[stream_id][lease_id] = engine
        self._place(stream_id, session_id, group_id, engine)
        return router_pb2.LeaseGrant(
            engine_id=engine.engine_id,
            address=engine.address,
            policy_version=engine.policy_version,
        )

    def release(self, stream_id: str, lease_id: str) -> None:
        """Releases a lease; unknown leases are ignored."""
        engine = self._held.get(stream_id, {}).pop(lease_id, None)
        if engine is not None:
            engine.leases -= 1

    def forget(self, session_id: str) -> None:
        """Forgets the placement of a session."""
        self._unplace(session_id)
        self._owners.pop(session_id, None)
        self._leave_group(session_id)

    def models(self) -> set[str]:
        """Returns the models of all engines."""
        return {engine.model for engine in self.engines.values()}

    def fenced(self, engine: Engine) -> bool:
        """Returns whether an engine is fenced: it does not hold the target weights of its model.

        Before the first push is accepted, an engine may hold any weights but those of that push.
        """
        held = Target(engine.policy_version, engine.push_id)
        target = self.targets.get(engine.model)
        return held == self.offered.get(engine.model) if target is None else held != target

    def take_out(self, stream_id: str, lease_id: str, fault: str) -> Engine | None:
        """Takes the engine of a lease out of service; returns None if the lease is not held."""
        engine = self._held.get(stream_id, {}).get(lease_id)
        if engine is not None:
            engine.fault = fault
        return engine

    def exclusion(self, engine: Engine) -> router_pb2.Exclusion | None:
        """Returns why some gateways of its model cannot lease an engine; None if all can."""
        if unfit := self._unfit(engine):
            return unfit
        for gateway in self._gateways.values():
            if gateway.model == engine.model and (why := misfit(engine, gateway)):
                return router_pb2.Exclusion(
                    reason=router_pb2.EXCLUSION_REASON_MISFIT, explanation=why
                )
        return None

    def _why_none(self, engines: Collection[Engine], gateway: router_pb2.DispatchHello) -> str:
        whys = (f"{one.engine_id}: {self._why_not(one, gateway)}" for one in engines)
        of_model = f" of model {gateway.model!r}" if gateway.model else ""
        return f"none of {len(engines)} engines{of_model} can serve; " + "; ".join(
            itertools.islice(whys, _MOST_WHYS)
        )

    def _why_not(self, engine: Engine, gateway: router_pb2.DispatchHello) -> str:
        unfit = self._unfit(engine)
        return unfit.explanation if unfit else misfit(engine, gateway) or "it failed this turn"

    def _unfit(self, engine: Engine) -> router_pb2.Exclusion | None:
        """Returns why no gateway can lease an engine; None if it can be leased."""
        if engine.fault:
            why = f"it is out of service until it registers again: {engine.fault}"
            return router_pb2.Exclusion(reason=router_pb2.EXCLUSION_REASON_FAULT, explanation=why)
        if engine.draining:
            return router_pb2.Exclusion(
                reason=router_pb2.EXCLUSION_REASON_DRAINING, explanation="it is draining"
            )
        if not self.fenced(engine):
            return None
        held, target = engine.policy_version, self.targets.get(engine.model)
        if target is None:
            return router_pb2.Exclusion(
                reason=router_pb2.EXCLUSION_REASON_FENCED,
                explanation=f"it holds version {held} of a push that is not accepted yet",
            )
        wanted = target.policy_version
        other = " of another push" if held == wanted else ""
        why = f": {engine.update_error}" if engine.update_error else ""
        return router_pb2.Exclusion(
            reason=router_pb2.EXCLUSION_REASON_FENCED,
            explanation=f"it holds version {held}{other}, not {wanted}{why}",
        )

    def _sibling(self, session_id: str, group_id: str) -> Engine | None:
        if session_id in self._placed:
            return None
        for other in self._groups.get(group_id, ()):
            if other in self._placed:
                return self._placed[other]
        return None

    def _place(self, stream_id: str, session_id: str, group_id: str, engine: Engine) -> None:
        self._unplace(session_id)
        self._placed[session_id] = engine
        engine.sessions.add(session_id)
        self._owners[session_id] = stream_id
        if group_id not in {"", self._group_of.get(session_id)}:
            self._leave_group(session_id)
            self._group_of[session_id] = group_id
            self._groups.setdefault(group_id, {})[session_id] = None

    def _unplace(self, session_id: str) -> None:
        engine = self._placed.pop(session_id, None)
        if engine is not None:
            engine.sessions.remove(session_id)

    def _leave_group(self, session_id: str) -> None:
        group_id = self._group_of.pop(session_id, None)
        if group_id is None:
            return
        del self._groups[group_id][session_id]
        if not self._groups[group_id]:
            del self._groups[group_id]
