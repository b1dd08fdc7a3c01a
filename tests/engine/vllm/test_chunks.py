"""Log-probabilities of outputs that vLLM merged before the first was read."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.engine.backend import GenerateInput, Sampling
from rollmesh.engine.vllm.chunks import chunks, joined as joined_chunks
from rollmesh.engine.vllm.versions import VersionStart

pytestmark = pytest.mark.vllm
MOST_LIKELY = [7, 8, 9]
LOGPROBS = [-0.5, -1.0, -2.0]
OTHER = 5


def output(sampled: int) -> Any:
    """The log-probabilities of one token, as vLLM makes them for `logprobs=3`."""
    from vllm.logprobs import FlatLogprobs

    at = MOST_LIKELY.index(sampled) if sampled in MOST_LIKELY else None
    own, rank = (-4.0, 40) if at is None else (LOGPROBS[at], at + 1)
    made = FlatLogprobs()
    ids, logprobs = [sampled, *MOST_LIKELY], [own, *LOGPROBS]
    made.append_fast(ids, logprobs, chain((rank,), range(1, 4)), [None] * 4)
    return made


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_joined_outputs_have_the_sampled_token_and_the_most_likely_ones(chunk: int) -> None:
    sampled = [7, 9, OTHER, 8, 9]
    joined = output(sampled[0])
    for token in sampled[1:]:
        joined.extend(output(token))
    request = GenerateInput(
        "r", np.ones(1, np.uint32), Sampling(max_tokens=5), chunk, top_logprobs=3
    )
    completion = SimpleNamespace(token_ids=sampled, logprobs=joined)
    found = list(chunks(completion, request, 10, [VersionStart(3, 0), VersionStart(4, 13)]))
    assert np.concatenate([one.token_ids for one in found]).tolist() == sampled
    logprobs = np.concatenate([one.logprobs for one in found])
    assert logprobs.tolist() == [-0.5, -2.0, -4.0, -1.0, -2.0]
    versions = [one.policy_version for one in found for _ in one.token_ids]
    assert versions == [3, 3, 3, 4, 4]
    assert all(len(one.token_ids) <= (chunk or 5) for one in found)
    whole = joined_chunks(found, 2)
    assert [len(one.token_ids) for one in whole] == ([3, 2] if chunk == 0 else [2, 1, 2])
    assert np.concatenate([one.logprobs for one in whole]).tolist() == logprobs.tolist()
    for one in [*found, *whole]:
        assert one.top_ids.tolist() == [MOST_LIKELY] * len(one.token_ids)
        assert one.top_logprobs.tolist() == [LOGPROBS] * len(one.token_ids)
