"""Sessions in two parts: the head, which rewards change and filters read, and the arrays.

The arrays of a long session take megabytes and never change; only a delivery reads them.
"""

import logging
from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import session_pb2, trajectory_pb2

Row: TypeAlias = trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree
"""The unit of filtering: a trajectory, or the complete tree of a session."""
Run: TypeAlias = trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode
_log = logging.getLogger(__name__)
_BYTES_PER_TOKEN = {"token_ids_u32le": 4, "logprobs_f32le": 4, "loss_mask_u8": 1}
"""The arrays of `TokenArrays`, in storage order."""


def rows_of(record: session_pb2.SessionRecord) -> Sequence[Row]:
    """Returns a session's trajectories, or its tree as the only row."""
    return [record.tree] if record.HasField("tree") else record.trajectories


def runs_of(row: Row) -> Sequence[Run]:
    """Returns the token runs of a row, in order."""
    return row.nodes if isinstance(row, trajectory_pb2.TrajectoryTree) else row.segments


def split(record: session_pb2.SessionRecord) -> tuple[bytes, list[bytes]]:
    """Removes the arrays and the bytes of images from a record.

    Returns:
        The serialized head; and the arrays of all rows, then the images. Their lengths follow from
        the runs and the sizes, which stay in the head.
    """
    arrays: list[bytes] = []
    for row in rows_of(record):
        tokens = row.tokens
        arrays += [getattr(tokens, name) for name in _BYTES_PER_TOKEN]
        row.ClearField("tokens")
    for image in record.images:
        arrays.append(image.data)
        image.ClearField("data")
    return record.SerializeToString(), arrays


def read_head(session_id: str, data: bytes) -> session_pb2.SessionRecord:
    """Parses the head of a session, as returned by `split`.

    Raises:
        SessionDamagedError: The data is not a head of this session.
    """
    try:
        head = session_pb2.SessionRecord.FromString(data)
    except DecodeError as error:
        raise damaged(session_id, f"its head is not a valid message: {error}") from error
    if head.session_id != session_id:
        raise damaged(session_id, f"its head is that of {head.session_id!r}")
    return head


def join(head: session_pb2.SessionRecord, arrays: bytes) -> session_pb2.SessionRecord:
    """Restores the arrays from `split` into the head, which is modified in place and returned.

    Raises:
        SessionDamagedError: The arrays do not match the head.
    """
    rows = rows_of(head)
    if len(arrays) != arrays_size(head):
        tokens = sum(map(tokens_of, rows))
        problem = f"its arrays have {len(arrays)} bytes, which do not fit {tokens} tokens"
        if head.images:
            problem += f" and {len(head.images)} images"
        raise damaged(head.session_id, problem)
    start = 0
    for row in rows:
        count, restored = tokens_of(row), row.tokens
        for name, width in _BYTES_PER_TOKEN.items():
            end = start + width * count
            setattr(restored, name, arrays[start:end])
            start = end
    for image in head.images:
        end = start + image.data_bytes
        image.data = arrays[start:end]
        start = end
    return head


def arrays_size(head: session_pb2.SessionRecord) -> int:
    """Returns the size of the arrays and the images that belong to a head, bytes."""
    images = sum(image.data_bytes for image in head.images)
    return images + sum(map(tokens_of, rows_of(head))) * sum(_BYTES_PER_TOKEN.values())


def damaged(session_id: str, problem: str) -> SessionDamagedError:
    """Logs that a session cannot be read; returns the error for it."""
    _log.error("session damaged", extra=fields(session_id=session_id, problem=problem))
    return SessionDamagedError(
        f"session_id: the stored data of {session_id!r} is damaged: {problem}; restore the store "
        "from a copy",
        session_id=session_id,
    )


def keep(record: session_pb2.SessionRecord, indices: Sequence[int]) -> session_pb2.SessionRecord:
    """Keeps only the rows at these indices, and the images that they show.

    Modifies the session in place and returns it.
    """
    if record.HasField("tree"):
        if not indices:
            record.ClearField("tree")
    else:
        for at in reversed(range(len(record.trajectories))):
            if at not in indices:
                del record.trajectories[at]
    shown = {image.sha256 for row in rows_of(record) for image in row.images}
    for at in reversed(range(len(record.images))):
        if record.images[at].sha256 not in shown:
            del record.images[at]
    return record


def tokens_of(row: Row) -> int:
    """Returns the number of tokens in a row, with or without its arrays."""
    runs = runs_of(row)
    return runs[-1].end if runs else 0


def turns_of(row: Row) -> int:
    """Returns the number of sampled turns of a row."""
    if isinstance(row, trajectory_pb2.Trajectory):
        return row.turns
    return sum(node.sampled for node in row.nodes)
