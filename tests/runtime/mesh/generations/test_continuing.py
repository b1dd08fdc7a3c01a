"""When a generation that was cut may be continued, and with which request."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.mesh import Generation, Sampled, ended, why_not_continued
from rollmesh.runtime.codec import pack_ids, unpack_ids
from rollmesh.v1 import engine_pb2, sampling_pb2

STOP = 7


def request(**sampling: Any) -> engine_pb2.GenerateRequest:
    params = sampling_pb2.SamplingParams(max_tokens=10, stop_token_ids=[STOP], **sampling)
    return engine_pb2.GenerateRequest(token_ids_u32le=packed(1, 2, 3), sampling=params)


def packed(*ids: int) -> bytes:
    return pack_ids(np.array(ids, np.uint32))


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        pytest.param({}, "", id="plain"),
        pytest.param({"temperature": 0.0}, "", id="greedy"),
        pytest.param({"repetition_penalty": 1.3}, "", id="counts prompts too"),
        pytest.param({"logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6]}, "", id="masks"),
        pytest.param({"min_tokens": 4}, "", id="min_tokens"),
        pytest.param(
            {"bad_sequences": [sampling_pb2.TokenSequence(token_ids=[5])]}, "", id="a bad token"
        ),
        pytest.param(
            {"bad_sequences": [sampling_pb2.TokenSequence(token_ids=[5, 6])]},
            "a bad sequence",
            id="a bad sequence",
        ),
        pytest.param({"seed": 0}, "a seed", id="seed 0"),
        pytest.param({"presence_penalty": 0.5}, "penalty", id="presence"),
        pytest.param({"frequency_penalty": -0.5}, "penalty", id="frequency"),
    ],
)
def test_what_depends_on_more_than_the_ids_begins_anew(sampling: dict[str, Any], why: str) -> None:
    found = why_not_continued(request(**sampling))
    assert why in found
    assert bool(why) == bool(found)


def test_a_constraint_begins_anew() -> None:
    constrained = request()
    constrained.constraint.structural_tag_json = "{}"
    assert why_not_continued(constrained) == "a constraint"


@given(
    sampled=st.lists(st.integers(8, 99), max_size=9),
    min_tokens=st.integers(0, 10),
)
def test_the_rest_asks_for_the_remaining_tokens(sampled: list[int], min_tokens: int) -> None:
    first = request(min_tokens=min_tokens, temperature=0.5)
    run = Sampled(ids_of(*sampled), np.zeros(len(sampled), np.float32))
    rest = Generation(first, runs=[run], taken=len(sampled)).begin("e", "again")
    assert unpack_ids(rest.token_ids_u32le, "ids").tolist() == [1, 2, 3, *sampled]
    assert rest.sampled_tokens == len(sampled)
    assert rest.sampling.max_tokens == 10 - len(sampled)
    assert rest.sampling.min_tokens == max(min_tokens - len(sampled), 0)
    assert rest.sampling.min_tokens <= rest.sampling.max_tokens
    assert (rest.request_id, rest.sampling.temperature) == ("again", 0.5)
    assert first == request(min_tokens=min_tokens, temperature=0.5)


@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        ([], None),
        ([1, 2], None),
        ([STOP, 2], None),
        ([1, STOP], sampling_pb2.FINISH_REASON_STOP),
        ([1] * 10, sampling_pb2.FINISH_REASON_LENGTH),
        ([1] * 9 + [STOP], sampling_pb2.FINISH_REASON_STOP),
    ],
)
def test_an_answer_that_was_complete_needs_no_engine(sampled: list[int], reason: Any) -> None:
    assert ended(request(), ids_of(*sampled)) == reason
