"""What an engine gave and what may become a turn: only what can be stored and trained."""

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.chat.parsing import Answer, decoder_of
from rollmesh.gateway import Draft, Sample, Turn, sample_of
from rollmesh.mesh import Generation
from rollmesh.runtime.codec import pack_ids, pack_logprobs
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import engine_pb2, sampling_pb2


def sample(tokenizer: Tokenizer, tokens: int, spans: list[tuple[int, int, int]]) -> Sample:
    """What becomes of an answer that an engine gives in one message."""
    answer = Answer(
        decoder_of(tokenizer, ()),
        (),
        parser=None,
        reasoning=None,
        new_call_id=lambda: "id",
        one_call=False,
    )
    generation = Generation(engine_pb2.GenerateRequest())
    generation.begin("engine-0", "id")
    generation.take(
        engine_pb2.TokenChunk(
            token_ids_u32le=pack_ids(np.arange(tokens, dtype=np.uint32)),
            logprobs_f32le=pack_logprobs(np.zeros(tokens, np.float32)),
            finish=engine_pb2.GenerateFinish(
                reason=sampling_pb2.FINISH_REASON_STOP,
                version_spans=[
                    sampling_pb2.VersionSpan(policy_version=version, start=start, end=end)
                    for version, start, end in spans
                ],
            ),
        )
    )
    turn = Turn("answer", "", "", 0)
    return sample_of(Draft(answer, generation), prompt_tokens=1, prompt_crc32=0, turn=turn)


@pytest.mark.parametrize(
    ("tokens", "spans", "said"),
    [
        pytest.param(0, [], "without a token", id="no token"),
        pytest.param(4, [], "version spans", id="no span"),
        pytest.param(4, [(0, 0, 3), (1, 2, 4)], "version spans", id="overlap"),
        pytest.param(4, [(0, 0, 1), (1, 2, 4)], "version spans", id="gap"),
        pytest.param(4, [(0, 2, 4), (0, 0, 2)], "version spans", id="order"),
        pytest.param(4, [(0, 0, 3)], "version spans", id="short"),
        pytest.param(4, [(-1, 0, 4)], "version spans", id="negative"),
    ],
)
def test_what_could_not_be_stored_is_no_turn(
    tokenizer: Tokenizer, tokens: int, spans: list[tuple[int, int, int]], said: str
) -> None:
    with pytest.raises(RollmeshError, match=said):
        sample(tokenizer, tokens, spans)


def test_spans_one_after_the_other_are_kept_and_empty_ones_are_not(tokenizer: Tokenizer) -> None:
    given = [(0, 0, 3), (1, 3, 3), (2, 3, 4)]
    kept = sample(tokenizer, 4, given).spans
    assert [(one.policy_version, one.start, one.end) for one in kept] == [(0, 0, 3), (2, 3, 4)]
