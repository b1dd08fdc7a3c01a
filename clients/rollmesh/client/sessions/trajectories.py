"""Closed sessions and their trajectories, as NumPy arrays and plain fields."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollmesh.client.sessions.tokens import read_images, read_tokens, reason_names
from rollmesh.client.sessions.trees import TrajectoryTree
from rollmesh.runtime.codec.arrays import Logprobs, Mask, TokenIds
from rollmesh.runtime.codec.enums import name_of
from rollmesh.v1 import collector_pb2, session_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One root-to-leaf token sequence; all arrays have length N."""

    trajectory_id: str
    token_ids: TokenIds
    """uint32 [N]: prompt and sampled ids, exactly as the engine had them."""
    logprobs: Logprobs
    """float32 [N]: under the sampling policy; 0.0 for tokens that were not sampled."""
    loss_mask: Mask
    """bool [N]: true if the token is trained in this trajectory."""
    policy_versions: NDArray[np.int64]
    """int64 [N]: version that sampled the token; -1 for tokens that were not sampled."""
    prompt_tokens: int
    """Number of ids before the first sampled one."""
    turns: int
    """Number of sampled turns along the path."""
    lineage: str
    """Origin of the branch: MAIN, SIBLING, BRANCH, ROOT, ..."""
    reasons: tuple[str, ...]
    """Fidelity reasons; ("EXACT",) if there are none."""
    path: trajectory_pb2.Trajectory = field(repr=False)
    """A message that holds only the segments. A tuple of messages would be hundreds of objects per
    trajectory for the garbage collector to traverse."""
    reward: float | None
    """The trajectory's own reward; None: the session's applies."""
    images: tuple[trajectory_pb2.TrajectoryImage, ...] = ()
    """Its images by ascending start, and the tokens that stand for each; the files are in the
    session's `images`."""

    @property
    def segments(self) -> tuple[trajectory_pb2.TrajectorySegment, ...]:
        """The nodes along the path."""
        return tuple(self.path.segments)

    @classmethod
    def from_proto(cls, proto: trajectory_pb2.Trajectory) -> "Trajectory":
        """Reads a trajectory.

        Raises:
            InvalidFieldError: The arrays differ in length.
        """
        arrays = read_tokens(proto)
        path = trajectory_pb2.Trajectory()
        path.segments.MergeFrom(proto.segments)
        return cls(
            proto.trajectory_id,
            arrays.token_ids,
            arrays.logprobs,
            arrays.loss_mask,
            arrays.policy_versions,
            proto.prompt_tokens,
            proto.turns,
            name_of(trajectory_pb2.Lineage.DESCRIPTOR, proto.lineage),
            reason_names(proto.reasons),
            path,
            proto.reward if proto.HasField("reward") else None,
            read_images(proto),
        )


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A closed session."""

    session_id: str
    group_id: str
    sample_index: int
    outcome: str
    """COMPLETED, FAILED or ABORTED. Values that only a newer mesh knows, also of lineages and
    reasons, become `UNKNOWN_99`."""
    reward: float | None
    turns: int
    metadata: dict[str, str]
    trajectories: tuple[Trajectory, ...]
    tree: TrajectoryTree | None = None
    """Replaces the trajectories if the session was opened with `export="tree"`."""
    superseded: bool = False
    """Whether it failed and was retried: another session has its `sample_index`."""
    model: str = ""
    """Name of the model that answered."""
    images: dict[str, session_pb2.SessionImage] = field(default_factory=dict, repr=False)
    """The images of its trajectories or its tree, by the SHA-256 of their bytes: each once, with
    its media type and the file as the agent sent it."""

    @classmethod
    def from_proto(cls, proto: session_pb2.SessionRecord) -> "SessionResult":
        """Reads a session."""
        return cls(
            proto.session_id,
            proto.group_id,
            proto.sample_index,
            name_of(session_pb2.SessionOutcome.DESCRIPTOR, proto.outcome),
            proto.reward if proto.HasField("reward") else None,
            proto.turns,
            dict(proto.metadata),
            tuple(map(Trajectory.from_proto, proto.trajectories)),
            TrajectoryTree.from_proto(proto.tree) if proto.HasField("tree") else None,
            proto.superseded,
            proto.model,
            {image.sha256: image for image in proto.images},
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """A session or a group; acknowledge it when the trainer has stored it."""

    delivery_id: str
    """The same on every redelivery."""
    attempt: int
    """1 for the first delivery."""
    sessions: tuple[SessionResult, ...]
    """One, or all of the group in order of sample_index."""
    removed: tuple[collector_pb2.RemovedTrajectories, ...] = ()
    """Trajectories that the subscription's filter removed."""
    partial: bool = False
    """Whether the group has fewer samples than its size."""
