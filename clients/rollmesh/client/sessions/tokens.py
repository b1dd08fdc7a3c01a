"""The token arrays of trajectories and trees."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.runtime.codec.arrays import Logprobs, Mask, TokenIds
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.codec.token_arrays import unpack_tokens
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2

_ID_BYTES = 4


class TokenColumns(NamedTuple):
    """One value per token, in arrays of equal length N."""

    token_ids: TokenIds
    """uint32 [N]."""
    logprobs: Logprobs
    """float32 [N]."""
    loss_mask: Mask
    """bool [N]."""
    policy_versions: NDArray[np.int64]
    """int64 [N]; -1 for tokens that were not sampled."""


def read_tokens(proto: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree) -> TokenColumns:
    """Reads the tokens of a trajectory or a tree, without a copy.

    Raises:
        InvalidFieldError: The arrays differ in length.
    """
    token_ids, logprobs, mask = unpack_tokens(proto.tokens, "tokens")
    versions = np.full(len(token_ids), -1, np.int64)
    for span in proto.version_spans:
        versions[span.start : span.end] = span.policy_version
    return TokenColumns(token_ids, logprobs, mask, versions)


def reason_names(reasons: Iterable[trajectory_pb2.FidelityReason.ValueType]) -> tuple[str, ...]:
    """Returns the names of reasons; `UNKNOWN_99` for a value that only a newer mesh knows."""
    return tuple(name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, reason) for reason in reasons)


def read_images(
    proto: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree,
) -> tuple[trajectory_pb2.TrajectoryImage, ...]:
    """Returns the images of a trajectory or a tree, and the tokens that stand for them.

    Raises:
        InvalidFieldError: They overlap, or are not within the tokens.
    """
    end = 0
    for image in proto.images:
        if image.start < end or not image.tokens:
            raise InvalidFieldError("images", "overlap; the collector's answer is damaged")
        end = image.start + image.tokens
    if end * _ID_BYTES > len(proto.tokens.token_ids_u32le):
        raise InvalidFieldError("images", "are not within the tokens; the answer is damaged")
    return tuple(proto.images)
