"""Continues a generation from the tokens that are left of it: when that is exact, and how.

A generation may be cut at any token: its engine dies, or an operator aborts it. The next engine
receives the prompt and the sampled tokens as its prompt, and samples what is left. That is the same
distribution only if what the next engine samples depends on the ids alone, not on which of them are
the prompt. It does not depend on what was sampled so far whether a generation is continued: to
discard some samples because of their tokens would change the distribution of those that are kept.

vLLM 0.32 was tried: with everything else equal, a continued greedy answer has the same ids and
log-probabilities. Presence and frequency penalties count sampled tokens only, a seed starts its
random sequence again, and so does the state of a constraint. Bad sequences are matched within
sampled tokens.
"""

import zlib

from rollmesh.runtime.codec.arrays import TokenIds, pack_ids
from rollmesh.v1 import engine_pb2, sampling_pb2


def why_not_continued(request: engine_pb2.GenerateRequest) -> str:
    """Returns the part of a request with which its generations must begin anew; empty if none."""
    sampling = request.sampling
    if sampling.HasField("seed"):
        return "a seed"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "a presence or frequency penalty"
    if request.HasField("constraint"):
        return "a constraint"
    if any(len(one.token_ids) > 1 for one in sampling.bad_sequences):
        return "a bad sequence of several tokens"
    return ""


def continued(
    request: engine_pb2.GenerateRequest,
    sampled: TokenIds,
    request_id: str,
    into: engine_pb2.GenerateRequest | None = None,
) -> engine_pb2.GenerateRequest:
    """Returns the request for what is left of a generation.

    Args:
        request: The request of the complete generation.
        sampled: The ids sampled so far, uint32 [S]; fewer than `max_tokens`.
        request_id: Id of the new generation.
        into: What becomes the request: part of a larger message, because a prompt is long and
            adding a message copies it. None makes a new one.
    """
    rest = engine_pb2.GenerateRequest() if into is None else into
    rest.CopyFrom(request)
    rest.request_id = request_id
    if not len(sampled):
        return rest
    rest.token_ids_u32le += pack_ids(sampled)
    rest.sampled_tokens += len(sampled)
    if request.sampling.HasField("max_tokens"):
        rest.sampling.max_tokens -= len(sampled)
    if request.sampling.HasField("min_tokens"):
        rest.sampling.min_tokens = max(rest.sampling.min_tokens - len(sampled), 0)
    return rest


def prompt_crc32(request: engine_pb2.GenerateRequest) -> int:
    """Returns the CRC-32 that the engine must report for the prompt of a request."""
    return zlib.crc32(request.token_ids_u32le)


def ended(
    request: engine_pb2.GenerateRequest, sampled: TokenIds
) -> sampling_pb2.FinishReason.ValueType | None:
    """Returns why a generation ended whose engine was lost before it said so; None if it goes on.

    Args:
        request: The request of the complete generation.
        sampled: The ids sampled so far, uint32 [S].
    """
    if len(sampled) and int(sampled[-1]) in request.sampling.stop_token_ids:
        return sampling_pb2.FINISH_REASON_STOP
    most = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None
    if most is not None and len(sampled) >= most:
        return sampling_pb2.FINISH_REASON_LENGTH
    return None
