"""Splits vLLM's outputs into chunks with the log-probabilities of each token."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollmesh.engine.backend import Chunk, GenerateInput


def chunks(completion: Any, request: GenerateInput) -> Iterator[Chunk]:
    """Yields the tokens of a completion in chunks of at most the requested size.

    Args:
        completion: vLLM's `CompletionOutput` with flat log-probabilities.
        request: The request that it belongs to.
    """
    ids = np.asarray(completion.token_ids, np.uint32)
    if not len(ids):
        return
    row = 1 + request.top_logprobs
    flat_ids, flat_logprobs = _rows(completion.logprobs, len(ids), row)
    ranked = np.asarray(flat_ids, np.uint32).reshape(len(ids), row)
    logprobs = np.asarray(flat_logprobs, np.float32).reshape(len(ids), row)
    size = request.max_chunk_tokens or len(ids)
    for at in range(0, len(ids), size):
        part = slice(at, at + size)
        yield Chunk(ids[part], logprobs[part, 0], ranked[part, 1:], logprobs[part, 1:])


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
