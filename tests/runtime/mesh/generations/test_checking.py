"""What an engine says is checked before anybody sees it."""

from typing import Any

import numpy as np
import pytest

from rollmesh.mesh import AnswerCheck, Offered, newest_version
from rollmesh.runtime.errors import EngineFaultError
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.runtime.mesh.generations.answers import CRC, message

NAN, INF = float("nan"), float("inf")
LIKELY = (5, 7, 6, 8)  # two for each of two tokens


def check(*, newest: int | None = None, epoch: int = 0, **asked: Any) -> AnswerCheck:
    return AnswerCheck(Offered(epoch, newest), 3, CRC, max_tokens=4, vocabulary_tokens=100, **asked)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param({"ids": (5, 100)}, "id 100", id="outside the vocabulary"),
        pytest.param({"logprobs": (-0.5, 0.1)}, "above 0", id="positive"),
        pytest.param({"logprobs": (-0.5,)}, "1 log-probs for 2", id="too few log-probs"),
        pytest.param({"logprobs": ()}, "0 log-probs for 2", id="no log-probs"),
        pytest.param({"tops": ((5,), (-0.5,))}, "1 most likely ids", id="alternatives unasked"),
        pytest.param({"ids": (1, 2, 3, 4, 5)}, "more ids than the 4", id="more than asked for"),
        pytest.param({"ids": (), "spans": None}, "without tokens", id="nothing in mid-answer"),
        pytest.param({"spans": ((0, 0, 1), (1, 2, 3))}, "gaps", id="a gap"),
        pytest.param({"spans": ((0, 1, 2),)}, "gaps", id="a late beginning"),
        pytest.param({"spans": ((-1, 0, 2),)}, "negative", id="a negative version"),
        pytest.param({"spans": ((0, 0, 1),)}, "do not cover", id="too short"),
        pytest.param({"spans": ()}, "do not cover", id="no spans"),
        pytest.param({"reason": 0}, "unknown finish reason", id="no reason"),
        pytest.param({"reason": 99}, "unknown finish reason", id="another reason"),
        pytest.param({"prompt_crc32": 1}, "other prompt ids", id="another prompt"),
        pytest.param({"prompt_tokens": 2}, "2 prompt ids of 3", id="a shorter prompt"),
        pytest.param({"stop_token_id": 5}, "its last is 6", id="another stop token"),
        pytest.param({"version": -1}, "negative", id="a negative version in a message"),
        pytest.param({"version": 3}, "offered up to 2", id="the future"),
        pytest.param({"spans": ((3, 0, 2),)}, "offered up to 2", id="the future, at the end"),
        pytest.param({"spans": ((2, 0, 1), (1, 1, 2))}, "version 1 after 2", id="backwards"),
        pytest.param({"version": 1}, "not those of its messages", id="contradicts itself"),
    ],
)
def test_what_cannot_be_right_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineFaultError, match=said):
        check(newest=2).take(message(**wrong), Offered(newest=2))


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        pytest.param(LIKELY[:3], (-0.5, -1, -0.5), "3 most likely ids", id="too few"),
        pytest.param((5, 100, 6, 7), (-0.5, -1, -0.5, -1), "id 100", id="outside the vocabulary"),
        pytest.param(LIKELY, (-0.5, 0.5, -0.5, -1), "above 0", id="positive"),
    ],
)
def test_alternatives_that_cannot_be_right_are_refused(
    ids: tuple[int, ...], logprobs: tuple[float, ...], said: str
) -> None:
    with pytest.raises(EngineFaultError, match=said):
        check(top_logprobs=2).take(message(tops=(ids, logprobs)), Offered())


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_a_log_prob_that_is_not_finite_is_taken_as_it_is(odd: float) -> None:
    sent = message(logprobs=(-0.5, odd), tops=(LIKELY, (-0.5, odd, -0.5, -1)))
    run = check(top_logprobs=2).take(sent, Offered())
    assert np.array_equal(run.logprobs, np.array([-0.5, odd], np.float32), equal_nan=True)


def test_an_alternative_that_is_masked_may_be_impossible() -> None:
    run = check(top_logprobs=2).take(message(tops=(LIKELY, (-0.5, -INF, -0.5, -1))), Offered())
    assert run.tops is not None
    assert run.tops.ids.tolist() == [[5, 7], [6, 8]]


@pytest.mark.parametrize(
    "field", ["token_ids_u32le", "logprobs_f32le", "top_ids_u32le", "top_logprobs_f32le"]
)
def test_half_a_value_is_refused(field: str) -> None:
    broken = message()
    setattr(broken, field, b"\0\0\0\0\0\0")
    with pytest.raises(EngineFaultError, match=rf"the engine's {field}:"):
        check().take(broken, Offered())


