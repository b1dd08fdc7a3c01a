"""Closed sessions in the journal: waiting for the collector, set aside, and remembered.

A close moves no data. Its request is stored next to the session's turns, each token once, and the
record is built when it is sent. Once the collector has the session, its turns are deleted in
batches, so that other commits can run in between.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from rollmesh.chat.messages import RenderContext
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.spec import SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.storage import journal
from rollmesh.gateway.storage.journal import StoredSession
from rollmesh.runtime.codec.arrays import pack_ids, unpack_ids
from rollmesh.runtime.errors import SessionUnknownError
from rollmesh.v1 import gateway_pb2

PIECE_NODES = 512
"""Number of nodes that one commit reads from a session; a commit deletes up to twice as many."""


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


def close_session(db: sqlite3.Connection, close: Close) -> None:
    """Adds a session to the outbox, and remembers the response to the close."""
    for node in close.orphans:
        journal.update_reasons(db, close.session_id, node)
    db.execute(
        "INSERT INTO outbox (session_id, request, closed_unix_ms, bytes, state)"
        " VALUES (?, ?, ?, ?, ?)",
        (close.session_id, close.request, close.closed_unix_ms, close.record_bytes, State.WAITING),
    )
    leaves = pack_ids(np.array(close.leaves, np.uint32))
    db.execute(
        "INSERT INTO closes (session_id, request_id, leaves, digest)"
        " SELECT session_id, request_id, ?2, ?3 FROM sessions WHERE session_id = ?1",
        (close.session_id, leaves, close.digest),
    )


def read_closes(db: sqlite3.Connection) -> set[str]:
    """Returns the ids of the sessions whose close is remembered."""
    return {session_id for (session_id,) in db.execute("SELECT session_id FROM closes")}


def read_close(db: sqlite3.Connection, session_id: str) -> tuple[bytes, list[int]]:
    """Returns the digest of a close, and the last node of each of the session's trajectories."""
    digest, leaves = db.execute(
        "SELECT digest, leaves FROM closes WHERE session_id = ?", (session_id,)
    ).fetchone()
    return digest, [int(id_) for id_ in unpack_ids(leaves, "leaves")]


def forget_closes(db: sqlite3.Connection, remembered: int) -> list[str]:
    """Forgets the oldest closes, except those still in the outbox; returns their session ids."""
    rows = db.execute(
        "DELETE FROM closes WHERE n <= (SELECT max(n) FROM closes) - ?"
        " AND session_id NOT IN (SELECT session_id FROM outbox) RETURNING session_id",
        (remembered,),
    )
    return [session_id for (session_id,) in rows.fetchall()]


def undelivered(db: sqlite3.Connection, count: int) -> list[tuple[str, int]]:
    """Returns the oldest sessions that wait for the collector, with their approximate sizes."""
    rows = db.execute(
        "SELECT session_id, bytes FROM outbox WHERE state = ? ORDER BY n LIMIT ?",
        (State.WAITING, count),
    )
    return rows.fetchall()


def count_undelivered(db: sqlite3.Connection) -> int:
    """Returns how many closed sessions wait for the collector."""
    row = db.execute("SELECT count(*) FROM outbox WHERE state = ?", (State.WAITING,)).fetchone()
    return int(row[0])


def read_letter(db: sqlite3.Connection, session_id: str) -> Letter:
    """Returns a closed session with its first nodes.

    Raises:
        DamagedSessionError: The session's data in the journal cannot be read.
    """
    try:
        (spec,) = db.execute(
            "SELECT spec FROM sessions WHERE session_id = ?", (session_id,)
        ).fetchone()
        request, closed = db.execute(
            "SELECT request, closed_unix_ms FROM outbox WHERE session_id = ?", (session_id,)
        ).fetchone()
        contexts = journal.read_contexts(db, session_id)
        rows = journal.read_nodes(db, session_id, limit=PIECE_NODES)
    except Exception as error:
        raise journal.DamagedSessionError(f"{type(error).__name__}: {error}") from error
    return Letter(session_id, spec, request, closed, contexts, rows)


def rebuilt(letter: Letter, new_tree: Callable[[], Tree]) -> StoredSession:
    """Rebuilds the session of a letter that holds all its rows."""
    stored = StoredSession(SessionSpec(**json.loads(letter.spec)), new_tree())
    for row in letter.rows:
        journal.attach_row(stored, row, letter.contexts)
    return stored


