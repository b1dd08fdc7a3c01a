"""Log-probabilities of outputs that vLLM merged before the first was read."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.engine.backend import GenerateInput
from rollmesh.engine.vllm.chunks import VersionStart, messages
from rollmesh.v1 import engine_pb2
from tests.engine.engines import Result

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
def test_merged_outputs_have_the_sampled_token_and_the_most_likely_ones(chunk: int) -> None:
    sampled = [7, 9, OTHER, 8, 9]
    merged = output(sampled[0])
    for token in sampled[1:]:
        merged.extend(output(token))
    asked = engine_pb2.GenerateRequest(top_logprobs=3)
    request = GenerateInput(asked, np.ones(1, np.uint32), chunk)
    completion = SimpleNamespace(token_ids=sampled, logprobs=merged)
    result, versions = Result(), list[int]()
    for one in messages(completion, request, 10, [VersionStart(3, 0), VersionStart(4, 13)]):
        result.take(one)
        versions += [one.policy_version] * (len(one.token_ids_u32le) // 4)
        assert len(one.token_ids_u32le) // 4 <= (chunk or 5)
    assert result.ids == sampled
    assert result.logprobs == [-0.5, -2.0, -4.0, -1.0, -2.0]
    assert versions == [3, 3, 3, 4, 4]
    assert result.top_ids == [MOST_LIKELY] * 5
    assert result.top_logprobs == [LOGPROBS] * 5
