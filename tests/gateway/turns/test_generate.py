"""What an engine says is checked before it becomes anything."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from rollmesh.chat.parsing.answer import Answer
from rollmesh.chat.parsing.decoding import IncrementalDecoder
from rollmesh.chat.tokenizer import Tokenizer
from rollmesh.gateway.turns.generate import Generation, checked_sample
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs
from rollmesh.runtime.errors import EngineFaultError
from rollmesh.v1 import engine_pb2, sampling_pb2

CRC = zlib.crc32(b"prompt")


def generation(tokenizer: Tokenizer) -> Generation:
    answer = Answer(
        IncrementalDecoder(tokenizer, ()), (), parser=None, reasoning=None, new_call_id=str
    )
    begun = Generation(answer, vocabulary_tokens=100, max_tokens=4)
    begun.begin("e", CRC)
    return begun


def spans_of(spans: Iterable[sampling_pb2.VersionSpan]) -> list[tuple[str, int, int, int]]:
    return [(one.engine_id, one.policy_version, one.start, one.end) for one in spans]


def message(
    ids: tuple[int, ...] = (5, 6),
    logprobs: tuple[float, ...] | None = None,
    spans: tuple[tuple[int, int, int], ...] | None = ((0, 0, 2),),
    reason: int = sampling_pb2.FINISH_REASON_STOP,
    crc: int = CRC,
    version: int | None = None,
) -> engine_pb2.StreamGenerateResponse:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    response = engine_pb2.StreamGenerateResponse(
        token_ids_u32le=pack_ids(np.array(ids, np.uint32)),
        logprobs_f32le=pack_logprobs(np.array(values, np.float32)),
        policy_version=version,
    )
    if spans is not None:
        response.finish.reason = sampling_pb2.FinishReason.ValueType(reason)
        response.finish.prompt_crc32 = crc
        for of, start, end in spans:
            response.finish.version_spans.add(policy_version=of, start=start, end=end)
    return response


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param({"ids": (5, 100)}, "id 100", id="outside the vocabulary"),
        pytest.param({"logprobs": (-0.5, float("nan"))}, "NaN", id="NaN"),
        pytest.param({"logprobs": (-0.5, float("-inf"))}, "infinite", id="infinite"),
        pytest.param({"logprobs": (-0.5, 0.1)}, "above 0", id="positive"),
        pytest.param({"logprobs": (-0.5,)}, "1 log-probs for 2", id="too few log-probs"),
        pytest.param({"logprobs": ()}, "0 log-probs for 2", id="no log-probs"),
        pytest.param({"ids": (1, 2, 3, 4, 5)}, "more ids than the 4", id="more than asked for"),
        pytest.param({"spans": ((0, 0, 1), (1, 2, 3))}, "gaps", id="a gap"),
        pytest.param({"spans": ((0, 1, 2),)}, "gaps", id="a late beginning"),
        pytest.param({"spans": ((-1, 0, 2),)}, "negative", id="a negative version"),
        pytest.param({"spans": ((0, 0, 1),)}, "do not cover", id="too short"),
        pytest.param({"spans": ()}, "do not cover", id="no spans"),
        pytest.param({"reason": 0}, "unknown finish reason", id="no reason"),
        pytest.param({"crc": 1}, "other prompt ids", id="another prompt"),
        pytest.param({"version": -1}, "negative", id="a negative version in a message"),
    ],
)
def test_what_cannot_be_right_is_refused(
    tokenizer: Tokenizer, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineFaultError, match=said):
        generation(tokenizer).take(message(**wrong))


def test_a_message_after_the_end_is_refused(tokenizer: Tokenizer) -> None:
    taking = generation(tokenizer)
    taking.take(message())
    with pytest.raises(EngineFaultError, match="sent more after"):
        taking.take(message())


def test_versions_that_sampled_nothing_leave_no_span(tokenizer: Tokenizer) -> None:
    taking = generation(tokenizer)
    assert taking.take(message(spans=((1, 0, 2), (2, 2, 2)))) == [5, 6]
    sample = checked_sample(taking, prompt_tokens=3, prompt_crc32=CRC)
    assert spans_of(sample.spans) == [("e", 1, 0, 2)]


def test_a_prompt_that_arrived_wrong_is_noticed_with_the_first_tokens(tokenizer: Tokenizer) -> None:
    first = message(spans=None, version=0)
    first.prompt_crc32 = CRC + 1
    with pytest.raises(EngineFaultError, match="other prompt ids"):
        generation(tokenizer).take(first)


def test_engines_that_follow_each_other_sample_one_answer(tokenizer: Tokenizer) -> None:
    taking = generation(tokenizer)
    taking.take(message((5,), spans=None, version=1))
    taking.take(message((6,), spans=None, version=2))
    assert taking.is_known
    assert not taking.migrated
    taking.begin("f", CRC + 1)
    assert (taking.taken, taking.fresh, taking.migrated) == (2, 0, True)
    taking.take(message((7, 8), spans=((2, 0, 2),), crc=CRC + 1))
    sample = checked_sample(taking, prompt_tokens=3, prompt_crc32=CRC)
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert spans_of(sample.spans) == [("e", 1, 0, 1), ("e", 2, 1, 2), ("f", 2, 2, 4)]
    assert (sample.engine_id, sample.prompt_crc32) == ("f", CRC)


def test_tokens_of_an_unknown_version_are_known_to_be_so(tokenizer: Tokenizer) -> None:
    taking = generation(tokenizer)
    taking.take(message((5,), spans=None, version=1))
    taking.take(message((6,), spans=None))
    assert not taking.is_known
    taking.take(message((7,), spans=None, version=1))
    assert not taking.is_known
    taking.take(message((8,), spans=((1, 0, 3), (2, 3, 4))))
    assert taking.is_known
    assert spans_of(taking.spans) == [("e", 1, 0, 3), ("e", 2, 3, 4)]


def test_an_aborted_answer_is_not_complete_unless_a_stop_string_ended_it(
    tokenizer: Tokenizer,
) -> None:
    taking = generation(tokenizer)
    taking.take(message(reason=sampling_pb2.FINISH_REASON_ABORT))
    assert not taking.complete
    taking.answer.stopped_at = 1
    assert taking.complete
