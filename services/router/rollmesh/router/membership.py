"""The registered replicas, and the rule that places new sessions on gateways."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollmesh.runtime import clock
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    NoGatewayError,
    ReplicaIdInUseError,
    RollmeshError,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import router_pb2, sampling_pb2

_log = logging.getLogger(__name__)
_TICK_MS = 250
_INTERVAL_MS = 5_000  # of replicas that promise none
_RETRY_MS = 1_000
_NAMED_MS = 600_000
_MOST_LEFT = 1_024


@dataclass(slots=True, eq=False)
class Member:
    """One replica and its `Register` stream."""

    hello: router_pb2.ReplicaHello
    """Its identity and its last reported load."""
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica reports and when its stream ends."""
    silent_ms: int = 0
    """Time since its last report, milliseconds."""
    stream: asyncio.Timeout | None = None
    """Ends its stream when it falls silent."""
    placed: int = 0
    """Sessions placed on it, a gateway, since its last report."""
    last_placed: int = 0
    """Sequence number of the last one, so that ties rotate."""

    @property
    def interval_ms(self) -> int:
        """Longest time between two of its reports, as promised, milliseconds."""
        return self.hello.report_interval_ms or _INTERVAL_MS

    @property
    def is_late(self) -> bool:
        """Whether a report of it is missing: its process may stand still, or is only slow."""
        return self.silent_ms >= 2 * self.interval_ms

    @property
    def live_sessions(self) -> int:
        """Number of a gateway's open sessions, with those placed since its last report."""
        return self.hello.load.live_sessions + self.placed

    def as_gateway(self) -> router_pb2.Gateway:
        """Returns a gateway as clients see it."""
        return router_pb2.Gateway(
            gateway_id=self.hello.replica_id,
            address=self.hello.address,
            model=self.hello.model,
            journal_id=self.hello.journal_id,
            live_sessions=self.live_sessions,
            draining=self.hello.load.draining,
            journals=self.hello.load.journals,
        )


def _mode(mode: sampling_pb2.LogprobsMode.ValueType) -> str:
    return name_of(sampling_pb2.LogprobsMode.DESCRIPTOR, mode).lower()


def _key(hello: router_pb2.ReplicaHello) -> tuple[int, str]:
    """Returns the key of a member. Replicas of two kinds may have one id."""
    return hello.kind, hello.replica_id


