"""Arrays of one value per token: packed little-endian bytes, checked on receipt."""

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.runtime.errors import InvalidFieldError

if TYPE_CHECKING:
    from rollmesh.v1 import trajectory_pb2

TokenIds: TypeAlias = NDArray[np.uint32]
"""Token ids, dtype uint32, shape [N]."""
Logprobs: TypeAlias = NDArray[np.float32]
"""Log-probabilities in nats, dtype float32, shape [N]."""
Mask: TypeAlias = NDArray[np.bool_]
"""One flag per token, dtype bool, shape [N]."""

MOST_LOGPROB = 1e-4
"""Rounding error may lift a log-probability this far above 0."""
_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")
_U8 = np.dtype("u1")


def pack_ids(ids: TokenIds) -> bytes:
    """Packs ids [N] into 4 N bytes."""
    return np.ascontiguousarray(ids, dtype=_U32).tobytes()


def pack_logprobs(logprobs: Logprobs) -> bytes:
    """Packs log-probabilities [N] into 4 N bytes."""
    return np.ascontiguousarray(logprobs, dtype=_F32).tobytes()


def unpack_ids(data: bytes, field: str) -> TokenIds:
    """Reads ids [N] from 4 N bytes, without a copy and read-only.

    Raises:
        InvalidFieldError: The length is not a multiple of 4. Names `field`.
    """
    if len(data) % 4:
        raise _not_whole(data, field)
    return np.frombuffer(data, dtype=_U32)


def unpack_logprobs(data: bytes, field: str) -> Logprobs:
    """Reads log-probabilities [N] from 4 N bytes, without a copy and read-only.

    Raises:
        InvalidFieldError: The length is not a multiple of 4. Names `field`.
    """
    if len(data) % 4:
        raise _not_whole(data, field)
    return np.frombuffer(data, dtype=_F32)


def unpack_mask(data: bytes, field: str) -> Mask:
    """Reads flags [N] from N bytes, without a copy and read-only.

    Raises:
        InvalidFieldError: A byte is neither 0 nor 1. Names `field`.
    """
    flags = np.frombuffer(data, dtype=_U8)
    if flags.size and int(flags.max()) > 1:
        raise InvalidFieldError(field, "has a byte other than 0 and 1; send one byte per token")
    return flags.view(np.bool_)


def unpack_tokens(
    tokens: "trajectory_pb2.TokenArrays", field: str
) -> tuple[TokenIds, Logprobs, Mask]:
    """Reads the ids, the log-probabilities and the loss mask [N] of the same tokens, read-only.

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
    ids, logprobs = tokens.token_ids_u32le, tokens.logprobs_f32le
    return np.frombuffer(ids, dtype=_U32), np.frombuffer(logprobs, dtype=_F32), loss_mask


def _not_whole(data: bytes, field: str) -> InvalidFieldError:
    text = f"has {len(data)} bytes, not a multiple of 4; send 4 little-endian bytes each"
    return InvalidFieldError(field, text)
