"""What engines sample in turn becomes one generation, with who sampled what."""

from collections.abc import Iterable

import pytest

from rollmesh.mesh import Generation
from rollmesh.runtime.errors import EngineFaultError
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.runtime.mesh.generations.answers import CRC, PROMPT, message


def generation() -> Generation:
    sampling = sampling_pb2.SamplingParams(max_tokens=4)
    request = engine_pb2.GenerateRequest(token_ids_u32le=PROMPT, sampling=sampling)
    begun = Generation(request, vocabulary_tokens=100)
    begun.begin("e", "first")
    return begun


def spans_of(spans: Iterable[sampling_pb2.VersionSpan]) -> list[tuple[str, int, int, int]]:
    return [(one.engine_id, one.policy_version, one.start, one.end) for one in spans]


def test_versions_that_sampled_nothing_leave_no_span() -> None:
    taking = generation()
    taking.take(message(spans=((1, 0, 2), (2, 2, 2))))
    assert taking.token_ids().tolist() == [5, 6]
    assert spans_of(taking.spans) == [("e", 1, 0, 2)]


def test_a_prompt_that_arrived_wrong_is_noticed_with_the_first_tokens() -> None:
    first = message(spans=None, version=0)
    first.prompt_crc32 = CRC + 1
    with pytest.raises(EngineFaultError, match="other prompt ids"):
        generation().take(first)


def test_a_prompt_that_arrived_short_is_noticed_at_the_end() -> None:
    with pytest.raises(EngineFaultError, match=r"2 prompt ids of 3$"):
        generation().take(message(prompt_tokens=2))


def test_engines_that_follow_each_other_sample_one_answer() -> None:
    taking = generation()
    taking.take(message((5,), spans=None, version=1))
    taking.take(message((6,), spans=None, version=2))
    assert taking.is_known
    assert not taking.migrated
    rest = taking.begin("f", "second")
    assert (rest.sampled_tokens, rest.sampling.max_tokens) == (2, 2)
    assert (taking.taken, taking.fresh, taking.migrated) == (2, 0, True)
    with pytest.raises(EngineFaultError, match="more ids than the 2"):
        taking.take(message((7, 8, 9), spans=None))
    other = message((7, 8), spans=None, version=2)
    taking.take(other)
    assert taking.token_ids().tolist() == [5, 6, 7, 8]
    assert spans_of(taking.spans) == [("e", 1, 0, 1), ("e", 2, 1, 2), ("f", 2, 2, 4)]
    assert taking.engine_id == "f"


def test_a_generation_that_begins_anew_has_nothing_of_the_former() -> None:
    taking = generation()
    taking.take(message((5,), spans=None, version=1))
    anew = taking.anew()
    assert (anew.taken, anew.request, anew.vocabulary_tokens) == (0, taking.request, 100)
    assert taking.taken == 1


def test_tokens_of_an_unknown_version_are_known_to_be_so() -> None:
    taking = generation()
    taking.take(message((5,), spans=None, version=1))
    taking.take(message((6,), spans=None))
    assert not taking.is_known
    taking.take(message((7,), spans=None, version=1))
    assert not taking.is_known
    assert spans_of(taking.spans) == [("e", 1, 0, 1)]
    taking.take(message((8,), spans=((1, 0, 3), (2, 3, 4))))
    assert taking.is_known
    assert spans_of(taking.spans) == [("e", 1, 0, 3), ("e", 2, 3, 4)]


def test_a_limit_that_the_request_does_not_name_is_the_engines() -> None:
    taking = Generation(engine_pb2.GenerateRequest(token_ids_u32le=PROMPT, sampled_tokens=1))
    taking.begin("e", "first")
    taking.take(message((5, 6), spans=None, version=1))
    rest = taking.begin("f", "second")
    assert rest.sampled_tokens == 3
    assert not rest.sampling.HasField("max_tokens")
    assert not rest.sampling.HasField("min_tokens")
