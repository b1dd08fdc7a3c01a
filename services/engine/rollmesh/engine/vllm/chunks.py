"""Chunks of what vLLM sampled, with the log-probabilities it gives for each token."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollmesh.engine.backend import Chunk, GenerateInput


def chunks(completion: Any, request: GenerateInput) -> Iterator[Chunk]:
    """Yields the tokens of a completion in chunks of at most the requested size.

    Args:
        completion: A `CompletionOutput` of vLLM with flat log-probabilities.
        request: The request that it answers.
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
    """Returns ids and log-probabilities, a row for each token.

    A row is the sampled token and then the most likely tokens, of which it may be one. When vLLM
    joins outputs that have not been read yet, it keeps each id of a row once, at the front for the
    sampled token. The second entry is put back at the rank of the token.
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
