"""Closed sessions in the journal: on their way to the collector, set aside, and remembered.

A close moves nothing: its request stands beside the session's own turns, each token once, and its
record is made when it is sent. Once the collector has it, its turns go in pieces, so that other
commits go between.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from rollmesh.chat.messages import RenderContext
from rollmesh.gateway.conversation.spec import SessionSpec
from rollmesh.gateway.conversation.tree import Node, Tree
from rollmesh.gateway.storage import journal
from rollmesh.gateway.storage.journal import StoredSession
from rollmesh.runtime.codec.arrays import pack_ids, unpack_ids
from rollmesh.runtime.errors import SessionUnknownError

PIECE_NODES = 512
"""Nodes that one commit reads of a session, or deletes."""


class State(IntEnum):
    """Where a closed session is; the journal has the numbers."""

    WAITING = 0
    DELIVERED = 1
    """The collector has it, or it was given up: its turns go."""
    DEAD = 2


class Close(NamedTuple):
    """What a close adds to a session."""

    session_id: str
    request: bytes
    """The request, serialised."""
    digest: bytes
    """Tells a repeat of the request from another one."""
    closed_unix_ms: int
    record_bytes: int
    """Size of its record, about."""
    leaves: Sequence[int]
    """Last node of each of its trajectories."""
    orphans: Sequence[Node]
    """Nodes that became orphans by it."""


class Letter(NamedTuple):
    """A closed session as the journal has it."""

    session_id: str
    spec: str
    request: bytes
    closed_unix_ms: int
    contexts: dict[bytes, RenderContext]
    rows: list[Any]
    """Its nodes; the first `PIECE_NODES` at first."""


class DeadLetter(NamedTuple):
    """A session that was set aside."""

    session_id: str
    reason: str
    message: str
    unix_ms: int


def close_session(db: sqlite3.Connection, close: Close) -> None:
    """Moves a session to the outbox, and remembers the answer of the close."""
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
    """Returns the ids of the closed sessions that are remembered."""
    return {session_id for (session_id,) in db.execute("SELECT session_id FROM closes")}


def read_close(db: sqlite3.Connection, session_id: str) -> tuple[bytes, list[int]]:
    """Returns the digest of a close, and the last node of each trajectory of its session."""
    digest, leaves = db.execute(
        "SELECT digest, leaves FROM closes WHERE session_id = ?", (session_id,)
    ).fetchone()
    return digest, [int(id_) for id_ in unpack_ids(leaves, "leaves")]


def forget_closes(db: sqlite3.Connection, remembered: int) -> list[str]:
    """Forgets the oldest closes, but none that waits for the collector; returns their ids."""
    rows = db.execute(
        "DELETE FROM closes WHERE n <= (SELECT max(n) FROM closes) - ?"
        " AND session_id NOT IN (SELECT session_id FROM outbox) RETURNING session_id",
        (remembered,),
    )
    return [session_id for (session_id,) in rows.fetchall()]


def undelivered(db: sqlite3.Connection, count: int) -> list[tuple[str, int]]:
    """Returns the oldest closed sessions that the collector has not taken, and their sizes."""
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
    """Returns a closed session, and the first of its nodes.

    Raises:
        DamagedSessionError: What the journal has of it cannot be read.
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
    """Returns the session of a letter with all its rows."""
    stored = StoredSession(SessionSpec(**json.loads(letter.spec)), new_tree())
    for row in letter.rows:
        journal.attach_row(stored, row, letter.contexts)
    return stored


def mark_delivered(db: sqlite3.Connection, session_ids: Iterable[str]) -> None:
    """Says that the collector has sessions; `sweep` removes them."""
    rows = [(State.DELIVERED, session_id) for session_id in session_ids]
    db.executemany("UPDATE outbox SET state = ? WHERE session_id = ?", rows)


def sweep(db: sqlite3.Connection) -> bool:
    """Removes a piece of what is not needed any more; says whether there is more of it."""
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
    """Removes what is left of a session without nodes, and render contexts that only it has."""
    keys = db.execute(
        "DELETE FROM session_frames WHERE session_id = ? RETURNING frame_key", (session_id,)
    ).fetchall()
    db.executemany(
        "DELETE FROM frames WHERE frame_key = ?1"
        " AND NOT EXISTS (SELECT 1 FROM session_frames WHERE frame_key = ?1)",
        keys,
    )
    db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM outbox WHERE session_id = ?", (session_id,))


def set_aside(db: sqlite3.Connection, letters: Iterable[DeadLetter]) -> None:
    """Makes sessions dead letters: open ones are not served, closed ones not sent."""
    for letter in letters:
        db.execute(
            "INSERT OR REPLACE INTO dead_letters (session_id, reason, message, unix_ms)"
            " VALUES (?, ?, ?, ?)",
            letter,
        )
        db.execute(
            "UPDATE outbox SET state = ? WHERE session_id = ?", (State.DEAD, letter.session_id)
        )
        # Whoever asks with the same request id again gets a session that works.
        db.execute(
            "UPDATE sessions SET request_id = NULL WHERE session_id = ?", (letter.session_id,)
        )


def dead_letters(db: sqlite3.Connection, after: str, count: int) -> list[DeadLetter]:
    """Returns dead letters by session id, those after the id given."""
    rows = db.execute(
        "SELECT session_id, reason, message, unix_ms FROM dead_letters WHERE session_id > ?"
        " ORDER BY session_id LIMIT ?",
        (after, count),
    )
    return [DeadLetter(*row) for row in rows.fetchall()]


def dead_ids(db: sqlite3.Connection) -> set[str]:
    """Returns the ids of all sessions that were set aside."""
    return {session_id for (session_id,) in db.execute("SELECT session_id FROM dead_letters")}


def revive(
    db: sqlite3.Connection, session_id: str, new_tree: Callable[[], Tree]
) -> StoredSession | None:
    """Takes a session back: a closed one waits for the collector again, an open one is returned.

    Raises:
        SessionUnknownError: It is no dead letter.
        DamagedSessionError: It still cannot be read, and stays where it is.
    """
    if not db.execute("DELETE FROM dead_letters WHERE session_id = ?", (session_id,)).rowcount:
        raise SessionUnknownError(f"session_id: {session_id!r} is no dead letter")
    sent = db.execute(
        "UPDATE outbox SET state = ? WHERE session_id = ?", (State.WAITING, session_id)
    ).rowcount
    return None if sent else journal.read_session(db, session_id, new_tree)


def give_up(db: sqlite3.Connection, session_id: str) -> None:
    """Gives up a session that was set aside; `sweep` removes it."""
    db.execute("DELETE FROM dead_letters WHERE session_id = ?", (session_id,))
    db.execute(
        "INSERT INTO outbox (session_id, request, closed_unix_ms, bytes, state)"
        " VALUES (?1, x'', 0, 0, ?2) ON CONFLICT (session_id) DO UPDATE SET state = ?2",
        (session_id, State.DELIVERED),
    )
