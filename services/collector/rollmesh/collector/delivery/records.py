"""Sessions in two parts: the head, which rewards change and filters read, and the arrays.

The arrays of a long session are megabytes and never change; they are read for a delivery alone.
"""

import logging
from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.runtime.codec.wire import nested, values
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import types_pb2

Row: TypeAlias = types_pb2.Trajectory | types_pb2.TrajectoryTree
"""What a filter judges: a trajectory, or a session's whole tree."""
Run: TypeAlias = types_pb2.TrajectorySegment | types_pb2.TrajectoryNode
_log = logging.getLogger(__name__)
_TREE = types_pb2.SessionRecord.TREE_FIELD_NUMBER
_TRAJECTORIES = types_pb2.SessionRecord.TRAJECTORIES_FIELD_NUMBER
ARRAYS = ("token_ids_u32le", "logprobs_f32le", "loss_mask_u8")


def rows_of(record: types_pb2.SessionRecord) -> Sequence[Row]:
    """Returns a session's trajectories, or its tree as the only row."""
    return [record.tree] if record.HasField("tree") else record.trajectories


def runs_of(row: Row) -> Sequence[Run]:
    """Returns the runs of tokens that a row consists of, in order."""
    return row.nodes if isinstance(row, types_pb2.TrajectoryTree) else row.segments


def split(record: types_pb2.SessionRecord) -> tuple[bytes, list[bytes | memoryview]]:
    """Takes the arrays out of a record.

    Returns:
        What is left, and the pieces of a record of nothing but the arrays; serialised.
    """
    rows = rows_of(record)
    taken = [[(name, getattr(row, name)) for name in ARRAYS] for row in rows]
    for row in rows:
        for name in ARRAYS:
            row.ClearField(name)  # type: ignore[arg-type]  # both kinds of row have them
    head = record.SerializeToString()
    pieces: list[bytes | memoryview] = []
    for row, arrays in zip(rows, taken, strict=True):
        fields = type(row).DESCRIPTOR.fields_by_name
        inner: list[bytes | memoryview] = []
        for name, value in arrays:
            inner += nested(fields[name].number, [value]) if value else ()
        pieces += nested(_TREE if record.HasField("tree") else _TRAJECTORIES, inner)
    return head, pieces


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
    try:
        for row, kept in zip(rows, values(arrays), strict=True):
            row.MergeFromString(kept)  # type: ignore[arg-type]  # the stubs know bytes alone
    except (DecodeError, ValueError, IndexError) as error:
        raise damaged(head.session_id, f"its arrays cannot be read: {error}") from error
    for row in rows:
        tokens = tokens_of(row)
        sizes = (len(row.token_ids_u32le) // 4, len(row.logprobs_f32le) // 4, len(row.loss_mask_u8))
        if sizes != (tokens, tokens, tokens):
            raise damaged(head.session_id, f"its arrays have {sizes} tokens, not {tokens}")
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
