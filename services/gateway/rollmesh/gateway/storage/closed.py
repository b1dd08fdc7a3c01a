"""Closed sessions in the journal: waiting for the collector, set aside, and remembered.

A close moves no data. Its request is stored next to the session's turns, each token once, and the
record is built when it is sent. Once the collector has the session, its turns are deleted in
batches, so that other commits can run in between.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from rollmesh.chat.messages import RenderContext
from rollmesh.gateway.conversation.branches import Branches
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.spec import SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.storage import journal
from rollmesh.gateway.storage.images import remove_images
from rollmesh.gateway.storage.journal import StoredSession
from rollmesh.gateway.storage.keys import delete_revisions
from rollmesh.gateway.storage.transaction import Transaction
from rollmesh.runtime.codec.arrays import pack_ids, unpack_ids
from rollmesh.runtime.errors import SessionUnknownError
from rollmesh.v1 import gateway_pb2, session_pb2

PIECE_NODES = 512
"""Number of nodes that one commit reads from a session; a commit deletes up to twice as many."""
PIECE_IMAGE_BYTES = 4 * 1024 * 1024
"""Size of the images that one commit deletes, bytes; the last of them may exceed it."""
_NEXT = "(SELECT coalesce(max(n), 0) + 1 FROM {0} WHERE journal = ?1)"
"""The next position of a journal in a table; only its gateway adds to it."""
_ADD_TO_OUTBOX = (
    "INSERT INTO outbox (journal, n, session_id, request, closed_unix_ms, bytes, state)"  # noqa: S608
    f" VALUES (?1, {_NEXT.format('outbox')}, ?2, ?3, ?4, ?5, ?6)"
)
_ADD_CLOSE = (
    "INSERT INTO closes (journal, n, session_id, request_id, leaves, digest)"  # noqa: S608
    f" SELECT journal, {_NEXT.format('closes')}, session_id, request_id, ?3, ?4"
    " FROM sessions WHERE journal = ?1 AND session_id = ?2"
)


class State(IntEnum):
    """The state of a closed session; the journal stores the numbers."""

    WAITING = 0
    DELIVERED = 1
    """The collector has it, or an operator dropped it: its turns are deleted."""
    DEAD = 2


class Close(NamedTuple):
    """What a close stores in addition to the session."""

    session_id: str
    request: bytes
    """The serialised request."""
    digest: bytes
    """Digest that tells a repeated request from a different one."""
    closed_unix_ms: int
    record_bytes: int
    """Approximate size of the session's record, bytes."""
    leaves: Sequence[int]
    """Last node of each of the session's trajectories."""
    orphans: Sequence[Node]
    """Nodes whose answers did not reach the agent; their reasons are stored again."""


class Letter(NamedTuple):
    """A closed session as read from the journal."""

    session_id: str
    spec: str
    request: bytes
    closed_unix_ms: int
    contexts: dict[bytes, RenderContext]
    rows: list[Any]
    """Rows of its nodes; initially the first `PIECE_NODES`."""
    images: list[session_pb2.SessionImage]
    """Its images; initially none."""


def close_session(tx: Transaction, close: Close) -> None:
    """Adds a session to the outbox, and remembers the response to the close."""
    for node in close.orphans:
        journal.update_reasons(tx, close.session_id, node)
    tx.db.run(
        _ADD_TO_OUTBOX,
        tx.journal_id,
        close.session_id,
        close.request,
        close.closed_unix_ms,
        close.record_bytes,
        State.WAITING,
    )
    tx.db.run(
        _ADD_CLOSE,
        tx.journal_id,
        close.session_id,
        pack_ids(np.array(close.leaves, np.uint32)),
        close.digest,
    )


def read_closes(tx: Transaction) -> set[str]:
    """Returns the ids of the sessions whose close is remembered."""
    rows = tx.db.rows("SELECT session_id FROM closes WHERE journal = ?1", tx.journal_id)
    return {session_id for (session_id,) in rows}


def read_close(tx: Transaction, session_id: str) -> tuple[bytes, list[int]]:
    """Returns the digest of a close, and the last node of each of the session's trajectories."""
    ((digest, leaves),) = tx.db.rows(
        "SELECT digest, leaves FROM closes WHERE session_id = ?1", session_id
    )
    return digest, [int(id_) for id_ in unpack_ids(leaves, "leaves")]


def forget_closes(tx: Transaction, remembered: int) -> list[str]:
    """Forgets the oldest closes, except those still in the outbox; returns their session ids."""
    rows = tx.db.rows(
        "DELETE FROM closes WHERE journal = ?1"
        " AND n <= (SELECT max(n) FROM closes WHERE journal = ?1) - ?2"
        " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.session_id = closes.session_id)"
        " RETURNING session_id",
        tx.journal_id,
        remembered,
    )
    delete_revisions(tx, rows)
    return [session_id for (session_id,) in rows]


def undelivered(tx: Transaction, count: int) -> list[tuple[str, int]]:
    """Returns the oldest sessions that wait for the collector, with their approximate sizes."""
    rows = tx.db.rows(
        "SELECT session_id, bytes FROM outbox WHERE journal = ?1 AND state = ?2"
        " ORDER BY n LIMIT ?3",
        tx.journal_id,
        State.WAITING,
        count,
    )
    return [(session_id, size) for session_id, size in rows]


