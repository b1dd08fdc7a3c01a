"""What an engine gave and what may become a turn: only what can be stored and trained."""

import numpy as np
import pytest

from rollmesh.gateway.answer import Answer
from rollmesh.gateway.generation import Generation, checked_sample
from rollmesh.gateway.sampled import Sampled, no_tops
from rollmesh.gateway.text import IncrementalDecoder
from rollmesh.gateway.tokenizer import Tokenizer
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import engine_pb2, types_pb2


def generation(
    tokenizer: Tokenizer, tokens: int, spans: list[tuple[int, int, int]], chunks: int = 1
) -> Generation:
    answer = Answer(
        IncrementalDecoder(tokenizer, ()),
        (),
        parser=None,
        reasoning=None,
        new_call_id=lambda: "id",
        one_call=False,
    )
    return Generation(
        answer,
        "engine-0",
        runs=[
            Sampled(
                np.arange(tokens, dtype=np.uint32), np.zeros(tokens, np.float32), no_tops(tokens)
            )
        ]
        * chunks,
        finish=engine_pb2.GenerateFinish(
            reason=types_pb2.FINISH_REASON_STOP,
            version_spans=[
                types_pb2.VersionSpan(policy_version=version, start=start, end=end)
                for version, start, end in spans
            ],
        ),
    )


@pytest.mark.parametrize(
    ("tokens", "spans", "chunks", "said"),
    [
        pytest.param(0, [], 0, "without a token", id="no chunk"),
        pytest.param(0, [], 1, "without a token", id="an empty chunk"),
        pytest.param(4, [], 1, "version spans", id="no span"),
        pytest.param(4, [(0, 0, 3), (1, 2, 4)], 1, "version spans", id="overlap"),
        pytest.param(4, [(0, 0, 1), (1, 2, 4)], 1, "version spans", id="gap"),
        pytest.param(4, [(0, 2, 4), (0, 0, 2)], 1, "version spans", id="order"),
        pytest.param(4, [(0, 0, 3)], 1, "version spans", id="short"),
    ],
)
def test_what_could_not_be_stored_is_no_turn(
    tokenizer: Tokenizer, tokens: int, spans: list[tuple[int, int, int]], chunks: int, said: str
) -> None:
    with pytest.raises(RollmeshError, match=said):
        checked_sample(generation(tokenizer, tokens, spans, chunks), prompt_tokens=1)


def test_spans_one_after_the_other_are_kept(tokenizer: Tokenizer) -> None:
    sample = checked_sample(generation(tokenizer, 4, [(0, 0, 3), (1, 3, 4)]), prompt_tokens=1)
    assert sample.spans == ((0, 0, 3), (1, 3, 4))
