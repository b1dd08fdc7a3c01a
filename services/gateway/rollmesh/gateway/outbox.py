"""Delivers closed sessions to a collector, at least once and oldest first.

A session that the collector did not take is sent again alone, after a wait in which others pass it.
Such tries share one of the call slots, so the sessions that have not failed always have another.

A session becomes a dead letter if the collector refuses it permanently, if the collector answers
with an error as often as `MOST_FAILURES` says, or if no record can be written from it, or not in
time. It then stays in the journal for an operator. A collector that is away, full or about to stop
makes no session a dead letter.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np

from rollmesh.chat import RenderContext
from rollmesh.gateway import journal, metrics
from rollmesh.gateway.export import (
    Blobs,
    SlowRecordError,
    TimeLimit,
    blobs_of,
    exported_lineages,
    serialize,
    write_head,
)
from rollmesh.gateway.journal import (
    DamagedSessionError,
    Journal,
    Transaction,
    delete_revisions,
    read_next_image,
    read_nodes,
    remove_images,
)
from rollmesh.gateway.session import Session, SessionSpec
from rollmesh.gateway.tree import Node, Tree
from rollmesh.mesh import CollectorDirectory
from rollmesh.runtime import Backoff, Row, clock
from rollmesh.runtime.codec import name_of, pack_ids, unpack_ids
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RemoteError,
    RollmeshError,
    SessionDamagedError,
    SessionUnknownError,
    StoreError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc import typed_errors
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2, gateway_admin_pb2, gateway_pb2, session_pb2

# Closed sessions in the journal: waiting for the collector, set aside, and remembered.
#
# A close moves no tokens. The head of the record is stored next to the session's turns, each token
# once, and the arrays are joined when it is sent. Once the collector has the session, its turns are
# deleted in batches, so that other commits can run in between.

PIECE_NODES = 512
"""Number of nodes that one commit reads from a session. A commit deletes up to twice as many."""
PIECE_IMAGE_BYTES = 4 * 1024 * 1024
"""Size of the images that one commit deletes, bytes. The last of them may exceed it."""
_NEXT = "(SELECT coalesce(max(n), 0) + 1 FROM {0} WHERE journal = ?1)"
"""The next position of a journal in a table. Only its gateway adds to it."""
_ADD_TO_OUTBOX = (
    "INSERT INTO outbox (journal, n, session_id, request, closed_unix_ms, bytes, state)"
    f" VALUES (?1, {_NEXT.format('outbox')}, ?2, ?3, ?4, ?5, ?6)"
)
_ADD_CLOSE = (
    "INSERT INTO closes (journal, n, session_id, request_id, leaves, digest)"
    f" SELECT journal, {_NEXT.format('closes')}, session_id, request_id, ?3, ?4"
    " FROM sessions WHERE journal = ?1 AND session_id = ?2"
)


class State(IntEnum):
    """The state of a closed session. The journal stores the numbers."""

    WAITING = 0
    DELIVERED = 1
    """The collector has it, or an operator dropped it: its turns are deleted."""
    DEAD = 2


class Letter(NamedTuple):
    """A closed session as read from the journal."""

    session_id: str
    spec: str
    head: bytes
    """The head of its record, or empty if it was not written at the close."""
    request: bytes
    """The request of its close, or empty if there is a head."""
    closed_unix_ms: int
    contexts: dict[bytes, RenderContext]
    """Its render contexts. None if there is a head."""
    rows: list[Any]
    """Rows of its nodes, initially the first `PIECE_NODES`."""
    images: list[session_pb2.SessionImage]
    """Its images, initially none."""
    facts: list[str]
    """Its facts. None if there is a head."""


MOST_AT_CLOSE = 32 * 1024 * 1024
"""Size of a record, bytes, above which its head is written only when it is sent: paths that share
their beginning repeat its segments."""
_HEAD = b"\0"
"""First byte of a stored close with a head. No serialised message begins with it."""


def stored_close(
    session: Session, request: gateway_pb2.CloseSessionRequest, closed_ms: int
) -> bytes:
    """Returns a close as the journal stores it: with the record's head, or else the request.

    If writing the head fails or takes too long, the outbox tries again and makes a dead letter.
    Runs in a worker thread.
    """
    if session.record_bytes > MOST_AT_CLOSE:
        return request.SerializeToString()
    try:
        head = write_head(session.spec, session.tree, request, closed_ms, TimeLimit(_WRITE_S))
    except Exception as error:  # any error affects only this session
        told = fields(session_id=session.spec.session_id, error=repr(error))
        _log.warning("record not written at the close, will retry", extra=told)
        return request.SerializeToString()
    return _HEAD + head.SerializeToString()


def close_session(
    tx: Transaction,
    session: Session,
    stored: bytes,
    digest: bytes,
    closed_unix_ms: int,
    leaves: Sequence[int],
    orphans: Iterable[Node],
) -> None:
    """Adds a session to the outbox, and remembers the response to the close.

    Args:
        tx: The transaction.
        session: The session.
        stored: The close: see `stored_close`.
        digest: Digest that tells a repeated request from a different one.
        closed_unix_ms: When it was closed.
        leaves: Last node of each of the session's trajectories.
        orphans: Nodes whose answers did not reach the agent. Their reasons are stored again.
    """
    session_id = session.spec.session_id
    for node in orphans:
        journal.update_reasons(tx, session_id, node)
    tx.db.run(
        _ADD_TO_OUTBOX,
        tx.journal_id,
        session_id,
        stored,
        closed_unix_ms,
        session.record_bytes + len(stored),
        State.WAITING,
    )
    tx.db.run(_ADD_CLOSE, tx.journal_id, session_id, pack_ids(np.array(leaves, np.uint32)), digest)


def read_closes(tx: Transaction) -> set[str]:
    """Returns the ids of the sessions whose close is remembered."""
    rows = tx.db.rows("SELECT session_id FROM closes WHERE journal = ?1", tx.journal_id)
    return {session_id for (session_id,) in rows}


def read_close(tx: Transaction, session_id: str) -> tuple[bytes, list[int]]:
    """Returns the digest of a close, and the last node of each of the session's trajectories.

    Raises:
        SessionUnknownError: The close was forgotten.
    """
    row = tx.db.row("SELECT digest, leaves FROM closes WHERE session_id = ?1", session_id)
    if row is None:
        raise SessionUnknownError(
            f"session_id: the close of {session_id!r} is not remembered any more",
            session_id=session_id,
        )
    digest, leaves = row
    return digest, [int(id_) for id_ in unpack_ids(leaves, "leaves")]


def forget_closes(tx: Transaction, remembered: int) -> list[str]:
    """Forgets the oldest delivered closes and returns their session ids."""
    rows = tx.db.rows(
        "DELETE FROM closes WHERE journal = ?1"
        " AND n <= (SELECT max(n) FROM closes WHERE journal = ?1) - ?2"
        " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.session_id = closes.session_id)"
        " RETURNING session_id",
        tx.journal_id,
        remembered,
    )
    if not rows:
        return []
    delete_revisions(tx, rows)
    return [session_id for (session_id,) in rows]


def undelivered(tx: Transaction, count: int) -> list[Row]:
    """Returns the oldest sessions that wait for the collector, with their approximate sizes."""
    return tx.db.rows(
        "SELECT session_id, bytes FROM outbox WHERE journal = ?1 AND state = ?2"
        " ORDER BY n LIMIT ?3",
        tx.journal_id,
        State.WAITING,
        count,
    )


def count_undelivered(tx: Transaction) -> int:
    """Returns how many closed sessions wait for the collector."""
    return int(
        tx.db.value(
            "SELECT count(*) FROM outbox WHERE journal = ?1 AND state = ?2",
            tx.journal_id,
            State.WAITING,
        )
    )


def is_undelivered(tx: Transaction, session_id: str) -> bool:
    """Returns whether a closed session waits for the collector."""
    of_session = "SELECT count(*) FROM outbox WHERE session_id = ?1 AND state = ?2"
    return bool(tx.db.value(of_session, session_id, State.WAITING))


def read_letter(tx: Transaction, session_id: str) -> Letter:
    """Returns a closed session with its first nodes.

    Raises:
        DamagedSessionError: The session's data in the journal cannot be read.
        RollmeshError: The journal cannot be read now.
    """
    with journal.damage(tx):
        spec = journal.spec_row(tx, session_id)
        ((stored, closed_ms),) = tx.db.rows(
            "SELECT request, closed_unix_ms FROM outbox WHERE session_id = ?1", session_id
        )
        head, request = (stored[1:], b"") if stored[:1] == _HEAD else (b"", stored)
        contexts = {} if head else journal.read_contexts(tx, session_id)
        facts = [] if head else journal.read_facts(tx, session_id)
        letter = Letter(session_id, spec, head, request, closed_ms, contexts, [], [], facts)
        columns = journal.BLOB_COLUMNS if head else journal.NODE_COLUMNS
        letter.rows.extend(read_nodes(tx, session_id, 0, PIECE_NODES, columns))
    return letter


def sweep(tx: Transaction) -> bool:
    """Removes one batch of delivered data and returns whether more may be left."""
    left, left_bytes = 2 * PIECE_NODES, PIECE_IMAGE_BYTES
    while left > 0:
        row = tx.db.row(
            "SELECT session_id, EXISTS (SELECT 1 FROM images WHERE session_id = outbox.session_id)"
            " FROM outbox WHERE journal = ?1 AND state = ?2 ORDER BY n LIMIT 1",
            tx.journal_id,
            State.DELIVERED,
        )
        if row is None:
            return False
        session_id, has_images = row
        gone = tx.db.changed(
            "DELETE FROM nodes WHERE n IN"
            " (SELECT n FROM nodes WHERE session_id = ?1 ORDER BY n LIMIT ?2)",
            session_id,
            left,
        )
        if gone == left:
            return True
        if has_images:
            left_bytes -= remove_images(tx, session_id, left_bytes)
        if left_bytes <= 0:
            return True
        keys = tx.db.rows(
            "DELETE FROM session_contexts WHERE session_id = ?1 RETURNING journal, context_key",
            session_id,
        )
        tx.db.run_many(
            "DELETE FROM contexts WHERE journal = ?1 AND context_key = ?2 AND NOT EXISTS"
            " (SELECT 1 FROM session_contexts WHERE journal = ?1 AND context_key = ?2)",
            keys,
        )
        for table in ("sent", "facts", "sessions", "outbox"):
            tx.db.run(f"DELETE FROM {table} WHERE session_id = ?1", session_id)
        if tx.db.row("SELECT 1 FROM closes WHERE session_id = ?1", session_id) is None:
            delete_revisions(tx, [(session_id,)])  # it was dropped while it was open
        left -= gone + 1
    return True


def set_aside(tx: Transaction, letters: Iterable[gateway_admin_pb2.DeadLetter]) -> None:
    """Makes sessions dead letters: open ones are no longer served, closed ones not sent."""
    for letter in letters:
        tx.db.run(
            "INSERT INTO dead_letters (session_id, journal, reason, message, unix_ms)"
            " VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (session_id) DO UPDATE"
            " SET reason = excluded.reason, message = excluded.message, unix_ms = excluded.unix_ms",
            letter.session_id,
            tx.journal_id,
            letter.reason,
            letter.message.replace("\0", ""),  # which PostgreSQL does not store
            letter.unix_ms,
        )
        tx.db.run(
            "UPDATE outbox SET state = ?1 WHERE session_id = ?2", State.DEAD, letter.session_id
        )
        # A repeated CreateSession with the same request id then opens a working session.
        tx.db.run("UPDATE sessions SET request_id = NULL WHERE session_id = ?1", letter.session_id)


def dead_letters(tx: Transaction, after: str, count: int) -> list[gateway_admin_pb2.DeadLetter]:
    """Returns up to `count` dead letters with session ids after the given one, in id order."""
    rows = tx.db.rows(
        "SELECT session_id, reason, message, unix_ms FROM dead_letters"
        " WHERE journal = ?1 AND session_id > ?2 ORDER BY session_id LIMIT ?3",
        tx.journal_id,
        after,
        count,
    )
    names = ("session_id", "reason", "message", "unix_ms")
    return [gateway_admin_pb2.DeadLetter(**dict(zip(names, row, strict=True))) for row in rows]


def _take_out(tx: Transaction, session_id: str) -> None:
    if not tx.db.changed("DELETE FROM dead_letters WHERE session_id = ?1", session_id):
        raise SessionUnknownError(
            f"session_id: {session_id!r} is not a dead letter; ListDeadLetters lists all",
            session_id=session_id,
        )


def revive(tx: Transaction, session_id: str, new_tree: Callable[[], Tree]) -> Session | None:
    """Revives a session: a closed one waits for the collector again, an open one is returned.

    Raises:
        SessionUnknownError: It is not a dead letter.
        DamagedSessionError: It still cannot be read, and stays a dead letter.
    """
    _take_out(tx, session_id)
    sent = tx.db.changed(
        "UPDATE outbox SET state = ?1 WHERE session_id = ?2", State.WAITING, session_id
    )
    return None if sent else journal.read_session(tx, session_id, new_tree)


def give_up(tx: Transaction, session_id: str) -> None:
    """Drops a dead letter, whose data `sweep` removes.

    Raises:
        SessionUnknownError: It is not a dead letter.
    """
    _take_out(tx, session_id)
    tx.db.run(
        f"{_ADD_TO_OUTBOX} ON CONFLICT (session_id) DO UPDATE SET state = excluded.state",
        tx.journal_id,
        session_id,
        b"",
        0,
        0,
        State.DELIVERED,
    )


_log = logging.getLogger(__name__)
_CALLS = 2
"""Concurrent calls: the next one is read and sent while the collector writes the previous one."""
_CALL_SESSIONS, _CALL_BYTES = 64, 4 * 1024 * 1024
_INGEST = "/rollmesh.v1.CollectorService/Ingest"
_INGEST_TIMEOUT_S, _SLOWEST_LINK = 30.0, 1_000_000  # the latter in bytes per second
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_JOURNAL_RETRY_S = 0.5
_WRITE_S = 2.0
"""Processor time in which the record of a session must be written, or it is sent again alone."""
_LONGEST_WRITE_S = 120.0
"""Processor time in which the record of a session sent alone must be written, or it is a dead
letter."""
MOST_FAILURES = 10
"""Calls with one session alone that the collector answers with an error, before the session is a
dead letter. About half a minute passes until then."""
_COLLECTOR_CODES = {
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "UNIMPLEMENTED",
}
"""Codes of errors that are the collector's, whatever it is sent: it is away, full, or another."""


