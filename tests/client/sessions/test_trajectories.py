"""What a trainer holds of a trajectory."""

import gc
import pickle

from rollmesh.client import Trajectory
from rollmesh.v1 import trajectory_pb2

SEGMENTS = 300


def proto() -> trajectory_pb2.Trajectory:
    return trajectory_pb2.Trajectory(
        trajectory_id="t",
        lineage=trajectory_pb2.LINEAGE_MAIN,
        tokens=trajectory_pb2.TokenArrays(
            token_ids_u32le=bytes(4 * SEGMENTS),
            logprobs_f32le=bytes(4 * SEGMENTS),
            loss_mask_u8=bytes(SEGMENTS),
        ),
        segments=[
            trajectory_pb2.TrajectorySegment(start=at, end=at + 1, node_id=at)
            for at in range(SEGMENTS)
        ],
    )


def test_the_segments_of_a_trajectory_are_no_objects_that_garbage_collection_looks_at() -> None:
    sent = proto()
    grown: list[int] = []
    read = Trajectory.from_proto(sent)
    for _ in range(5):  # other threads of the test process make objects too, now and then
        gc.collect()
        before = len(gc.get_objects())
        read = Trajectory.from_proto(sent)
        grown.append(len(gc.get_objects()) - before)
    assert min(grown) < SEGMENTS / 10
    assert read.segments == tuple(sent.segments)


def test_a_trajectory_crosses_to_another_process_with_its_segments() -> None:
    read = Trajectory.from_proto(proto())
    copy = pickle.loads(pickle.dumps(read))  # noqa: S301 - its own
    assert copy.segments == tuple(proto().segments)
    assert copy.token_ids.tolist() == read.token_ids.tolist()
