"""The rewards of this mesh: an example to replace. docs/operations.md says what it is given."""

from rollmesh.v1.session_pb2 import SessionRecord, SessionRewards


def score(session: SessionRecord) -> SessionRewards:
    """Rewards a session whose metadata say that it passed."""
    return SessionRewards(reward=1.0 if session.metadata["passed"] == "yes" else 0.0)
