"""Log-probabilities as vLLM's outputs have them: merged ones, and those of given tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.engine import NO_ID, GenerateInput, ScoreInput
from rollmesh.engine.vllm import Row, VersionStart, keep_rows, keep_tensors, messages, scores_of
from rollmesh.runtime.codec import SUPPORT, joined, ragged_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import engine_pb2
from tests.engine.engines import Result

pytestmark = pytest.mark.vllm
MOST_LIKELY = [7, 8, 9]
LOGPROBS = [-0.5, -1.0, -2.0]
OTHER = 5


def output(sampled: int, *, beside: int = 0) -> list[Row]:
    """The log-probabilities of one token for `logprobs=3`, as vLLM's processor keeps them.

    In the same step another request asks for `beside` more.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    at = MOST_LIKELY.index(sampled) if sampled in MOST_LIKELY else None
    own, rank = (-4.0, 40) if at is None else (LOGPROBS[at], at + 1)
    ids, logprobs = [sampled, *MOST_LIKELY, *[1] * beside], [own, *LOGPROBS, *[-9.0] * beside]
    processor = LogprobsProcessor(None, [], None, 0.0, 3, None)
    found = LogprobsLists(np.array([ids]), np.array([logprobs], np.float32), np.array([rank]))
    keep_rows(processor, found)
    kept: list[Row] = processor.logprobs
    return kept


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as vLLM imports it
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_merged_outputs_have_the_sampled_token_and_the_most_likely_ones(chunk: int) -> None:
    sampled = [7, 9, OTHER, 8, 9]
    merged = [row for token in sampled for row in output(token, beside=token % 3)]
    asked = engine_pb2.GenerateRequest(top_logprobs=3, columns=[SUPPORT])
    request = GenerateInput(asked, np.ones(1, np.uint32), chunk)
    mask = SimpleNamespace(token_ids=[[token, *range(at)] for at, token in enumerate(sampled)])
    completion = SimpleNamespace(token_ids=sampled, logprobs=merged, sampling_mask=mask)
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
    (support,) = joined(result.columns)
    assert (support.start, support.rows) == (11, 5)  # a prompt of one, and ten before
    assert ragged_of(support).offsets.tolist() == [0, 1, 3, 6, 10, 15]
    assert ragged_of(support).values[3:6].tolist() == [OTHER, 0, 1]


SEQUENCE = ScoreInput("s", np.array([3, 8, 9, 7], np.uint32), start=1, top_k=3)
TABLE = np.array([[token, *MOST_LIKELY] for token in (8, 9, 7)])
VALUES = np.array([[own, *LOGPROBS] for own in (-1.0, -2.0, -0.5)], np.float32)


def scored(prompt: Any, *, samples_last: bool = False, **given: Any) -> Any:
    """What vLLM says of `SEQUENCE`, whose last id it may have sampled."""
    versions = [SimpleNamespace(version="5", start=0, end=1)]
    last = output(7) if samples_last else None
    completion = SimpleNamespace(logprobs=last, weight_versions=versions)
    return SimpleNamespace(outputs=[completion], prompt_logprobs=prompt, **given)


def from_vllm(rows: int, *, kept: bool) -> Any:
    """The log-probabilities of a prompt as vLLM's own code passes them on, or as they are kept."""
    import torch
    from vllm.logprobs import create_prompt_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors

    arrays = (TABLE[:rows], VALUES[:rows], np.arange(rows))
    tensors = LogprobsTensors(*map(torch.tensor, arrays))
    made = create_prompt_logprobs(flat_logprobs=True)
    processor = LogprobsProcessor(None, None, made, None, None, 3)
    read = keep_tensors if kept else LogprobsProcessor._update_prompt_logprobs  # noqa: SLF001
    read(processor, tensors)
    return processor.prompt_logprobs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as vLLM imports it
@pytest.mark.parametrize("samples_last", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_scores_are_the_rows_from_the_start_on_in_each_form_of_vllm(
    start: int, *, kept: bool, samples_last: bool
) -> None:
    request = ScoreInput("s", SEQUENCE.token_ids, start, 3)
    prompt = from_vllm(2 if samples_last else 3, kept=kept)
    found = scores_of(scored(prompt, samples_last=samples_last), request)
    assert found.logprobs.tolist() == [-1.0, -2.0, -0.5][start - 1 :]
    assert found.top_ids.tolist() == [MOST_LIKELY] * (4 - start)
    assert found.top_logprobs.tolist() == [LOGPROBS] * (4 - start)
    assert found.policy_version == 5
    assert {one.dtype.name for one in (found.logprobs, found.top_logprobs)} == {"float32"}


def test_the_score_of_a_token_precedes_the_scores_of_given_ids() -> None:
    ids = np.array([[4, NO_ID], [4, 6], [4, 6]], np.uint32)
    request = ScoreInput("s", SEQUENCE.token_ids, 1, 0, ids)
    table = np.array([[-1.0, -3.0, -np.inf], [-2.0, -3.0, -4.0], [-0.5, -3.0, -4.0]], np.float32)
    found = scores_of(scored(None, prompt_token_id_logprobs=table), request)
    assert found.logprobs.tolist() == [-1.0, -2.0, -0.5]
    assert found.top_ids.shape == (3, 0)
    assert found.top_logprobs.tolist() == table[:, 1:].tolist()
    with pytest.raises(RollmeshError, match="does not say all"):
        scores_of(scored(None, prompt_token_id_logprobs=table[1:]), request)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as vLLM imports it
def test_given_ids_are_asked_of_vllm_with_the_token_first_and_minus_one_in_free_places() -> None:
    from rollmesh.engine.vllm import score_params

    ids = np.array([[4, NO_ID], [4, 6]], np.uint32)
    request = ScoreInput("s", SEQUENCE.token_ids, 2, 0, ids)
    params = score_params(request, samples_last=False)
    assert params.prompt_logprob_token_ids.tolist() == [[9, 4, -1], [7, 4, 6]]
    assert params.prompt_logprob_start == 1
    assert params.prompt_logprobs is None
    assert params.skip_reading_prefix_cache
    assert score_params(SEQUENCE, samples_last=True).skip_reading_prefix_cache
