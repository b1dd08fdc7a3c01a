"""Packs the arrays of trajectories."""

from rollmesh.runtime.codec import Logprobs, Mask, TokenIds, pack_ids, pack_logprobs
from rollmesh.v1 import trajectory_pb2


def pack_tokens(
    token_ids: TokenIds, logprobs: Logprobs, loss_mask: Mask
) -> trajectory_pb2.TokenArrays:
    """Packs three arrays [N] into a message."""
    return trajectory_pb2.TokenArrays(
        token_ids_u32le=pack_ids(token_ids),
        logprobs_f32le=pack_logprobs(logprobs),
        loss_mask_u8=loss_mask.tobytes(),
    )
