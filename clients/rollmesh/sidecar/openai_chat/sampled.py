"""Sampled tokens in the answers: OpenAI's `logprobs`, and vLLM's `token_ids`."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.v1 import gateway_pb2

_LEAST = -9999.0  # JSON has no infinity; vLLM writes this number


@dataclass(frozen=True, slots=True)
class Shown:
    """Which token fields an answer contains."""

    token_ids: bool = False
    logprobs: bool = False
    as_ids: bool = False
    """Whether tokens are shown as `token_id:ID` instead of their text."""


def token_fields(tokens: gateway_pb2.SampledTokens, shown: Shown) -> dict[str, Any]:
    """Returns the token fields of a choice or a chunk."""
    fields: dict[str, Any] = {"logprobs": logprobs(tokens, shown) if shown.logprobs else None}
    if shown.token_ids:
        fields["token_ids"] = _ids(tokens.token_ids_u32le)
    return fields


def prompt_fields(packed: bytes) -> dict[str, Any]:
    """Returns the field with the prompt's ids; no field if they were not requested."""
    return {"prompt_token_ids": _ids(packed)} if packed else {}


def logprobs(tokens: gateway_pb2.SampledTokens, shown: Shown) -> dict[str, Any]:
    """Returns OpenAI's `logprobs` object; `top_logprobs` are in descending order."""
    rows = _entries(tokens.token_ids_u32le, tokens.logprobs_f32le, tokens.texts, shown)
    tops = _entries(tokens.top_ids_u32le, tokens.top_logprobs_f32le, tokens.top_texts, shown)
    width = len(tops) // len(rows) if rows else 0
    for at, row in enumerate(rows):
        row["top_logprobs"] = tops[at * width : (at + 1) * width]
    return {"content": rows, "refusal": None}


def _entries(
    packed_ids: bytes, packed_logprobs: bytes, texts: Sequence[bytes], shown: Shown
) -> list[dict[str, Any]]:
    ids = _ids(packed_ids)
    values = struct.unpack(f"<{len(packed_logprobs) // 4}f", packed_logprobs)
    return [
        {
            "token": f"token_id:{id_}" if shown.as_ids else text.decode(errors="replace"),
            "bytes": list(text),
            "logprob": max(value, _LEAST),
        }
        for id_, value, text in zip(ids, values, texts, strict=True)
    ]


def _ids(packed: bytes) -> list[int]:
    """Unpacks ids [N] without NumPy, which a sidecar beside an agent does without."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))
