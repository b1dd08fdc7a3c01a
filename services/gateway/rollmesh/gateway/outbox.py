"""Hands closed sessions to the collector until it has them: at least once, oldest first."""

import asyncio
import logging
import sqlite3
from functools import partial

import grpc

from rollmesh.gateway import journal
from rollmesh.runtime import faults
from rollmesh.runtime.channels import open_channel, typed_errors
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.logs import fields
from rollmesh.runtime.wire import nested
from rollmesh.v1 import collector_pb2

_log = logging.getLogger(__name__)
_BATCH = 32
_INGEST_TIMEOUT_S = 30.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0


def _request(record: bytes) -> bytes:
    """Returns an `IngestRequest` of a session as the journal has it: megabytes need no parser."""
    return b"".join(nested(collector_pb2.IngestRequest.SESSION_FIELD_NUMBER, [record]))


def _next_batch(db: sqlite3.Connection, delivered: list[str]) -> list[tuple[str, bytes]]:
    """Forgets what the collector has taken, and returns what comes next: one wait for the disk."""
    if delivered:
        journal.delete_delivered(db, session_ids=delivered)
    return journal.next_undelivered(db, _BATCH)


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
        self._filled = asyncio.Event()
        self.undelivered = 0
        """Number of sessions that wait."""

    @property
    def full(self) -> bool:
        """Whether no more sessions should be opened until the collector catches up."""
        return self.undelivered >= self._max_undelivered

    def added(self) -> None:
        """Says that a session was closed and journalled."""
        self.undelivered += 1
        self._filled.set()

    async def run(self) -> None:
        """Delivers for ever; cancelled when the gateway stops."""
        self.undelivered = await self._database.run(journal.count_undelivered)
        delivered: list[str] = []
        while True:
            self._filled.clear()
            batch = await self._database.run(partial(_next_batch, delivered=delivered))
            self.undelivered -= len(delivered)
            delivered = []
            if not batch:
                await self._filled.wait()
                continue
            async with asyncio.TaskGroup() as group:
                for _, record in batch:
                    group.create_task(self._deliver(record))
            await faults.reach("gateway-after-handover")
            delivered = [session_id for session_id, _ in batch]

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def _deliver(self, record: bytes) -> None:
        """Delivers one session, trying until the collector has it."""
        delay = _FIRST_RETRY_S
        while True:
            try:
                with typed_errors():
                    await self._ingest(record, timeout=_INGEST_TIMEOUT_S, wait_for_ready=True)
            except RollmeshError as error:
                _log.warning(
                    "not delivered yet", extra=fields(reason=error.reason, error=str(error))
                )
            else:
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, _LAST_RETRY_S)
