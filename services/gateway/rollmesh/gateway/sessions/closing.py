"""A close and its repeats: what tells them apart, and their errors."""

from rollmesh.runtime.errors import RepeatConflictError, SessionClosedError
from rollmesh.runtime.rpc.repeats import digest_of
from rollmesh.v1 import gateway_pb2


def digest_of_close(request: gateway_pb2.CloseSessionRequest) -> bytes:
    """Returns the digest that identifies a repeat of a close; it excludes the session key."""
    body = gateway_pb2.CloseSessionRequest()
    body.CopyFrom(request)
    body.ClearField("session_key")
    return digest_of(body)


def check_repeat(session_id: str, first: bytes, digest: bytes) -> None:
    """Checks that a repeated close is the first one.

    Raises:
        RepeatConflictError: It has another outcome, other rewards or metadata.
    """
    if first != digest:
        raise RepeatConflictError(
            f"session {session_id} was already closed with another outcome, rewards or metadata, "
            "which were kept; change its rewards with SetRewards at the collector",
            session_id=session_id,
        )


def closed_error(session_id: str) -> SessionClosedError:
    """Returns the error of a session that is closed."""
    return SessionClosedError(
        f"session {session_id} is closed; open another", session_id=session_id
    )