class _Failed:
    """A session that the collector did not take. It may be sent again at once."""

    def __init__(self) -> None:
        self.errors = 0
        """Number of errors with which the collector answered it alone."""
        self.due_ms = 0
        """When it is sent again, on the monotonic clock."""
        self.backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)


class Record(NamedTuple):
    """A session in the form in which it is sent."""

    session_id: str
    request: bytes
    """A serialised `IngestRequest` with this session only. Concatenating several requests gives
    one request with all sessions."""
    lineages: list[str]


def write_letters(
    letters: Iterable[Letter], limit_s: float
) -> Iterator[tuple[Letter, Record | Exception]]:
    """Yields each closed session with its `Record`, or the error that prevents it.

    Runs in a worker thread. Each record has a limited time: `SlowRecordError` says that it is over.
    """
    for letter in letters:
        found: Record | Exception
        try:
            limit = TimeLimit(limit_s)
            if letter.head:
                record = session_pb2.SessionRecord.FromString(letter.head)
                blobs: Blobs = {
                    row[1]: (row[2], row[3] or b"", row[4] or b"") for row in letter.rows
                }
            else:
                tree = Tree(frozenset())
                for at in range(0, len(letter.rows), PIECE_NODES):
                    journal.attach_rows(tree, letter.rows[at : at + PIECE_NODES], letter.contexts)
                    limit.check()
                journal.state_facts(tree, letter.facts)
                request = gateway_pb2.CloseSessionRequest.FromString(letter.request)
                spec = SessionSpec.from_json(letter.spec)
                record = write_head(spec, tree, request, letter.closed_unix_ms, limit)
                blobs = blobs_of(tree)
            record.images.extend(letter.images)
            lineages = exported_lineages(record)
            found = Record(letter.session_id, serialize(record, blobs), lineages)
        except Exception as error:  # any error affects only this session
            found = error
        yield letter, found


