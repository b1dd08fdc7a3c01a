"""The contract's `TokenArrays`: ids, log-probabilities and loss mask of the same tokens."""

from rollmesh.runtime.codec.arrays import (
    Logprobs,
    Mask,
    TokenIds,
    unpack_ids,
    unpack_logprobs,
    unpack_mask,
)
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2


def unpack_tokens(
    tokens: trajectory_pb2.TokenArrays, field: str
) -> tuple[TokenIds, Logprobs, Mask]:
    """Reads the three arrays [N], without a copy and read-only.

    Raises:
        InvalidFieldError: They differ in length, or the mask has a byte other than 0 and 1. Names
            `field`.
    """
    loss_mask = unpack_mask(tokens.loss_mask_u8, f"{field}.loss_mask_u8")
    count = len(loss_mask)
    for name in ("token_ids_u32le", "logprobs_f32le"):
        size = len(getattr(tokens, name))
        if size != 4 * count:
            raise InvalidFieldError(
                f"{field}.{name}", f"has {size} bytes; {count} tokens by the mask need {4 * count}"
            )
    return (
        unpack_ids(tokens.token_ids_u32le, f"{field}.token_ids_u32le"),
        unpack_logprobs(tokens.logprobs_f32le, f"{field}.logprobs_f32le"),
        loss_mask,
    )
