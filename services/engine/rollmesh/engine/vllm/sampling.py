"""Writes a request as vLLM's sampling parameters."""

from collections.abc import Collection

from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue] - not this package
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rollmesh.engine.backend import GenerateInput


def sampling_params(
    request: GenerateInput, structural_tag: str | None, stop_ids: Collection[int]
) -> SamplingParams:
    """Returns vLLM's parameters for a request.

    Args:
        request: The request.
        structural_tag: Its constraint as vLLM can compile it.
        stop_ids: The model's end tokens; without a tokenizer vLLM does not know all of them.
    """
    sampling = request.sampling
    ends = [] if sampling.ignore_eos else stop_ids
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=[*sampling.stop_token_ids, *ends],
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        logit_bias=dict(sampling.logit_bias) or None,
        # vLLM derives these from bad_words; the gateway has already turned their text into ids.
        _bad_words_token_ids=[
            *map(list, sampling.bad_sequences),
            *([one] for one in request.banned_token_ids),
        ]
        or None,
        logprobs=request.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        structured_outputs=(
            None
            if structural_tag is None
            else StructuredOutputsParams(structural_tag=structural_tag)
        ),
        output_kind=(
            RequestOutputKind.DELTA if request.max_chunk_tokens else RequestOutputKind.FINAL_ONLY
        ),
        stream_interval=max(request.min_chunk_tokens, 1),
    )
