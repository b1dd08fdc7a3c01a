"""Sessions in two parts: the head, which rewards change and filters read, and the arrays.

The arrays of a long session are megabytes and never change; they are read for a delivery alone.
"""

from collections.abc import Sequence

from rollmesh.v1 import types_pb2

ARRAYS = ("token_ids_u32le", "logprobs_f32le", "loss_mask_u8")


def split(record: types_pb2.SessionRecord) -> tuple[bytes, bytes]:
    """Returns the record without its arrays, and a record of nothing but those; serialised."""
    head, arrays = types_pb2.SessionRecord(), types_pb2.SessionRecord()
    head.CopyFrom(record)
    for trajectory in head.trajectories:
        kept = arrays.trajectories.add()
        for name in ARRAYS:
            setattr(kept, name, getattr(trajectory, name))
            setattr(trajectory, name, b"")
    return head.SerializeToString(), arrays.SerializeToString()


def join(head: types_pb2.SessionRecord, arrays: bytes) -> types_pb2.SessionRecord:
    """Puts the arrays of `split` back into the head, which is changed and returned."""
    kept = types_pb2.SessionRecord.FromString(arrays)
    for trajectory, source in zip(head.trajectories, kept.trajectories, strict=True):
        trajectory.MergeFrom(source)
    return head


def keep(record: types_pb2.SessionRecord, places: Sequence[int]) -> types_pb2.SessionRecord:
    """Takes all other trajectories out of a session; returns it."""
    for at in reversed(range(len(record.trajectories))):
        if at not in places:
            del record.trajectories[at]
    return record


def tokens_of(trajectory: types_pb2.Trajectory) -> int:
    """Returns the length of a trajectory, with its arrays or without."""
    return trajectory.segments[-1].end if trajectory.segments else 0
