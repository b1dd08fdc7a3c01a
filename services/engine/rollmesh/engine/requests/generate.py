"""Validates generation requests."""

from collections.abc import Sequence

from rollmesh.engine.backend import GenerateInput, ModelLimits
from rollmesh.engine.requests.constraint import read_constraint
from rollmesh.engine.requests.sampling import MAX_TOP_LOGPROBS, read_sampling
from rollmesh.runtime.codec.arrays import unpack_ids
from rollmesh.runtime.errors import (
    InvalidFieldError,
    PromptEmptyError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from rollmesh.v1 import engine_pb2

_MAX_ID_CHARS = 128
_MAX_BANNED = 64


def read_generate(streamed: engine_pb2.StreamGenerateRequest, limits: ModelLimits) -> GenerateInput:
    """Returns the validated request.

    Args:
        streamed: The request; with `max_chunk_tokens` 0 it asks for one final chunk.
        limits: Limits of the backend.

    Raises:
        InvalidFieldError: Names the field and what is wrong with it.
    """
    request = streamed.generate
    if streamed.min_chunk_tokens > streamed.max_chunk_tokens:
        raise InvalidFieldError(
            "min_chunk_tokens", f"is above max_chunk_tokens, {streamed.max_chunk_tokens}"
        )
    if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
        raise InvalidFieldError("request_id", f"give 1 to {_MAX_ID_CHARS} characters")
    token_ids = unpack_ids(request.token_ids_u32le, "token_ids_u32le")
    room = max(limits.max_context_tokens - len(token_ids), 1)
    sampling = read_sampling(request.sampling, room, limits.vocabulary_tokens)
    if request.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidFieldError(
            "top_logprobs", f"is {request.top_logprobs}; give at most {MAX_TOP_LOGPROBS}"
        )
    result = GenerateInput(
        request.request_id,
        token_ids,
        sampling,
        streamed.max_chunk_tokens,
        read_constraint(request, sampling),
        request.top_logprobs,
        streamed.min_chunk_tokens,
        request.sampled_tokens,
        banned_token_ids=_read_banned(request.banned_token_ids, limits.vocabulary_tokens),
    )
    _check_prompt(result, limits)
    if result.sampled_tokens >= len(token_ids):
        raise InvalidFieldError(
            "sampled_tokens",
            f"is {result.sampled_tokens} of {len(token_ids)} ids; a prompt begins with others",
        )
    return result


def _read_banned(ids: Sequence[int], vocabulary_tokens: int) -> tuple[int, ...]:
    if len(ids) > _MAX_BANNED or any(id_ >= vocabulary_tokens for id_ in ids):
        raise InvalidFieldError(
            "banned_token_ids", f"give at most {_MAX_BANNED} ids below {vocabulary_tokens}"
        )
    return tuple(ids)


def _check_prompt(request: GenerateInput, limits: ModelLimits) -> None:
    """Checks a prompt against the limits of the model.

    Raises:
        PromptEmptyError: It has no ids.
        TokenOutOfVocabularyError: It has an id outside of the vocabulary.
        PromptTooLongError: It leaves no room for an answer.
    """
    ids, field = request.token_ids, "token_ids_u32le"
    if not len(ids):
        raise PromptEmptyError(field, "is empty; send at least one id")
    largest = int(ids.max())
    if largest >= limits.vocabulary_tokens:
        raise TokenOutOfVocabularyError(
            field, f"has id {largest}; ids are below {limits.vocabulary_tokens}"
        )
    if len(ids) + 1 > limits.max_context_tokens:
        raise PromptTooLongError(
            field,
            f"has {len(ids)} ids; the context holds {limits.max_context_tokens} with the answer",
        )
