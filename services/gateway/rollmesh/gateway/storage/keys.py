"""Revisions of session keys: how often the key of a session was ended.

Most sessions keep their first key and have no row. A row stays as long as the session or its close
does. Keys themselves are not stored.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rollmesh.gateway.storage.transaction import Transaction


class KeyRevision(NamedTuple):
    """The current key of a session."""

    number: int
    """Number of keys that were ended before it."""
    request_id: str
    """Request id of the call that ended the last one; may be empty."""


def read_revisions(tx: Transaction) -> dict[str, KeyRevision]:
    """Returns the revisions of a journal by session id, without those that are 0."""
    rows = tx.db.rows(
        "SELECT session_id, revision, request_id FROM session_keys WHERE journal = ?1",
        tx.journal_id,
    )
    return {session_id: KeyRevision(*revision) for session_id, *revision in rows}


def store_revision(tx: Transaction, session_id: str, revision: KeyRevision) -> None:
    """Stores the revision of a session's key."""
    tx.db.run(
        "INSERT INTO session_keys (session_id, journal, revision, request_id)"
        " VALUES (?1, ?2, ?3, ?4) ON CONFLICT (session_id) DO UPDATE"
        " SET revision = excluded.revision, request_id = excluded.request_id",
        session_id,
        tx.journal_id,
        *revision,
    )


def delete_revisions(tx: Transaction, session_ids: Iterable[tuple[str]]) -> None:
    """Deletes the revisions of sessions that nobody can name any more."""
    tx.db.run_many("DELETE FROM session_keys WHERE session_id = ?1", session_ids)
