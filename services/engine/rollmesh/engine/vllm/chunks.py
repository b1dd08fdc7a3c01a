"""Splits vLLM's outputs into chunks with the log-probabilities of each token."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollmesh.engine.backend import Chunk, GenerateInput
from rollmesh.engine.vllm.versions import VersionStart


def chunks(
    completion: Any, request: GenerateInput, first: int, starts: Sequence[VersionStart]
) -> Iterator[Chunk]:
    """Yields the tokens of a completion in chunks of one version and at most the requested size.

    Args:
        completion: vLLM's `CompletionOutput` with flat log-probabilities.
        request: The request that it belongs to.
        first: Index of its first token in the generation.
        starts: Where each version begins in the generation, ascending.
    """
    ids = np.asarray(completion.token_ids, np.uint32)
    if not len(ids):
        return
    row = 1 + request.top_logprobs
    flat_ids, flat_logprobs = _rows(completion.logprobs, len(ids), row)
    ranked = np.asarray(flat_ids, np.uint32).reshape(len(ids), row)
    logprobs = np.asarray(flat_logprobs, np.float32).reshape(len(ids), row)
    size = request.max_chunk_tokens or len(ids)
    ends = [min(one.start - first, len(ids)) for one in starts[1:]]
    for version, end in zip(starts, [*ends, len(ids)], strict=True):
        for at in range(max(version.start - first, 0), end, size):
            part = slice(at, min(at + size, end))
            yield Chunk(
                ids[part],
                logprobs[part, 0],
                ranked[part, 1:],
                logprobs[part, 1:],
                version.policy_version,
            )


def joined(parts: Sequence[Chunk], size: int) -> list[Chunk]:
    """Joins neighbours of one version as long as they have at most `size` tokens together."""
    whole: list[Chunk] = []
    for part in parts:
        last = whole[-1] if whole else None
        if (
            last is None
            or last.policy_version != part.policy_version
            or len(last.token_ids) + len(part.token_ids) > size
        ):
            whole.append(part)
            continue
        whole[-1] = Chunk(
            np.concatenate([last.token_ids, part.token_ids]),
            np.concatenate([last.logprobs, part.logprobs]),
            np.concatenate([last.top_ids, part.top_ids]),
            np.concatenate([last.top_logprobs, part.top_logprobs]),
            part.policy_version,
        )
    return whole


def _rows(flat: Any, count: int, row: int) -> tuple[list[int], list[float]]:
    """Returns ids and log-probabilities, one row per token.

    A row holds the sampled token, then the most likely tokens, which may include it. When vLLM
    merges outputs that have not been read yet, it keeps each id of a row once, so the sampled
    token appears only at the front. Its second entry is restored at the rank of the token.
    """
    if len(flat.token_ids) == count * row:
        return flat.token_ids, flat.logprobs
    ids: list[int] = []
    logprobs: list[float] = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        row_ids, row_logprobs = flat.token_ids[start:end], flat.logprobs[start:end]
        if end - start < row:
            rank = flat.ranks[start]
            row_ids.insert(rank, row_ids[0])
            row_logprobs.insert(rank, row_logprobs[0])
        ids += row_ids
        logprobs += row_logprobs
    return ids, logprobs
