"""Sessions in two parts: the head, which rewards change and filters read, and the arrays.

The arrays of a long session are megabytes and never change; they are read for a delivery alone.
"""

from collections.abc import Sequence
from typing import TypeAlias

from rollmesh.v1 import types_pb2

Row: TypeAlias = types_pb2.Trajectory | types_pb2.TrajectoryTree
"""What a filter judges: a trajectory, or a session's whole tree."""
Run: TypeAlias = types_pb2.TrajectorySegment | types_pb2.TrajectoryNode
ARRAYS = ("token_ids_u32le", "logprobs_f32le", "loss_mask_u8")


def rows_of(record: types_pb2.SessionRecord) -> Sequence[Row]:
    """Returns a session's trajectories, or its tree as the only row."""
    return [record.tree] if record.HasField("tree") else record.trajectories


def runs_of(row: Row) -> Sequence[Run]:
    """Returns the runs of tokens that a row consists of, in order."""
    return row.nodes if isinstance(row, types_pb2.TrajectoryTree) else row.segments


def split(record: types_pb2.SessionRecord) -> tuple[bytes, bytes]:
    """Returns the record without its arrays, and a record of nothing but those; serialised."""
    head, arrays = types_pb2.SessionRecord(), types_pb2.SessionRecord()
    head.CopyFrom(record)
    for row in rows_of(head):
        is_tree = isinstance(row, types_pb2.TrajectoryTree)
        kept = arrays.tree if is_tree else arrays.trajectories.add()
        for name in ARRAYS:
            setattr(kept, name, getattr(row, name))
            setattr(row, name, b"")
    return head.SerializeToString(), arrays.SerializeToString()


def join(head: types_pb2.SessionRecord, arrays: bytes) -> types_pb2.SessionRecord:
    """Puts the arrays of `split` back into the head, which is changed and returned."""
    kept = types_pb2.SessionRecord.FromString(arrays)
    if head.HasField("tree"):
        head.tree.MergeFrom(kept.tree)
    for trajectory, source in zip(head.trajectories, kept.trajectories, strict=True):
        trajectory.MergeFrom(source)
    return head


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
