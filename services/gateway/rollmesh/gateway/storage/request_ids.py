"""The sessions that request ids opened and that are closed by now, as far as that is remembered."""

from rollmesh.gateway.storage.transaction import Transaction
from rollmesh.runtime.errors import SessionClosedError


def closed_session(tx: Transaction, request_id: str) -> str:
    """Returns the closed session that a request id opened; empty if there is none."""
    known = "SELECT session_id FROM closes WHERE journal = ?1 AND request_id = ?2"
    found = (str(session_id) for (session_id,) in tx.db.rows(known, tx.journal_id, request_id))
    return next(found, "")


def check_not_closed(tx: Transaction, request_id: str) -> None:
    """Checks that a request id opened no session that is closed.

    Raises:
        SessionClosedError: It did.
    """
    if session_id := closed_session(tx, request_id):
        raise SessionClosedError(
            f"request_id: {request_id!r} belongs to session {session_id}, which is closed; "
            "give a new one to open another session",
            session_id=session_id,
        )