def mark_delivered(db: sqlite3.Connection, session_ids: Iterable[str]) -> None:
    """Marks sessions as delivered; `sweep` removes them."""
    rows = [(State.DELIVERED, session_id) for session_id in session_ids]
    db.executemany("UPDATE outbox SET state = ? WHERE session_id = ?", rows)


def sweep(db: sqlite3.Connection) -> bool:
    """Removes one batch of delivered data; returns whether more may be left."""
    left = 2 * PIECE_NODES
    while left > 0:
        row = db.execute(
            "SELECT session_id FROM outbox WHERE state = ? ORDER BY n LIMIT 1", (State.DELIVERED,)
        ).fetchone()
        if row is None:
            return False
        gone = db.execute(
            "DELETE FROM nodes WHERE rowid IN"
            " (SELECT rowid FROM nodes WHERE session_id = ? LIMIT ?)",
            (*row, left),
        ).rowcount
        if gone < left:
            _forget(db, row[0])
        left -= gone + 1
    return True


def _forget(db: sqlite3.Connection, session_id: str) -> None:
    """Removes the remains of a session without nodes, and render contexts used only by it."""
    keys = db.execute(
        "DELETE FROM session_contexts WHERE session_id = ? RETURNING context_key", (session_id,)
    ).fetchall()
    db.executemany(
        "DELETE FROM contexts WHERE context_key = ?1"
        " AND NOT EXISTS (SELECT 1 FROM session_contexts WHERE context_key = ?1)",
        keys,
    )
    db.execute("DELETE FROM sent WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM outbox WHERE session_id = ?", (session_id,))


def set_aside(db: sqlite3.Connection, letters: Iterable[gateway_pb2.DeadLetter]) -> None:
    """Makes sessions dead letters: open ones are no longer served, closed ones not sent."""
    for letter in letters:
        db.execute(
            "INSERT OR REPLACE INTO dead_letters (session_id, reason, message, unix_ms)"
            " VALUES (?, ?, ?, ?)",
            (letter.session_id, letter.reason, letter.message, letter.unix_ms),
        )
        db.execute(
            "UPDATE outbox SET state = ? WHERE session_id = ?", (State.DEAD, letter.session_id)
        )
        # A repeated CreateSession with the same request id then opens a working session.
        db.execute(
            "UPDATE sessions SET request_id = NULL WHERE session_id = ?", (letter.session_id,)
        )


def dead_letters(db: sqlite3.Connection, after: str, count: int) -> list[gateway_pb2.DeadLetter]:
    """Returns up to `count` dead letters with session ids after the given one, in id order."""
    rows = db.execute(
        "SELECT session_id, reason, message, unix_ms FROM dead_letters WHERE session_id > ?"
        " ORDER BY session_id LIMIT ?",
        (after, count),
    )
    names = ("session_id", "reason", "message", "unix_ms")
    return [gateway_pb2.DeadLetter(**dict(zip(names, row, strict=True))) for row in rows.fetchall()]


def dead_ids(db: sqlite3.Connection) -> set[str]:
    """Returns the ids of all sessions that were set aside."""
    return {session_id for (session_id,) in db.execute("SELECT session_id FROM dead_letters")}


def revive(
    db: sqlite3.Connection, session_id: str, new_tree: Callable[[], Tree]
) -> StoredSession | None:
    """Revives a session: a closed one waits for the collector again, an open one is returned.

    Raises:
        SessionUnknownError: It is not a dead letter.
        DamagedSessionError: It still cannot be read, and stays a dead letter.
    """
    if not db.execute("DELETE FROM dead_letters WHERE session_id = ?", (session_id,)).rowcount:
        raise SessionUnknownError(
            f"session_id: {session_id!r} is not a dead letter; ListDeadLetters lists all"
        )
    sent = db.execute(
        "UPDATE outbox SET state = ? WHERE session_id = ?", (State.WAITING, session_id)
    ).rowcount
    return None if sent else journal.read_session(db, session_id, new_tree)


def give_up(db: sqlite3.Connection, session_id: str) -> None:
    """Drops a dead letter; `sweep` removes its data."""
    db.execute("DELETE FROM dead_letters WHERE session_id = ?", (session_id,))
    db.execute(
        "INSERT INTO outbox (session_id, request, closed_unix_ms, bytes, state)"
        " VALUES (?1, x'', 0, 0, ?2) ON CONFLICT (session_id) DO UPDATE SET state = ?2",
        (session_id, State.DELIVERED),
    )
