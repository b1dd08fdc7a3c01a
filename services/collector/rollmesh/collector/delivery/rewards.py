"""Detects repeated requests that set rewards."""

import hashlib

from rollmesh.runtime.errors import RepeatConflictError
from rollmesh.v1 import session_pb2


def rewards_digest(rewards: session_pb2.SessionRewards) -> bytes:
    """Returns a digest that tells a repeat from a request with different rewards."""
    data = rewards.SerializeToString(deterministic=True)
    return hashlib.blake2b(data, digest_size=16).digest()


def check_repeat(request_id: str, first: bytes, digest: bytes) -> None:
    """Checks that a repeated request carries the same rewards as the first.

    Raises:
        RepeatConflictError: The rewards differ.
    """
    if first != digest:
        raise RepeatConflictError(
            f"request_id: {request_id!r} was already used with other rewards, which were kept; "
            "use another id"
        )
