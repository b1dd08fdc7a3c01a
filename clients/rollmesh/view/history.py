"""How a mesh changed while a viewer looked at it: its load over time, and what happened."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeAlias

from rollmesh.runtime import Observation, told
from rollmesh.runtime.codec import name_of
from rollmesh.v1 import router_pb2

_POINTS, _EVENTS = 1440, 500
_TAKEOVERS = "rollmesh_gateway_journal_takeovers_total"
_START, _SAME_S = "process_start_time_seconds", 0.5
_QUEUE = "rollmesh_router_queue_length"
_Member: TypeAlias = tuple[str, str]
"""Kind and id."""


class History:
    """The last points and events. Both are bounded."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._members: set[_Member] | None = None
        self._versions: dict[str, int] | None = None
        self._starts: dict[_Member, float] = {}
        self._takeovers: dict[_Member, float] = {}

    def shown(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the points and events, oldest first. `at` is Unix time, milliseconds."""
        return {"points": list(self._points), "events": list(self._events)}

    def add(self, seen: Observation, unix_ms: int) -> None:
        """Adds an observation. Without members it is a gap: nobody is known to have left."""
        if seen.members is None:
            return
        self._points.append({"at": unix_ms, **_load(seen)})
        first = self._members is None
        events = self._moves(seen.members), self._pushes(seen.members), self._processes(seen, first)
        for text in chain(*events):
            self._events.append({"at": unix_ms, "name": text})

    def _moves(self, members: router_pb2.ListReplicasResponse) -> Iterator[str]:
        kinds = router_pb2.ReplicaKind.DESCRIPTOR
        hellos = [one.hello for one in members.replicas]
        before = self._members
        now = {(name_of(kinds, one.kind).lower(), one.replica_id) for one in hellos}
        self._members = now
        if before is not None:
            yield from (f"{kind} {name} left" for kind, name in sorted(before - now))
            yield from (f"{kind} {name} joined" for kind, name in sorted(now - before))

    def _processes(self, seen: Observation, first: bool) -> Iterator[str]:
        """Yields processes that began anew, and takeovers since the first look.

        A gateway that is new to a mesh that was looked at, or began anew, has counted from 0.
        """
        for server in seen.servers:
            start, count = server.total(_START), server.total(_TAKEOVERS)
            place = server.kind, server.name
            known = self._starts.get(place)
            if start is not None:
                if known is not None and start > known + _SAME_S:
                    yield f"{server.kind} {server.name} restarted"
                    self._takeovers[place] = 0.0
                self._starts[place] = start
            if count is not None:
                new = known is None and not first
                more = count - self._takeovers.get(place, 0.0 if new else count)
                self._takeovers[place] = count
                if more > 0:
                    yield f"gateway {server.name} took {more:.0f} journals over"

    def _pushes(self, members: router_pb2.ListReplicasResponse) -> Iterator[str]:
        before, now = (
            self._versions,
            {one.model: one.target_policy_version for one in members.models},
        )
        self._versions = now
        if before is not None:
            for model, version in now.items():
                if before.get(model, 0) != version:
                    yield f"{told(version)} of {model} pushed"


def _load(seen: Observation) -> dict[str, float | None]:
    engines = seen.engines()
    queues = [one.total(_QUEUE) for one in seen.of("router")]
    known = [one for one in queues if one is not None]
    return {
        "engines": len(engines),
        "leases": sum(one.leases for one in engines),
        "capacity": sum(one.hello.lease_capacity for one in engines),
        "running": sum(one.hello.load.running for one in engines),
        "waiting": sum(one.hello.load.waiting for one in engines),
        "queue": sum(known) if known else None,
        "sessions": None if seen.sessions is None else len(seen.sessions),
    }
