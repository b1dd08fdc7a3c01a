"""The registered replicas: one member per id, for as long as it reports."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    ReplicaIdInUseError,
    RollmeshError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)
_TICK_MS = 250
_INTERVAL_MS = 5_000  # of replicas that promise none
_Key: TypeAlias = tuple[router_pb2.ReplicaKind.ValueType, str]


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

    @property
    def interval_ms(self) -> int:
        """Longest time between two of its reports, as promised, milliseconds."""
        return self.hello.report_interval_ms or _INTERVAL_MS

    @property
    def is_late(self) -> bool:
        """Whether a report of it is missing: its process may stand still, or is only slow."""
        return self.silent_ms >= 2 * self.interval_ms


def _key(hello: router_pb2.ReplicaHello) -> _Key:
    """Returns what a member has to itself: no role takes the id of another."""
    return hello.kind, hello.replica_id


class Members:
    """The replicas that are registered."""

    def __init__(self, missed_reports: int) -> None:
        """Starts without members.

        Args:
            missed_reports: Number of reports that a member may miss before it is removed.
        """
        self._missed_reports = missed_reports
        self._members: dict[_Key, Member] = {}
        self._error: RollmeshError | None = None

    def hellos(self) -> list[router_pb2.ReplicaHello]:
        """Returns the identity and load of every member."""
        return [member.hello for member in self._members.values()]

    def models(self) -> set[str]:
        """Returns the models of all engines and gateways."""
        return {member.hello.model for member in self._members.values() if member.hello.model}

    async def join(self, hello: router_pb2.ReplicaHello) -> Member:
        """Makes a replica a member.

        The same process may reconnect at any time. Another process takes over an id only when its
        member has left or was removed.

        Raises:
            ReplicaIdInUseError: Another live process has the id.
            InvalidFieldError: It is a collector, and collectors of another store are members.
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
        self._check_store(hello)
        member = self._members[key] = Member(hello)
        return member

    def _check_store(self, hello: router_pb2.ReplicaHello) -> None:
        """Checks that a collector has the store of the others; sessions go to any of them."""
        for other in self.hellos():
            if (
                other.kind == hello.kind == router_pb2.REPLICA_KIND_COLLECTOR
                and other.store_id != hello.store_id
                and other.replica_id != hello.replica_id
            ):
                raise InvalidFieldError(
                    "store_id",
                    f"is another one than that of the collector at {other.address}; give all "
                    "collectors of a mesh one store, or this one another router",
                )

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
        member.silent_ms = 0
        member.heard.set()

    def leave(self, member: Member) -> None:
        """Removes a member whose stream ended."""
        if self.has(member):
            del self._members[_key(member.hello)]
        member.heard.set()

    def end(self, error: RollmeshError) -> None:
        """Ends the streams of all members with an error."""
        self._error = error
        for member in self._members.values():
            if member.stream is not None:
                member.stream.reschedule(0)

    async def watch(self) -> None:
        """Removes members that fall silent, until it is cancelled.

        Silence is counted in ticks of this process, because a router that stood still did not read
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
        """Returns the members that have missed too many reports after some more time.

        Args:
            passed_ms: Time since the last call, milliseconds.
        """
        for member in self._members.values():
            member.silent_ms += passed_ms
        return [
            member
            for member in self._members.values()
            if member.silent_ms > self._missed_reports * member.interval_ms
        ]
