"""Delivers closed sessions to a collector, at least once and oldest first.

A session becomes a dead letter if the collector refuses it permanently or if no record can be
written from it. It then stays in the journal for an operator and delays no other session. A
transient error never makes a session a dead letter.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc

from rollmesh.gateway import metrics
from rollmesh.gateway.export.record import exported_lineages, write_record
from rollmesh.gateway.storage import closed
from rollmesh.gateway.storage.closed import PIECE_NODES, Letter
from rollmesh.gateway.storage.images import read_next_image
from rollmesh.gateway.storage.journal import DamagedSessionError, has_images, read_nodes
from rollmesh.gateway.storage.transaction import Journal, Transaction
from rollmesh.mesh.directories.members import CollectorDirectory
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.codec.session_records import check_session
from rollmesh.runtime.errors import InvalidFieldError, RemoteError, RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2, gateway_pb2

_log = logging.getLogger(__name__)
_CALLS = 2
"""Concurrent calls: the next one is read and sent while the collector writes the previous one."""
_CALL_SESSIONS, _CALL_BYTES = 64, 4 * 1024 * 1024
_INGEST = "/rollmesh.v1.CollectorService/Ingest"
_INGEST_TIMEOUT_S = 30.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_JOURNAL_RETRY_S = 0.5


class _Parcel(NamedTuple):
    """The sessions of one call."""

    letters: list[Letter]

    @property
    def session_ids(self) -> list[str]:
        return [letter.session_id for letter in self.letters]


class _Turn(NamedTuple):
    """The result of one journal transaction."""

    letters: list[Letter]
    damaged: list[gateway_pb2.DeadLetter]
    forgotten: list[str]
    """Session ids of closes that are no longer remembered."""
    more: bool
    """Whether there may be more to remove."""


class _Record(NamedTuple):
    """A session in the form in which it is sent."""

    session_id: str
    request: bytes
    """A serialised `IngestRequest` with this session only. Concatenating those of several sessions
    gives one request with all of them."""
    lineages: list[str]


def write_letters(
    letters: Sequence[Letter],
) -> tuple[list[_Record], list[gateway_pb2.DeadLetter]]:
    """Returns the records of closed sessions, and dead letters for those that cannot be written.

    Runs in a worker thread.
    """
    records: list[_Record] = []
    broken: list[gateway_pb2.DeadLetter] = []
    for letter in letters:
        try:
            spec, branches = closed.rebuilt(letter)
            request = gateway_pb2.CloseSessionRequest.FromString(letter.request)
            ingest = collector_pb2.IngestRequest()
            record = write_record(
                spec,
                branches,
                request,
                letter.closed_unix_ms,
                ingest.sessions.add(),
                letter.images,
            )
            check_session(record, "session")
        except Exception as error:  # noqa: BLE001 - any error affects only this session
            reason = gateway_pb2.DEAD_LETTER_REASON_UNEXPORTABLE
            broken.append(dead_letter(letter.session_id, reason, error))
        else:
            data, lineages = ingest.SerializeToString(), exported_lineages(record)
            records.append(_Record(letter.session_id, data, lineages))
    return records, broken


def dead_letter(
    session_id: str, reason: gateway_pb2.DeadLetterReason.ValueType, error: Exception
) -> gateway_pb2.DeadLetter:
    """Returns the dead letter of a session that is set aside, and logs its error."""
    message = str(error) if isinstance(error, (RollmeshError, DamagedSessionError)) else repr(error)
    name = name_of(gateway_pb2.DeadLetterReason.DESCRIPTOR, reason)
    _log.error(
        "session set aside",
        extra=fields(session_id=session_id, reason=name, error=message),
        exc_info=error,
    )
    return gateway_pb2.DeadLetter(
        session_id=session_id, reason=reason, message=message, unix_ms=clock.unix_ms()
    )


def _is_final(error: Exception) -> bool:
    """Returns whether a session sent alone would be refused on every retry."""
    too_large = isinstance(error, RemoteError) and "larger than max" in error.message
    return too_large or isinstance(error, InvalidFieldError)


class Outbox:
    """The closed sessions that the collector has not taken; the journal stores them."""

    def __init__(
        self,
        journal: Journal,
        collectors: CollectorDirectory,
        *,
        remembered: int,
    ) -> None:
        """Starts empty.

        Args:
            journal: The journal.
            collectors: Of the mesh; the caller closes it.
            remembered: Number of closes that are remembered after delivery.
        """
        self._journal = journal
        self._collectors = collectors
        self._remembered = remembered
        self._changed = asyncio.Event()
        self._calls = asyncio.Semaphore(_CALLS)
        self._busy: set[str] = set()
        """Sessions that are being sent or are waiting for a retry."""
        self._delivered: list[str] = []
        """Sessions that the collector has but that the journal does not mark as delivered yet."""
        self._retries: dict[str, Backoff] = {}
        """Sessions that the collector did not take; each is retried alone."""
        self.undelivered = 0
        """Number of waiting sessions."""
        self.dead: set[str] = set()
        """Sessions that were set aside, including open ones that cannot be read."""
        self.forgotten: Callable[[list[str]], None] = lambda _: None
        """Called with the session ids of closes that are no longer remembered."""

    def added(self, count: int = 1) -> None:
        """Notifies the outbox of closed sessions in the journal."""
        self.undelivered += count
        self._changed.set()

    def wake(self) -> None:
        """Notifies the outbox of data to remove."""
        self._changed.set()

    async def restore(self) -> None:
        """Reads from the journal what waits and what was set aside, before `run`.

        Raises:
            RollmeshError: The journal cannot be read.
        """
        self.undelivered = await self._journal.read(closed.count_undelivered)
        self.dead = await self._journal.read(closed.dead_ids)

    async def run(self) -> None:
        """Delivers sessions until it is cancelled when the gateway stops.

        A journal that cannot be read or written for a while delays it.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                await self._calls.acquire()
                parcel = await self._next()
                group.create_task(self._hand_over(parcel))

    @property
    def retried(self) -> int:
        """Number of sessions that the collector did not take and that are sent again, alone."""
        return len(self._retries)

    async def set_aside(self, letters: list[gateway_pb2.DeadLetter]) -> None:
        """Makes sessions dead letters.

        Raises:
            RollmeshError: The journal cannot be written; the sessions are unchanged.
        """
        await self._journal.run(lambda tx: closed.set_aside(tx, letters))
        self._died(letters)

    def _died(self, letters: Sequence[gateway_pb2.DeadLetter]) -> None:
        """Notes that sessions were set aside; they are not sent again by themselves."""
        for letter in letters:
            self.dead.add(letter.session_id)
            self._retries.pop(letter.session_id, None)

    async def _next(self) -> _Parcel:
        """Waits for sessions to send; also removes delivered sessions from the journal."""
        while True:
            self._changed.clear()
            delivered, self._delivered = self._delivered, []
            try:
                turn = await self._journal.run(lambda tx: self._turn(tx, delivered))  # noqa: B023
            except RollmeshError as error:  # transient: a full disk or write backlog
                _log.warning(
                    "deliveries not recorded", extra=fields(reason=error.reason, error=str(error))
                )
                self._delivered += delivered
                await asyncio.sleep(_JOURNAL_RETRY_S)
                continue
            self.undelivered -= len(delivered) + len(turn.damaged)
            self._died(turn.damaged)
            self._busy.difference_update(delivered)
            self.forgotten(turn.forgotten)
            if turn.letters:
                parcel = _Parcel(turn.letters)
                self._busy.update(parcel.session_ids)
                if turn.more:
                    self._changed.set()
                return parcel
            if not (turn.more or turn.damaged):
                await self._changed.wait()

    def _turn(self, tx: Transaction, delivered: list[str]) -> _Turn:
        """Removes delivered data and reads the next sessions in a single transaction."""
        closed.mark_delivered(tx, delivered)
        more = closed.sweep(tx)
        forgotten = closed.forget_closes(tx, self._remembered)
        letters: list[Letter] = []
        damaged: list[gateway_pb2.DeadLetter] = []
        size = 0
        for session_id, length in closed.undelivered(tx, len(self._busy) + _CALL_SESSIONS):
            if session_id in self._busy:
                continue
            size += length
            alone = session_id in self._retries
            if letters and (alone or size > _CALL_BYTES):
                break
            try:
                letters.append(closed.read_letter(tx, session_id))
            except DamagedSessionError as error:
                reason = gateway_pb2.DEAD_LETTER_REASON_DAMAGED
                damaged.append(dead_letter(session_id, reason, error))
                continue
            if alone or len(letters) == _CALL_SESSIONS:
                break
        closed.set_aside(tx, damaged)
        return _Turn(letters, damaged, forgotten, more)

    async def _hand_over(self, parcel: _Parcel) -> None:
        """Sends sessions once; those that the collector does not take are later retried alone.

        An invalid session delays no other session. Any other failure would affect the others too,
        so the call slot stays occupied during the backoff.
        """
        ids = parcel.session_ids
        try:
            await self._send(parcel)
        except Exception as error:  # noqa: BLE001 - one parcel must not end the others
            known = isinstance(error, RollmeshError)
            reason = error.reason if isinstance(error, RollmeshError) else type(error).__name__
            _log.warning(
                "sessions not delivered yet",
                extra=fields(reason=reason, error=str(error)),
                exc_info=None if known else error,
            )
            own = _is_final(error)
            if own:
                self._calls.release()
            left = [one for one in ids if one not in self.dead]
            await asyncio.sleep(max(map(self._retry_delay_s, left), default=0.0))
            self._busy.difference_update(ids)
            if not own:
                self._calls.release()
        else:
            for session_id in ids:
                self._retries.pop(session_id, None)
            self._calls.release()
        self._changed.set()

    def _retry_delay_s(self, session_id: str) -> float:
        backoff = self._retries.setdefault(session_id, Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S))
        return backoff.next_s()

    async def _send(self, parcel: _Parcel) -> None:
        """Sends sessions; one that can never be sent becomes a dead letter.

        Raises:
            RollmeshError: No session was taken: the error is transient, or one of several sessions
                caused it.
        """
        for letter in parcel.letters:
            await self._read_rest(letter)
        records, broken = await asyncio.to_thread(write_letters, parcel.letters)
        await self._bury(broken)
        if not records:
            return
        try:
            await self._ingest(b"".join(record.request for record in records))
        except RollmeshError as error:
            if len(records) > 1 or not _is_final(error):
                raise
            refused = gateway_pb2.DEAD_LETTER_REASON_REFUSED
            await self._bury([dead_letter(records[0].session_id, refused, error)])
            return
        await faults.reach("gateway-after-handover")
        self._delivered += [record.session_id for record in records]
        for record in records:
            for lineage in record.lineages:
                metrics.TRAJECTORIES.labels(lineage).inc()

    async def _ingest(self, request: bytes) -> None:
        """Hands sessions to a collector, or to another one if it is away; a repeat is harmless."""

        async def ingest(channel: grpc.aio.Channel) -> None:
            method = channel.unary_unary(
                _INGEST,
                request_serializer=bytes,
                response_deserializer=collector_pb2.IngestResponse.FromString,
            )
            with typed_errors():
                await method(
                    request,
                    timeout=_INGEST_TIMEOUT_S,
                    wait_for_ready=self._collectors.is_fixed,
                )

        await self._collectors.call(ingest)

    async def _read_rest(self, letter: Letter) -> None:
        """Reads the remaining nodes of a large session in batches, and its images one by one.

        Other commits run in between.
        """
        count = len(letter.rows)
        while count == PIECE_NODES:
            last = letter.rows[-1][0]
            rows = await self._journal.run(
                lambda tx: read_nodes(tx, letter.session_id, last, PIECE_NODES)  # noqa: B023
            )
            letter.rows.extend(rows)
            count = len(rows)
        if not any(has_images(row) for row in letter.rows):
            return
        at = 0
        while (
            found := await self._journal.run(
                lambda tx: read_next_image(tx, letter.session_id, at)  # noqa: B023
            )
        ) is not None:
            at, image = found
            letter.images.append(image)

    async def _bury(self, letters: list[gateway_pb2.DeadLetter]) -> None:
        if letters:
            await self.set_aside(letters)
            self.undelivered -= len(letters)
            self._busy.difference_update(letter.session_id for letter in letters)