def dead_letter(
    session_id: str, reason: gateway_admin_pb2.DeadLetterReason.ValueType, error: Exception
) -> gateway_admin_pb2.DeadLetter:
    """Returns the dead letter of a session that is set aside, and logs its error."""
    known = isinstance(error, (RollmeshError, DamagedSessionError))
    message = str(error) if known else repr(error)
    name = name_of(gateway_admin_pb2.DeadLetterReason.DESCRIPTOR, reason)
    _log.error(
        "session became a dead letter",
        extra=fields(session_id=session_id, reason=name, error=message),
        exc_info=None if known else error,
    )
    return gateway_admin_pb2.DeadLetter(
        session_id=session_id, reason=reason, message=message, unix_ms=clock.unix_ms()
    )


class Outbox:
    """The closed sessions that the collector has not taken. The journal stores them."""

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
            collectors: The collectors of the mesh. The caller closes it.
            remembered: Number of closes that are remembered after delivery.
        """
        self._journal = journal
        self._collectors = collectors
        self._remembered = remembered
        self._changed = asyncio.Event()
        self._calls = asyncio.Semaphore(_CALLS)
        self._busy: set[str] = set()
        """Sessions that are being sent."""
        self._delivered: list[str] = []
        """Sessions that the collector has but that the journal does not mark as delivered yet."""
        self._failed: dict[str, _Failed] = {}
        """Sessions that the collector did not take. Each is sent again alone."""
        self._is_retrying = False
        """Whether a call slot has one of them."""
        self._rest = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        """How long a call slot rests after a failure, as long as no call succeeds."""
        self._is_failing = False
        """Whether no call has succeeded since the last failure."""
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

    async def restore(self) -> None:
        """Reads the waiting sessions and the dead letters from the journal, before `run`.

        Raises:
            RollmeshError: The journal cannot be read.
        """
        of_dead = "SELECT session_id FROM dead_letters WHERE journal = ?1"
        self.undelivered = await self._journal.read(count_undelivered)
        rows = await self._journal.read(lambda tx: tx.db.rows(of_dead, tx.journal_id))
        self.dead = {session_id for (session_id,) in rows}

    async def run(self) -> None:
        """Delivers sessions until it is cancelled when the gateway stops.

        A journal that cannot be read or written for a while delays it.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                await self._calls.acquire()
                letters, is_retry = await self._next()
                group.create_task(self._hand_over(letters, is_retry=is_retry))

    @property
    def retried(self) -> int:
        """Number of sessions that the collector did not take and that are sent again, alone."""
        return len(self._failed)

    async def set_aside(self, letters: list[gateway_admin_pb2.DeadLetter]) -> None:
        """Makes sessions dead letters.

        Raises:
            RollmeshError: The journal cannot be written. The sessions are unchanged.
        """
        await self._journal.run(lambda tx: set_aside(tx, letters))
        for letter in letters:
            self.dead.add(letter.session_id)
            self._failed.pop(letter.session_id, None)

    async def list_dead_letters(self, after: str, count: int) -> list[gateway_admin_pb2.DeadLetter]:
        """Returns up to `count` dead letters with session ids after the given one, in id order."""
        return await self._journal.run(lambda tx: dead_letters(tx, after, count))

    async def revive(self, session_id: str, new_tree: Callable[[], Tree]) -> Session | None:
        """Revives a dead letter: a closed session is sent again, an open one is returned.

        Raises:
            SessionUnknownError: It is not a dead letter.
            SessionDamagedError: It still cannot be read, and stays a dead letter.
        """
        try:
            session = await self._journal.run(lambda tx: revive(tx, session_id, new_tree))
        except DamagedSessionError as error:
            raise damaged_error(session_id, f": {error}") from error
        self.dead.discard(session_id)
        if session is None:
            self.added()
        return session

    async def drop(self, session_id: str) -> None:
        """Drops a dead letter and deletes its data from the journal.

        Raises:
            SessionUnknownError: It is not a dead letter.
        """
        await self._journal.run(lambda tx: give_up(tx, session_id))
        self.dead.discard(session_id)
        self._changed.set()

    async def _next(self) -> tuple[list[Letter], bool]:
        """Waits for sessions to send, and removes delivered sessions from the journal.

        Returns:
            The sessions of one call, and whether it is one session that failed before.
        """
        while True:
            self._changed.clear()
            delivered, self._delivered = self._delivered, []
            # The failed session to send now, or the time until the next one is due.
            retry, wait_s = None, None
            waiting = self._failed.keys() - self._busy
            if waiting and not self._is_retrying:
                due_ms, first = min((self._failed[one].due_ms, one) for one in waiting)
                wait_s = (due_ms - clock.monotonic_ms()) / 1000
                retry = first if wait_s <= 0 else None
            passed = self._busy | self._failed.keys()
            try:
                letters, damaged, forgotten, more = await self._journal.run(
                    partial(self._turn, delivered=delivered, passed=passed, retry=retry)
                )
            except RollmeshError as error:  # transient: a full disk or write backlog
                _log.warning(
                    "recording deliveries failed, will retry",
                    extra=fields(reason=error.reason, error=str(error)),
                )
                self._delivered += delivered
                await asyncio.sleep(_JOURNAL_RETRY_S)
                continue
            self.undelivered -= len(delivered) + len(damaged)
            for letter in damaged:
                self.dead.add(letter.session_id)
                self._failed.pop(letter.session_id, None)
            self._busy.difference_update(delivered)
            if forgotten:
                self.forgotten(forgotten)
            if letters:
                self._busy |= {letter.session_id for letter in letters}
                self._is_retrying |= retry is not None
                if more:
                    self._changed.set()
                return letters, retry is not None
            if not (more or damaged):
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()

    def _turn(
        self, tx: Transaction, delivered: list[str], passed: set[str], retry: str | None
    ) -> tuple[list[Letter], list[gateway_admin_pb2.DeadLetter], list[str], bool]:
        """Removes delivered data and reads the next sessions in a single transaction.

        Returns:
            Sessions to send, sessions that cannot be read, session ids of closes that are no
            longer remembered, and whether there may be more to remove.
        """
        tx.db.run_many(
            "UPDATE outbox SET state = ?1 WHERE session_id = ?2",
            [(State.DELIVERED, session_id) for session_id in delivered],
        )
        more = sweep(tx)
        forgotten = forget_closes(tx, self._remembered)
        letters: list[Letter] = []
        damaged: list[gateway_admin_pb2.DeadLetter] = []
        size = 0
        waiting = [(retry, 0)] if retry else undelivered(tx, len(passed) + _CALL_SESSIONS)
        for session_id, length in waiting:
            if session_id in passed and not retry:
                continue
            size += length
            if letters and size > _CALL_BYTES:
                break
            try:
                letters.append(read_letter(tx, session_id))
            except DamagedSessionError as error:
                reason = gateway_admin_pb2.DEAD_LETTER_REASON_DAMAGED
                damaged.append(dead_letter(session_id, reason, error))
                continue
            if self._is_failing or len(letters) == _CALL_SESSIONS:
                break
        if damaged:
            set_aside(tx, damaged)
        return letters, damaged, forgotten, more

    async def _hand_over(self, letters: list[Letter], *, is_retry: bool) -> None:
        """Sends sessions once. A session that the collector does not take is sent again alone.

        The slot rests after a failure, because the next sessions may fail for the same reason. It
        rests longer while no call succeeds.
        """
        ids, begun_ms = [letter.session_id for letter in letters], clock.monotonic_ms()
        try:
            slow = await self._send(letters, is_retry=is_retry)
        except Exception as error:  # one parcel must not end the others
            known = isinstance(error, RollmeshError)
            reason = error.reason if isinstance(error, RollmeshError) else type(error).__name__
            _log.warning(
                "delivery to the collector failed, will retry",
                extra=fields(reason=reason, error=str(error)),
                exc_info=None if known else error,
            )
            took_ms = clock.monotonic_ms() - begun_ms
            for session_id in ids:
                if session_id not in self.dead:  # waits as long as the call took, at least
                    failed = self._failed.setdefault(session_id, _Failed())
                    wait_ms = max(int(failed.backoff.next_s() * 1000), took_ms)
                    failed.due_ms = clock.monotonic_ms() + wait_ms
            self._busy.difference_update(ids)
            self._is_failing = True
            self._changed.set()
            await asyncio.sleep(self._rest.next_s())
        else:
            for session_id in ids:
                self._failed.pop(session_id, None)
            for session_id in slow:
                self._failed[session_id] = _Failed()
            self._busy.difference_update(slow)
            self._is_failing = False
            self._rest.reset()
        if is_retry:
            self._is_retrying = False
        self._calls.release()
        self._changed.set()

    async def _send(self, letters: list[Letter], *, is_retry: bool) -> set[str]:
        """Sends sessions. A session that can never be sent becomes a dead letter.

        Returns:
            The sessions whose records were not written in time.

        Raises:
            RollmeshError: No session was taken: the error is transient, or one of several sessions
                caused it.
        """
        for letter in letters:
            await self._read_rest(letter)

        limit_s = _LONGEST_WRITE_S if is_retry else _WRITE_S
        records, broken, late = list[Record](), list[gateway_admin_pb2.DeadLetter](), set[str]()
        for letter, found in await asyncio.to_thread(list, write_letters(letters, limit_s)):
            if isinstance(found, Record):
                records.append(found)
            elif isinstance(found, SlowRecordError) and not is_retry:
                late.add(letter.session_id)
            else:
                reason = gateway_admin_pb2.DEAD_LETTER_REASON_UNEXPORTABLE
                broken.append(dead_letter(letter.session_id, reason, found))
        if broken:
            await self._bury(broken)
        if not records:
            return late
        request = b"".join([record.request for record in records])

        async def ingest(channel: grpc.aio.Channel) -> None:
            method = channel.unary_unary(
                _INGEST,
                request_serializer=bytes,
                response_deserializer=collector_pb2.IngestResponse.FromString,
            )
            limit_s = _INGEST_TIMEOUT_S + len(request) / _SLOWEST_LINK
            with typed_errors():
                await method(request, timeout=limit_s, wait_for_ready=self._collectors.is_fixed)

        try:  # a repeat is harmless
            await self._collectors.call(ingest)
        except RollmeshError as error:
            if len(records) > 1:
                raise
            session_id = records[0].session_id
            reason = gateway_admin_pb2.DEAD_LETTER_REASON_REFUSED
            too_large = isinstance(error, RemoteError) and "larger than max" in error.message
            if not too_large and not isinstance(error, InvalidFieldError):
                if error.code in _COLLECTOR_CODES or isinstance(error, StoreError):
                    raise  # the collector's fault, not the session's
                failed = self._failed.setdefault(session_id, _Failed())
                failed.errors += 1
                if failed.errors < MOST_FAILURES:
                    raise
                reason = gateway_admin_pb2.DEAD_LETTER_REASON_FAILED
            await self._bury([dead_letter(session_id, reason, error)])
            return late
        await faults.reach("gateway-after-handover")
        self._delivered += [record.session_id for record in records]
        for record in records:
            for lineage in record.lineages:
                metrics.TRAJECTORIES.labels(lineage).inc()
        return late

    async def _read_rest(self, letter: Letter) -> None:
        """Reads the remaining nodes of a large session in batches, and its images one by one.

        Other commits run in between.
        """
        rows, id_ = letter.rows, letter.session_id
        columns = journal.BLOB_COLUMNS if letter.head else journal.NODE_COLUMNS
        read = partial(read_nodes, session_id=id_, limit=PIECE_NODES, columns=columns)
        while len(rows) == PIECE_NODES:
            rows = await self._journal.run(partial(read, after=rows[-1][0]))
            letter.rows.extend(rows)
        if not any(row[-1] for row in letter.rows):  # no node has images
            return
        at = 0
        next_image = partial(read_next_image, session_id=id_)
        while (found := await self._journal.run(partial(next_image, after=at))) is not None:
            at, image = found
            letter.images.append(image)

    async def _bury(self, letters: list[gateway_admin_pb2.DeadLetter]) -> None:
        await self.set_aside(letters)
        self.undelivered -= len(letters)
        self._busy -= {letter.session_id for letter in letters}


def damaged_error(session_id: str, why: str = "") -> SessionDamagedError:
    """Returns the error of a session that was set aside."""
    return SessionDamagedError(
        f"session {session_id} cannot be read from the journal{why}; open another, and ask the "
        "operator to look at the gateway's dead letters",
        session_id=session_id,
    )