class Members:
    """The replicas that are registered."""

    def __init__(self, missed_reports: int) -> None:
        self._missed_reports = missed_reports
        self._members: dict[tuple[int, str], Member] = {}
        self._placements = 0
        self._left: dict[str, tuple[int, str, list[tuple[str, int]]]] = {}
        """Gateways that left, by process: when, their model, and the adapters that they named."""
        self._error: RollmeshError | None = None

    def hellos(self) -> list[router_pb2.ReplicaHello]:
        """Returns the identity and load of every member."""
        return [member.hello for member in self._members.values()]

    def models(self) -> set[str]:
        """Returns the models of all engines and gateways."""
        return {member.hello.model for member in self._members.values() if member.hello.model}

    def named_adapters(self, model: str) -> set[tuple[str, int]]:
        """Returns the adapter revisions that open sessions of a model name.

        A gateway that left counts for ten more minutes: another one takes its sessions over.
        """
        now_ms = clock.monotonic_ms()
        while self._left and next(iter(self._left.values()))[0] + _NAMED_MS <= now_ms:
            del self._left[next(iter(self._left))]
        left = (adapters for _, own, adapters in self._left.values() if own == model)
        named = {one for adapters in left for one in adapters}
        for hello in self.hellos():
            if hello.kind == router_pb2.REPLICA_KIND_GATEWAY and hello.model == model:
                named.update((one.name, one.version) for one in hello.load.pinned_adapters)
        return named

    async def join(self, hello: router_pb2.ReplicaHello) -> Member:
        """Makes a replica a member.

        The same process may reconnect at any time. Another process takes over an id only when its
        member has left or was removed.

        Raises:
            ReplicaIdInUseError: Another live process has the id.
            InvalidFieldError: It is a collector, and collectors of another store are members. Or an
                engine, and the log-probabilities of its model's others are of another distribution.
        """
        key = _key(hello)
        while (former := self._members.get(key)) is not None:
            if hello.instance_id and hello.instance_id == former.hello.instance_id:
                break
            former.heard.clear()
            await former.heard.wait()
            if self.has(former):
                raise ReplicaIdInUseError(
                    f"replica_id: {hello.replica_id!r} is registered from "
                    f"{former.hello.address}; give each replica its own id"
                )
        # A session may be served by any: collectors have one store, engines of a model have
        # log-probabilities of one distribution.
        own = hello.numerics.logprobs
        for other in self.hellos():
            if other.kind != hello.kind or other.replica_id == hello.replica_id:
                continue
            if other.store_id != hello.store_id:
                raise InvalidFieldError(
                    "store_id",
                    f"is another one than that of the collector at {other.address}; give all "
                    "collectors of a mesh one store, or this one another router",
                )
            theirs = other.numerics.logprobs
            if other.model == hello.model and own and theirs and own != theirs:
                raise InvalidFieldError(
                    "numerics.logprobs",
                    f"is {_mode(own)}, and {_mode(theirs)} at engine {other.replica_id}; start all "
                    "engines of a model with one setting `logprobs`",
                )
        self._left.pop(hello.instance_id, None)  # it reports itself again
        member = self._members[key] = Member(hello)
        return member

    def has(self, member: Member) -> bool:
        """Returns whether a member still owns its id."""
        return self._members.get(_key(member.hello)) is member

    @asynccontextmanager
    async def reporting(self, member: Member) -> AsyncIterator[None]:
        """Ends the block when a member falls silent.

        Raises:
            DeadlineError: The member missed too many reports.
            RollmeshError: All streams were ended.
        """
        if self._error is not None:
            raise self._error
        member.stream = stream = asyncio.timeout(None)
        try:
            async with stream:
                yield
        except TimeoutError:
            if not stream.expired():
                raise
            if self._error is not None:
                raise self._error from None
            raise DeadlineError(
                f"no report came for {member.silent_ms} ms, and one is due every "
                f"{member.interval_ms} ms; register again"
            ) from None

    def reported(self, member: Member, load: router_pb2.ReplicaLoad) -> None:
        """Records a report.

        Raises:
            ReplicaIdInUseError: Another stream took over the id.
        """
        if not self.has(member):
            raise ReplicaIdInUseError(
                f"replica_id: {member.hello.replica_id!r} was taken over while this replica was "
                "silent; restart it"
            )
        member.hello.load.CopyFrom(load)
        member.silent_ms = member.placed = 0
        member.heard.set()

    def leave(self, member: Member) -> None:
        """Removes a member whose stream ended."""
        hello = member.hello
        if self.has(member):
            del self._members[_key(hello)]
            if hello.load.pinned_adapters:
                adapters = [(one.name, one.version) for one in hello.load.pinned_adapters]
                self._left[hello.instance_id] = clock.monotonic_ms(), hello.model, adapters
                while len(self._left) > _MOST_LEFT:
                    del self._left[next(iter(self._left))]
        member.heard.set()

    def end(self, error: RollmeshError) -> None:
        """Ends the streams of all members with an error."""
        self._error = error
        for member in self._members.values():
            if member.stream is not None and not member.stream.expired():
                member.stream.reschedule(0)

    async def watch(self) -> None:
        """Removes members that fall silent, until it is cancelled.

        Silence is counted in ticks of this process, because a router that was stopped did not read
        the reports that came meanwhile.
        """
        while True:
            await asyncio.sleep(_TICK_MS / 1000)
            for member in self.silent(_TICK_MS):
                if member.stream is not None and member.stream.when() is None:
                    _log.warning(
                        "member fell silent",
                        extra=fields(replica=member.hello.replica_id, silent_ms=member.silent_ms),
                    )
                    member.stream.reschedule(0)

    def silent(self, passed_ms: int) -> list[Member]:
        """Returns the members that have missed too many reports after some more time."""
        members, missed = self._members.values(), self._missed_reports
        for member in members:
            member.silent_ms += passed_ms
        return [one for one in members if one.silent_ms > missed * one.interval_ms]

    def gateways(self) -> list[Member]:
        """Returns the gateways in the order of their ids."""
        kind = router_pb2.REPLICA_KIND_GATEWAY
        found = [one for one in self._members.values() if one.hello.kind == kind]
        return sorted(found, key=lambda one: one.hello.replica_id)

    def place(self, model: str, known: Collection[str] = ()) -> router_pb2.Gateway:
        """Places a new session on the gateway with the fewest sessions. Ties rotate.

        A gateway with a missing report gets one only if reports of all others are missing: its
        process may stand still, and if it is only slow, nothing is lost.

        Args:
            model: Name of the model. Empty means the only one.
            known: Models of the mesh, also those without a gateway now.

        Raises:
            InvalidFieldError: The mesh does not have the model, or has several and none is named.
            NoGatewayError: No gateway of the model takes new sessions.
        """
        gateways = self.gateways()
        models = sorted({one.hello.model for one in gateways})
        is_known = model in models or model in known
        if models and (not is_known if model else len(models) > 1):
            problem = f"{model!r} is not served" if model else "is empty"
            raise InvalidFieldError("model", f"{problem}; give one of {', '.join(models)}")
        of_model = [one for one in gateways if model in {"", one.hello.model}]
        taking = [one for one in of_model if not one.hello.load.draining]
        if not taking:
            named = f" of model {model!r}" if model else ""
            raise NoGatewayError(
                f"none of {len(gateways)} gateways takes new sessions{named}; try again",
                retry_delay_ms=_RETRY_MS,
            )
        gateway = min(taking, key=lambda one: (one.is_late, one.live_sessions, one.last_placed))
        self._placements += 1
        gateway.placed += 1
        gateway.last_placed = self._placements
        return gateway.as_gateway()