def count_undelivered(tx: Transaction) -> int:
    """Returns how many closed sessions wait for the collector."""
    return int(
        tx.db.value(
            "SELECT count(*) FROM outbox WHERE journal = ?1 AND state = ?2",
            tx.journal_id,
            State.WAITING,
        )
    )


def read_letter(tx: Transaction, session_id: str) -> Letter:
    """Returns a closed session with its first nodes.

    Raises:
        DamagedSessionError: The session's data in the journal cannot be read.
        RollmeshError: The journal cannot be read now.
    """
    with journal.damage(tx):
        spec = journal.spec_row(tx, session_id)
        ((request, closed_ms),) = tx.db.rows(
            "SELECT request, closed_unix_ms FROM outbox WHERE session_id = ?1", session_id
        )
        contexts = journal.read_contexts(tx, session_id)
        rows = journal.read_nodes(tx, session_id, limit=PIECE_NODES)
    return Letter(session_id, spec, request, closed_ms, contexts, rows, [])


def rebuilt(letter: Letter) -> tuple[SessionSpec, Branches]:
    """Rebuilds the session of a letter that holds all its rows."""
    branches = Branches()
    journal.attach_rows(branches, letter.rows, letter.contexts)
    return SessionSpec(**json.loads(letter.spec)), branches


def mark_delivered(tx: Transaction, session_ids: Iterable[str]) -> None:
    """Marks sessions as delivered; `sweep` removes them."""
    tx.db.run_many(
        "UPDATE outbox SET state = ?1 WHERE session_id = ?2",
        [(State.DELIVERED, session_id) for session_id in session_ids],
    )


def sweep(tx: Transaction) -> bool:
    """Removes one batch of delivered data; returns whether more may be left."""
    left, left_bytes = 2 * PIECE_NODES, PIECE_IMAGE_BYTES
    while left > 0 and left_bytes > 0:
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
        if gone < left:
            if has_images:
                left_bytes -= remove_images(tx, session_id, left_bytes)
            if left_bytes > 0:
                _forget(tx, session_id)
        left -= gone + 1
    return True


def _forget(tx: Transaction, session_id: str) -> None:
    """Removes what is left of a session without nodes and images, and its own render contexts."""
    keys = tx.db.rows(
        "DELETE FROM session_contexts WHERE session_id = ?1 RETURNING journal, context_key",
        session_id,
    )
    tx.db.run_many(
        "DELETE FROM contexts WHERE journal = ?1 AND context_key = ?2"
        " AND NOT EXISTS (SELECT 1 FROM session_contexts WHERE journal = ?1 AND context_key = ?2)",
        keys,
    )
    for table in ("sent", "sessions", "outbox"):
        tx.db.run(f"DELETE FROM {table} WHERE session_id = ?1", session_id)  # noqa: S608
    if tx.db.row("SELECT 1 FROM closes WHERE session_id = ?1", session_id) is None:
        delete_revisions(tx, [(session_id,)])  # it was dropped while it was open


def set_aside(tx: Transaction, letters: Iterable[gateway_pb2.DeadLetter]) -> None:
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


def dead_letters(tx: Transaction, after: str, count: int) -> list[gateway_pb2.DeadLetter]:
    """Returns up to `count` dead letters with session ids after the given one, in id order."""
    rows = tx.db.rows(
        "SELECT session_id, reason, message, unix_ms FROM dead_letters"
        " WHERE journal = ?1 AND session_id > ?2 ORDER BY session_id LIMIT ?3",
        tx.journal_id,
        after,
        count,
    )
    names = ("session_id", "reason", "message", "unix_ms")
    return [gateway_pb2.DeadLetter(**dict(zip(names, row, strict=True))) for row in rows]


def dead_ids(tx: Transaction) -> set[str]:
    """Returns the ids of all sessions that were set aside."""
    rows = tx.db.rows("SELECT session_id FROM dead_letters WHERE journal = ?1", tx.journal_id)
    return {session_id for (session_id,) in rows}


def revive(tx: Transaction, session_id: str, new_tree: Callable[[], Tree]) -> StoredSession | None:
    """Revives a session: a closed one waits for the collector again, an open one is returned.

    Raises:
        SessionUnknownError: It is not a dead letter.
        DamagedSessionError: It still cannot be read, and stays a dead letter.
    """
    if not tx.db.changed("DELETE FROM dead_letters WHERE session_id = ?1", session_id):
        raise SessionUnknownError(
            f"session_id: {session_id!r} is not a dead letter; ListDeadLetters lists all"
        )
    sent = tx.db.changed(
        "UPDATE outbox SET state = ?1 WHERE session_id = ?2", State.WAITING, session_id
    )
    return None if sent else journal.read_session(tx, session_id, new_tree)


def give_up(tx: Transaction, session_id: str) -> None:
    """Drops a dead letter; `sweep` removes its data."""
    tx.db.run("DELETE FROM dead_letters WHERE session_id = ?1", session_id)
    tx.db.run(
        f"{_ADD_TO_OUTBOX} ON CONFLICT (session_id) DO UPDATE SET state = excluded.state",
        tx.journal_id,
        session_id,
        b"",
        0,
        0,
        State.DELIVERED,
    )
