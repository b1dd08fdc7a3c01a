"""Sessions in two parts: the head, which rewards change and filters read, and the arrays.

The arrays of a long session are megabytes and never change; they are read for a delivery alone.
"""

import logging
from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import types_pb2

Row: TypeAlias = types_pb2.Trajectory | types_pb2.TrajectoryTree
"""What a filter judges: a trajectory, or a session's whole tree."""
Run: TypeAlias = types_pb2.TrajectorySegment | types_pb2.TrajectoryNode
_log = logging.getLogger(__name__)
_BYTES_PER_TOKEN = {"token_ids_u32le": 4, "logprobs_f32le": 4, "loss_mask_u8": 1}
"""The arrays of a row, in the order in which they are stored."""


def rows_of(record: types_pb2.SessionRecord) -> Sequence[Row]:
    """Returns a session's trajectories, or its tree as the only row."""
    return [record.tree] if record.HasField("tree") else record.trajectories


def runs_of(row: Row) -> Sequence[Run]:
    """Returns the runs of tokens that a row consists of, in order."""
    return row.nodes if isinstance(row, types_pb2.TrajectoryTree) else row.segments


def split(record: types_pb2.SessionRecord) -> tuple[bytes, list[bytes]]:
    """Takes the arrays out of a record.

    Returns:
        The serialised head, and the arrays of every row one after the other: their lengths follow
        from the runs that stay in the head.
    """
    arrays: list[bytes] = []
    for row in rows_of(record):
        for name in _BYTES_PER_TOKEN:
            arrays.append(getattr(row, name))
            row.ClearField(name)  # type: ignore[arg-type]  # both kinds of row have them
    return record.SerializeToString(), arrays


def read_head(session_id: str, data: bytes) -> types_pb2.SessionRecord:
    """Returns the head that `split` left of a session.

    Raises:
        SessionDamagedError: It is none of this session.
    """
    try:
        head = types_pb2.SessionRecord.FromString(data)
    except DecodeError as error:
        raise damaged(session_id, f"its head is no message: {error}") from error
    if head.session_id != session_id:
        raise damaged(session_id, f"its head is that of {head.session_id!r}")
    return head


def join(head: types_pb2.SessionRecord, arrays: bytes) -> types_pb2.SessionRecord:
    """Puts the arrays of `split` back into the head, which is changed and returned.

    Raises:
        SessionDamagedError: They are not those of the head.
    """
    rows = rows_of(head)
    tokens = sum(map(tokens_of, rows))
    if len(arrays) != tokens * sum(_BYTES_PER_TOKEN.values()):
        problem = f"its arrays have {len(arrays)} bytes, which do not fit {tokens} tokens"
        raise damaged(head.session_id, problem)
    start = 0
    for row in rows:
        for name, width in _BYTES_PER_TOKEN.items():
            end = start + width * tokens_of(row)
            setattr(row, name, arrays[start:end])
            start = end
    return head


def damaged(session_id: str, problem: str) -> SessionDamagedError:
    """Returns the error of a session that cannot be read, which is in the log by then."""
    _log.error("session damaged", extra=fields(session_id=session_id, problem=problem))
    return SessionDamagedError(
        f"session_id: what is stored of {session_id!r} is damaged: {problem}; restore the store "
        "from a copy",
        session_id=session_id,
    )


def keep(record: types_pb2.SessionRecord, places: Sequence[int]) -> types_pb2.SessionRecord:
    """Takes all other rows out of a session; returns it."""
    if record.HasField("tree"):
        if not places:
            record.ClearField("tree")
        return record
    for at in reversed(range(len(record.trajectories))):
        if at not in places:
            del record.trajectories[at]
    return record


def tokens_of(row: Row) -> int:
    """Returns the length of a row, with its arrays or without."""
    runs = runs_of(row)
    return runs[-1].end if runs else 0


def turns_of(row: Row) -> int:
    """Returns the number of sampled turns of a row."""
    if isinstance(row, types_pb2.Trajectory):
        return row.turns
    return sum(node.sampled for node in row.nodes)