@pytest.mark.parametrize("spans", [((0, 0, 2),), None], ids=["a second end", "more tokens"])
def test_a_message_after_the_end_is_refused(spans: Any) -> None:
    checking = check()
    checking.take(message(), Offered())
    with pytest.raises(EngineFaultError, match="sent more after"):
        checking.take(message(spans=spans), Offered())


def test_the_tokens_of_all_messages_count() -> None:
    checking = check()
    checking.take(message(ids=(1, 2, 3), spans=None), Offered())
    with pytest.raises(EngineFaultError, match="more ids than the 4"):
        checking.take(message(spans=None), Offered())


def test_versions_grow_from_message_to_message() -> None:
    checking = check(newest=3)
    checking.take(message(spans=None, version=2), Offered(newest=3))
    with pytest.raises(EngineFaultError, match="version 1 after 2"):
        checking.take(message(spans=None, version=1), Offered(newest=3))


def test_an_answer_cannot_end_with_other_versions_than_its_messages_had() -> None:
    checking = check()
    checking.take(message((5,), spans=None, version=1), Offered())
    with pytest.raises(EngineFaultError, match="not those of its messages"):
        checking.take(message((6,), spans=((2, 0, 2),), version=2), Offered())


def test_a_version_that_was_offered_meanwhile_is_right() -> None:
    checking = check(newest=1)
    checking.take(message(spans=None, version=1), Offered(newest=1))
    run = checking.take(message(spans=((1, 0, 2), (2, 2, 4)), version=2), Offered(newest=2))
    assert run.token_ids.tolist() == [5, 6]


def test_versions_are_not_checked_once_the_router_forgot_its_weights() -> None:
    checking = check(epoch=1, newest=9)
    checking.take(message(spans=None, version=9), Offered(1, 9))
    checking.take(message(ids=(7,), spans=None, version=9), Offered(2, None))
    checking.take(message(ids=(8,), spans=((9, 0, 3), (1, 3, 4)), version=1), Offered(3, 1))


def test_any_version_is_right_before_the_first_push() -> None:
    check().take(message(spans=((7, 0, 2),), version=7), Offered())


def test_an_empty_span_is_not_the_version_of_a_token() -> None:
    checking = check(newest=1)
    checking.take(message(spans=((1, 0, 2), (9, 2, 2)), version=1), Offered(newest=1))


def test_a_refused_message_is_as_if_it_had_not_come() -> None:
    checking = check(newest=1)
    with pytest.raises(EngineFaultError):
        checking.take(message(spans=((2, 0, 2),)), Offered(newest=1))
    assert checking.take(message(), Offered(newest=1)).token_ids.tolist() == [5, 6]


def test_tokens_at_the_bounds_are_right() -> None:
    ids = (0, 99, 99, 0)
    response = message(ids, logprobs=(0, -0.0, -1e30, 1e-5), spans=((0, 0, 4),), stop_token_id=0)
    response.prompt_crc32 = CRC
    response.finish.prompt_tokens = 3
    run = check().take(response, Offered())
    assert run.token_ids.tolist() == list(ids)
    assert run.logprobs.dtype == np.float32


def test_the_newest_version_of_a_message_is_looked_for_everywhere() -> None:
    assert newest_version(engine_pb2.TokenChunk()) == 0
    assert newest_version(message(spans=None, version=4)) == 4
    assert newest_version(message(spans=((2, 0, 1), (5, 1, 2)), version=4)) == 5


def signed(adapter: str, version: int) -> engine_pb2.TokenChunk:
    """A message whose tokens an adapter sampled."""
    response = message(spans=((version, 0, 2),), version=version)
    response.adapter = response.finish.version_spans[0].adapter = adapter
    return response


def test_only_the_adapter_revision_that_was_asked_for_is_right() -> None:
    adapter = sampling_pb2.AdapterRef(name="math", version=3)

    def asked() -> AnswerCheck:
        return check(newest=1, adapter=adapter)

    assert len(asked().take(signed("math", 3), Offered(newest=1)).token_ids) == 2
    for name, version in (("math", 2), ("math", 4), ("", 3), ("", 1), ("code", 3)):
        with pytest.raises(EngineFaultError, match="sampled with"):
            asked().take(signed(name, version), Offered(newest=1))
    with pytest.raises(EngineFaultError, match="sampled with"):
        check().take(signed("math", 0), Offered())
