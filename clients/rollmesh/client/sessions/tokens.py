"""The token arrays of trajectories and trees."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.runtime.codec.arrays import (
    Logprobs,
    Mask,
    TokenIds,
    unpack_ids,
    unpack_logprobs,
    unpack_mask,
)
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2


class TokenArrays(NamedTuple):
    """Arrays of equal length N."""

    token_ids: TokenIds
    """uint32 [N]."""
    logprobs: Logprobs
    """float32 [N]."""
    loss_mask: Mask
    """bool [N]."""
    policy_versions: NDArray[np.int64]
    """int64 [N]; -1 for tokens that were not sampled."""


def unpack_tokens(proto: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree) -> TokenArrays:
    """Reads the arrays of a trajectory or a tree.

    Raises:
        InvalidFieldError: They differ in length.
    """
    token_ids = unpack_ids(proto.token_ids_u32le, "token_ids_u32le")
    logprobs = unpack_logprobs(proto.logprobs_f32le, "logprobs_f32le")
    mask = unpack_mask(proto.loss_mask_u8, "loss_mask_u8")
    if not len(token_ids) == len(logprobs) == len(mask):
        raise InvalidFieldError(
            type(proto).__name__, "has arrays of different lengths; send one entry per token"
        )
    versions = np.full(len(token_ids), -1, np.int64)
    for span in proto.version_spans:
        versions[span.start : span.end] = span.policy_version
    return TokenArrays(token_ids, logprobs, mask, versions)


def reason_names(reasons: Iterable[trajectory_pb2.FidelityReason.ValueType]) -> tuple[str, ...]:
    """Returns the names of reasons; `UNKNOWN_99` for a value that only a newer mesh knows."""
    return tuple(name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, reason) for reason in reasons)
