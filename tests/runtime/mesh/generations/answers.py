"""Messages of engines, right and wrong."""

import zlib
from typing import Any

import numpy as np

from rollmesh.runtime.codec import pack_ids, pack_logprobs
from rollmesh.v1 import engine_pb2, sampling_pb2

PROMPT = pack_ids(np.array([1, 2, 3], np.uint32))
CRC = zlib.crc32(PROMPT)


def message(
    ids: tuple[int, ...] = (5, 6),
    logprobs: tuple[float, ...] | None = None,
    spans: tuple[tuple[int, int, int], ...] | None = ((0, 0, 2),),
    tops: tuple[tuple[int, ...], tuple[float, ...]] = ((), ()),
    version: int | None = None,
    **finish: Any,
) -> engine_pb2.TokenChunk:
    """A message with two ids. The last one, unless its `spans` are None."""
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    response = engine_pb2.TokenChunk(
        token_ids_u32le=pack_ids(np.array(ids, np.uint32)),
        logprobs_f32le=pack_logprobs(np.array(values, np.float32)),
        top_ids_u32le=pack_ids(np.array(tops[0], np.uint32)),
        top_logprobs_f32le=pack_logprobs(np.array(tops[1], np.float32)),
        policy_version=version,
    )
    if spans is not None:
        fields = {"reason": sampling_pb2.FINISH_REASON_STOP, "prompt_crc32": CRC, **finish}
        response.finish.MergeFrom(engine_pb2.GenerateFinish(**fields))
        for of, start, end in spans:
            response.finish.version_spans.add(policy_version=of, start=start, end=end)
    return response
