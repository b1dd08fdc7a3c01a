"""A mesh as the viewer reads it: its sessions, alarms and history. It changes nothing."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from rollmesh.client import Client, Observer, states_of
from rollmesh.runtime import Alarm, Backoff, clock, told
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import RollmeshError, SessionUnknownError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2, gateway_pb2, router_pb2, session_pb2
from rollmesh.view.history import History
from rollmesh.view.index import Index
from rollmesh.view.sessions import listed

_log = logging.getLogger(__name__)
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
                    {"step": one.step, "unix_ms": one.reported_unix_ms, **_finite(one.metrics)}
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


def _finite(metrics: Any) -> dict[str, float | None]:
    """Returns numbers that JSON has. None stands for the others."""
    return {name: one if abs(one) < float("inf") else None for name, one in metrics.items()}
