"""Engines, and what a gateway sees of them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from rollmesh.router.leasing.circuit import Circuit, CircuitState
from rollmesh.v1 import router_pb2


class Target(NamedTuple):
    """The weights that an engine of a model must hold to be leased."""

    policy_version: int
    push_id: str


@dataclass(slots=True, eq=False)
class Lease:
    """A slot on an engine, for one turn."""

    stream_id: str
    lease_id: str
    engine: "Engine"
    epoch: int
    """Epoch of the engine's circuit when the lease was granted."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. `LeaseTable.changed` must hear of every change that is made from outside."""

    engine_id: str
    address: str
    model: str
    capacity: int
    policy_version: int = 0
    draining: bool = False
    paused: bool = False
    """It samples nothing for now; requests wait in it."""
    sleeping: bool = False
    """It has given its memory away."""
    push_id: str = ""
    """Id of the push that delivered its weights; empty for its initial weights."""
    tokenizer_sha256: str = ""
    """Empty if it has no tokenizer; such an engine is compatible with any gateway."""
    vocabulary_tokens: int = 0
    fault: str = ""
    """The impossible answer that took it out of service. Cleared when it registers again."""
    reports: dict[str, str] = field(default_factory=dict)
    """Gateways that reported an impossible answer of it, and the answer."""
    update_error: str = ""
    """Why its last weight update failed; empty if it succeeded."""
    circuit: Circuit = field(default_factory=Circuit)
    held: set[Lease] = field(default_factory=set)
    most_held: int = 0
    """The most leases on it at a time since its last report."""
    elsewhere: int = 0
    """Generations that it reported and that no lease accounts for: those of other routers."""
    sessions: set[str] = field(default_factory=set)
    """Ids of the sessions that are placed on it."""
    last_picked: int = 0
    """Sequence number of its last pick, so that ties rotate."""
    number: int = 0
    """Numbers grow in the order in which engines were added."""

    @property
    def leases(self) -> int:
        """Number of leases on it."""
        return len(self.held)

    @property
    def busy(self) -> int:
        """Number of leases on it, with those of other routers."""
        return len(self.held) + self.elsewhere

    @property
    def has_slot(self) -> bool:
        """Whether it can take one more lease."""
        return self.busy < self.capacity and self.circuit.admits

    def book(self, lease: Lease) -> None:
        """Takes a slot."""
        self.held.add(lease)
        self.most_held = max(self.most_held, len(self.held))

    def report(self, generations: int) -> None:
        """Takes the number of generations that it holds.

        Those that this router knows of are subtracted, ended ones included: a report and a release
        may overtake one another. So what other routers book is seen within a report, and may be
        underestimated until the next.
        """
        self.elsewhere = max(0, generations - self.most_held)
        self.most_held = len(self.held)


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


def why_distrusted(engine: Engine, gateway_id: str) -> str:
    """Returns why one gateway cannot lease an engine that others can; empty if it can."""
    fault = engine.reports.get(gateway_id, "")
    return fault and (
        f"it is out of service for gateway {gateway_id} until it registers again: {fault}"
    )


def fits(engine: Engine, gateway: router_pb2.DispatchHello) -> bool:
    """Returns whether an engine has the model, tokenizer and vocabulary of a gateway."""
    return gateway.model in {"", engine.model} and not misfit(engine, gateway)


def why_unfit(
    engine: Engine, target: Target | None, offered: Target | None
) -> router_pb2.Exclusion | None:
    """Returns why no gateway can lease an engine; None if it can be leased.

    Args:
        engine: The engine.
        target: Weights that engines of its model must hold; None before the first push.
        offered: Weights of a push that is not accepted yet.
    """
    if engine.fault:
        why = f"it is out of service until it registers again: {engine.fault}"
        return router_pb2.Exclusion(reason=router_pb2.EXCLUSION_REASON_FAULT, explanation=why)
    if engine.draining:
        return router_pb2.Exclusion(
            reason=router_pb2.EXCLUSION_REASON_DRAINING, explanation="it is draining"
        )
    if is_fenced(engine, target, offered):
        return router_pb2.Exclusion(
            reason=router_pb2.EXCLUSION_REASON_FENCED, explanation=_why_fenced(engine, target)
        )
    if engine.circuit.state is CircuitState.OPEN:
        return router_pb2.Exclusion(
            reason=router_pb2.EXCLUSION_REASON_CIRCUIT_OPEN,
            explanation="its circuit is open: gateways lost several turns on it in a row",
        )
    if engine.sleeping:
        return router_pb2.Exclusion(
            reason=router_pb2.EXCLUSION_REASON_SLEEPING, explanation="it sleeps; wake it up"
        )
    return None


def is_fenced(engine: Engine, target: Target | None, offered: Target | None) -> bool:
    """Returns whether an engine is fenced: it does not hold the target weights of its model.

    Before the first push is accepted, an engine may hold any weights but those of that push.
    """
    held = Target(engine.policy_version, engine.push_id)
    return held == offered if target is None else held != target


def will_sample(engine: Engine, *, fenced: bool) -> bool:
    """Returns whether an engine that cannot be leased now will sample without a restart.

    It sleeps, or it is being brought up to date. An engine whose update failed may never be.
    """
    if engine.fault or engine.draining:
        return False
    return engine.sleeping or (fenced and not engine.update_error)


def _why_fenced(engine: Engine, target: Target | None) -> str:
    held = engine.policy_version
    if target is None:
        return f"it holds version {held} of a push that is not accepted yet"
    wanted = target.policy_version
    other = " of another push" if held == wanted else ""
    why = f": {engine.update_error}" if engine.update_error else ""
    return f"it holds version {held}{other}, not {wanted}{why}"
