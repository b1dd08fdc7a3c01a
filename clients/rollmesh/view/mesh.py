"""A mesh as the viewer reads it: its sessions, alarms and history. It changes nothing."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, TypeAlias

from rollmesh.client import Client, Observer, states_of
from rollmesh.runtime import Alarm, Backoff, Observation, clock, told
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import RollmeshError, SessionUnknownError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2, gateway_pb2, router_pb2, session_pb2
from rollmesh.view.index import Index
from rollmesh.view.sessions import listed

_log = logging.getLogger(__name__)

# How a mesh changed while a viewer looked at it: its load over time, and what happened.

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


# The sessions and alarms of a mesh.

_PAGE = 500
_POLL_S, _LOOK_S = 1.0, 5.0
_AT_ONCE = 50
_REWARDS_MS = 10_000
"""Time between two looks for rewards that came late, so that they cost the collector little."""
_CALL_S = 20.0
_SEARCHED_BYTES = 1 << 20
"""Sessions with more messages are found by their ids and metadata only."""


class Mesh:
    """The collectors, gateways and routers of a mesh. Run `follow` for as long as it is shown."""

    def __init__(self, client: Client, observer: Observer, index: Index) -> None:
        self._client = client
        self._observer = observer
        self._index = index
        self._alarms: list[Alarm] = []
        self._history = History()
        self._after = ""
        self._damaged = 0
        self._rewards_from = 0
        self.error = ""
        """Why its collectors are not read now. Empty while they are."""

    async def follow(self) -> None:
        """Reads closed sessions into the index, and looks for alarms, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._watch())

    async def stored(self, session_id: str) -> collector_pb2.ReadSessionsResponse:
        """Returns a closed session.

        Raises:
            SessionUnknownError: No collector has it.
            RollmeshError: It cannot be read.
            TimeoutError: No collector answers in time.
        """
        async with asyncio.timeout(_CALL_S):
            found = await self._client.stored_sessions(session_id=session_id, arrays=True)
        return found[0]

    async def running(self, session_id: str) -> gateway_pb2.GetSessionResponse:
        """Returns an open session so far. Raises as `stored`."""
        async with asyncio.timeout(_CALL_S):
            found = await self._client.open_sessions()
            if session_id not in {one.session_id for one in found}:
                raise SessionUnknownError(f"session_id: no session has the id {session_id[:100]}")
            return await self._client.open_session_tree(session_id)

    def notes(self) -> list[str]:
        """Returns nothing. Errors are in `error`, and damaged sessions in `mesh`."""
        return []

    async def _follow(self) -> None:
        backoff = Backoff(0.5, 10.0)
        while True:
            try:
                async with asyncio.timeout(_CALL_S * 3):
                    is_last = await self._read()
                self.error = ""
                backoff.reset()
            except (RollmeshError, TimeoutError) as error:
                self.error = getattr(error, "message", "no collector answers in time")
                _log.warning("the collector is not read", extra=fields(error=self.error))
                await asyncio.sleep(backoff.next_s())
                continue
            if is_last:
                await asyncio.sleep(_POLL_S)

    async def _watch(self) -> None:
        while True:
            self._alarms = await self._observer.watch()
            self._history.add(self._observer.history[-1], clock.unix_ms())
            await asyncio.sleep(_LOOK_S)

    async def _read(self) -> bool:
        """Reads a page of sessions. Returns whether it was the last."""
        page = await self._client.stored_sessions(after=self._after, limit=_PAGE)
        for start in range(0, len(page), _AT_ONCE):  # a slow read goes on where it was cut
            part = page[start : start + _AT_ONCE]
            whole = [one.session for one in part if not one.damaged_session_id]
            records = [await self._with_messages(one) for one in whole]
            left_out = await asyncio.to_thread(self._index.add, records)
            self._damaged += len(part) - len(whole) + left_out
            self._after = part[-1].resume_token
        if len(page) == _PAGE:
            return False
        if clock.monotonic_ms() >= self._rewards_from:
            self._rewards_from = clock.monotonic_ms() + _REWARDS_MS
            await self._read_rewards()
        return True

    async def _read_rewards(self) -> None:
        """Reads sessions again that the collector holds back for a reward."""
        records = []
        for session_id in await asyncio.to_thread(self._index.waiting, clock.unix_ms()):
            with suppress(SessionUnknownError):
                found = await self._client.stored_sessions(session_id=session_id)
                records += [one.session for one in found if one.session.HasField("reward")]
        await asyncio.to_thread(self._index.add, records)

    async def _with_messages(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRecord:
        """Reads the messages of a session that recorded some, to be searched."""
        if 0 < sum(one.data_bytes for one in record.messages) <= _SEARCHED_BYTES:
            with suppress(SessionUnknownError):
                return (await self.stored(record.session_id)).session
        return record

    # The values of its pages.

    async def mesh(self) -> dict[str, Any]:
        """Returns members, weights, consumers with their steps, and the state of the reading."""
        async with asyncio.timeout(_CALL_S):
            replicas, stats = await asyncio.gather(self._client.replicas(), self._client.stats())
            steps = {
                one.name: await self._client.steps(one.name, 1000)
                for one in stats.consumers
                if one.HasField("step")
            }
        return {
            "models": {one.model: told(one.target_policy_version) for one in replicas.models},
            "members": [_member(one) for one in replicas.replicas],
            "consumers": [_consumer(one) for one in stats.consumers],
            "steps": {
                name: [
                    {"step": one.step, "unix_ms": one.reported_unix_ms, **one.metrics}
                    for one in found
                ]
                for name, found in steps.items()
            },
            "sessions": stats.sessions,
            "open_groups": stats.open_groups,
            "complete_groups": stats.complete_groups,
            "waiting_for_rewards": stats.waiting_for_rewards,
            "stored_bytes": stats.stored_bytes,
            "damaged": self._damaged,
            "error": self.error,
            "unix_ms": clock.unix_ms(),
        }

    async def alarms(self) -> dict[str, Any]:
        """Returns alarms as they were seen last. So a silent server holds up no page."""
        return {"alarms": [one._asdict() for one in self._alarms]}

    async def history(self) -> dict[str, Any]:
        """Returns the load over time, and what happened."""
        return dict(self._history.shown())

    async def open(self) -> dict[str, Any]:
        """Returns the open sessions."""
        async with asyncio.timeout(_CALL_S):
            found = await self._client.open_sessions()
        return {"rows": [listed(one) for one in found]}


def _member(one: router_pb2.Replica) -> dict[str, Any]:
    hello, load = one.hello, one.hello.load
    return {
        "kind": name_of(router_pb2.ReplicaKind.DESCRIPTOR, hello.kind).lower(),
        "replica_id": hello.replica_id,
        "address": hello.address,
        "model": hello.model,
        "version": told(load.policy_version),
        "leases": one.leases,
        "lease_capacity": hello.lease_capacity,
        "sessions": one.sessions or load.live_sessions,
        "running": load.running,
        "waiting": load.waiting,
        "state": states_of(one),
    }


def _consumer(one: collector_pb2.ConsumerStats) -> dict[str, Any]:
    return {
        "name": one.name,
        "ready": one.ready,
        "leased": one.leased,
        "acknowledged": one.acknowledged,
        "filtered": {
            name_of(collector_pb2.FilterReason.DESCRIPTOR, part.reason): part.units
            for part in one.filtered
        },
    }
