"""Hands closed sessions to the collector until it has them: at least once, oldest first."""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from rollmesh.gateway import journal
from rollmesh.runtime import faults
from rollmesh.runtime.channels import open_channel, typed_errors
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.logs import fields
from rollmesh.runtime.wire import nested
from rollmesh.v1 import collector_pb2

_log = logging.getLogger(__name__)
_CALLS = 2
"""At a time: the next is read and sent while the collector writes the one before."""
_CALL_SESSIONS, _CALL_BYTES = 64, 4 * 1024 * 1024
_INGEST_TIMEOUT_S = 30.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0
_DOUBLINGS = 6
_JOURNAL_RETRY_S = 0.5


class _Parcel(NamedTuple):
    """The sessions of one call."""

    session_ids: list[str]
    records: list[bytes]


def _request(records: Sequence[bytes]) -> bytes:
    """Returns an `IngestRequest` of sessions as the journal has them: megabytes need no parser."""
    number = collector_pb2.IngestRequest.SESSIONS_FIELD_NUMBER
    return b"".join(piece for record in records for piece in nested(number, [record]))


class Outbox:
    """The closed sessions that the collector has not taken; they are in the journal."""

    def __init__(self, database: Database, collector: str, max_undelivered: int) -> None:
        """Names the collector's `host:port`."""
        self._database = database
        self._channel: grpc.aio.Channel = open_channel(collector)
        self._ingest = self._channel.unary_unary(
            "/rollmesh.v1.CollectorService/Ingest",
            request_serializer=_request,
            response_deserializer=collector_pb2.IngestResponse.FromString,
        )
        self._max_undelivered = max_undelivered
        self._changed = asyncio.Event()
        self._calls = asyncio.Semaphore(_CALLS)
        self._busy: set[str] = set()
        """Sessions that are with the collector, or wait to be sent again."""
        self._delivered: list[str] = []
        """What the collector has, and the journal too."""
        self._tries: dict[str, int] = {}
        """How often a session was sent in vain; such a one goes alone."""
        self.undelivered = 0
        """Number of sessions that wait."""

    @property
    def full(self) -> bool:
        """Whether no more sessions should be opened until the collector catches up."""
        return self.undelivered >= self._max_undelivered

    def added(self) -> None:
        """Says that a session was closed and journalled."""
        self.undelivered += 1
        self._changed.set()

    async def run(self) -> None:
        """Delivers for ever; cancelled when the gateway stops."""
        self.undelivered = await self._database.run(journal.count_undelivered)
        async with asyncio.TaskGroup() as group:
            while True:
                await self._calls.acquire()
                parcel = await self._next()
                group.create_task(self._hand_over(parcel))

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def _next(self) -> _Parcel:
        """Waits for sessions to send; forgets what the collector has on the way."""
        while True:
            self._changed.clear()
            delivered, self._delivered = self._delivered, []
            try:
                parcel = await self._database.run(lambda db: self._turn(db, delivered))  # noqa: B023
            except RollmeshError as error:  # a full disk, or too much to write: it passes
                _log.warning("no hand-over", extra=fields(reason=error.reason, error=str(error)))
                self._delivered += delivered
                await asyncio.sleep(_JOURNAL_RETRY_S)
                continue
            self.undelivered -= len(delivered)
            self._busy.difference_update(delivered)
            if parcel.session_ids:
                self._busy.update(parcel.session_ids)
                return parcel
            await self._changed.wait()

    def _turn(self, db: sqlite3.Connection, delivered: list[str]) -> _Parcel:
        """Deletes what was delivered and reads what comes next: one wait for the disk."""
        if delivered:
            journal.delete_delivered(db, session_ids=delivered)
        parcel, size = _Parcel([], []), 0
        for session_id, length in journal.undelivered(db, len(self._busy) + _CALL_SESSIONS):
            if session_id in self._busy:
                continue
            size += length
            alone = session_id in self._tries
            if parcel.session_ids and (alone or size > _CALL_BYTES):
                break
            parcel.session_ids.append(session_id)
            parcel.records.append(journal.read_record(db, session_id))
            if alone or len(parcel.records) == _CALL_SESSIONS:
                break
        return parcel

    async def _hand_over(self, parcel: _Parcel) -> None:
        """Sends sessions once; those that the collector does not take are sent again later, alone.

        A session that is wrong itself holds up no other; what else fails would fail for the others.
        """
        ids = parcel.session_ids
        try:
            with typed_errors():
                await self._ingest(parcel.records, timeout=_INGEST_TIMEOUT_S, wait_for_ready=True)
        except RollmeshError as error:
            _log.warning("not delivered yet", extra=fields(reason=error.reason, error=str(error)))
            tries = max(self._tries.get(session_id, 0) for session_id in ids)
            self._tries |= dict.fromkeys(ids, tries + 1)
            own = isinstance(error, InvalidFieldError)
            if own:
                self._calls.release()
            await asyncio.sleep(min(_FIRST_RETRY_S * 2 ** min(tries, _DOUBLINGS), _LAST_RETRY_S))
            self._busy.difference_update(ids)
            if not own:
                self._calls.release()
        else:
            await faults.reach("gateway-after-handover")
            for session_id in ids:
                self._tries.pop(session_id, None)
            self._delivered += ids
            self._calls.release()
        self._changed.set()
