"""Runs of sampled tokens: cut, joined, and shown as a request wants them."""

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.gateway import write_tokens
from rollmesh.mesh import Sampled, Tops, joined
from rollmesh.runtime.codec import pack_ids, pack_logprobs
from rollmesh.v1 import gateway_pb2


def run(*ids: int, tops: int = 2) -> Sampled:
    """Tokens whose values and alternatives are told apart by their ids."""
    own = np.array(ids, np.uint32)
    others = own[:, None] + np.arange(tops, dtype=np.uint32)
    return Sampled(own, -own.astype(np.float32), Tops(others, -others.astype(np.float32)))


def assert_equal(one: Sampled, other: Sampled) -> None:
    for ours, theirs in (
        (one.token_ids, other.token_ids),
        (one.logprobs, other.logprobs),
        *zip(one.tops or (), other.tops or (), strict=True),
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("end", [0, 2, 3, 9])
def test_runs_are_cut_and_joined_with_the_data_of_their_tokens(end: int) -> None:
    ids = (11, 21, 31)
    assert_equal(run(*ids).until(end), run(*ids[:end]))
    assert_equal(joined([run(*ids[:end]), run(*ids[end:])]), run(*ids))
    assert len(run(*ids).until(end).token_ids) == len(ids[:end])


def test_tokens_without_alternatives_are_cut_and_joined_without_any(tokenizer: Tokenizer) -> None:
    plain = Sampled(run(11, 21).token_ids, run(11, 21).logprobs)
    assert plain.until(1).tops is None
    both = joined([plain.until(1), plain])
    assert (both.token_ids.tolist(), both.tops) == ([11, 11, 21], None)
    asked = gateway_pb2.ReturnOptions(logprobs=True)
    assert write_tokens(plain, asked, tokenizer).top_ids_u32le == b""


def test_texts_are_written_for_requests_of_log_probabilities(tokenizer: Tokenizer) -> None:
    sampled = run(5, 7)
    plain = write_tokens(sampled, gateway_pb2.ReturnOptions(token_ids=True), tokenizer)
    assert plain == gateway_pb2.SampledTokens(token_ids_u32le=pack_ids(sampled.token_ids))
    told = write_tokens(sampled, gateway_pb2.ReturnOptions(logprobs=True), tokenizer)
    assert list(told.texts) == [*map(tokenizer.token_bytes, (5, 7))]
    assert list(told.top_texts) == [*map(tokenizer.token_bytes, (5, 6, 7, 8))]
    assert told.logprobs_f32le == pack_logprobs(sampled.logprobs)
    assert sampled.tops is not None
    assert told.top_ids_u32le == pack_ids(sampled.tops.ids)
