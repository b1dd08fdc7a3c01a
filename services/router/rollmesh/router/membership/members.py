"""The registered replicas: one member per id."""

import asyncio
import logging
from dataclasses import dataclass, field

from rollmesh.runtime.errors import ReplicaIdInUseError
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One replica and its `Register` stream."""

    hello: router_pb2.ReplicaHello
    """Its identity and its last reported load."""
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica reports and when its stream ends."""


class Members:
    """The replicas that are registered."""

    def __init__(self, silence_ms: int) -> None:
        """Starts without members.

        Args:
            silence_ms: Time without a report after which an id may be taken over, milliseconds.
        """
        self._silence_ms = silence_ms
        self._members: dict[str, Member] = {}

    def hellos(self) -> list[router_pb2.ReplicaHello]:
        """Returns the identity and load of every member."""
        return [member.hello for member in self._members.values()]

    def models(self) -> set[str]:
        """Returns the models of all engines and gateways."""
        return {member.hello.model for member in self._members.values()}

    async def join(self, hello: router_pb2.ReplicaHello) -> Member:
        """Makes a replica a member.

        The same process may reconnect at any time. Another process takes over an id only from a
        silent member, whose host is gone though its stream has not ended yet.

        Raises:
            ReplicaIdInUseError: Another live process has the id.
        """
        while (former := self._members.get(hello.replica_id)) is not None:
            if hello.instance_id and hello.instance_id == former.hello.instance_id:
                break
            former.heard.clear()
            try:
                async with asyncio.timeout(self._silence_ms / 1000):
                    await former.heard.wait()
            except TimeoutError:
                if self.has(former):
                    _log.warning(
                        "took over the id of a silent member",
                        extra=fields(replica=hello.replica_id, former=former.hello.address),
                    )
                    break
            if self.has(former):
                raise ReplicaIdInUseError(
                    f"replica_id: {hello.replica_id!r} is registered from "
                    f"{former.hello.address}; give each replica its own id"
                )
        member = self._members[hello.replica_id] = Member(hello)
        return member

    def has(self, member: Member) -> bool:
        """Returns whether a member still owns its id."""
        return self._members.get(member.hello.replica_id) is member

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
        member.heard.set()

    def leave(self, member: Member) -> None:
        """Removes a member whose stream ended."""
        if self.has(member):
            del self._members[member.hello.replica_id]
        member.heard.set()
