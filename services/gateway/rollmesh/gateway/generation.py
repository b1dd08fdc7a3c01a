"""What came back from an engine, and whether it may become a turn."""

from dataclasses import dataclass, field

import numpy as np

from rollmesh.gateway.answer import Answer
from rollmesh.gateway.fidelity import Finish
from rollmesh.gateway.tree import Sample, VersionSpan
from rollmesh.runtime.arrays import Logprobs, TokenIds
from rollmesh.runtime.errors import GenerationAbortedError, RollmeshError
from rollmesh.v1 import engine_pb2, types_pb2


@dataclass(slots=True)
class Generation:
    """What came back from the engine so far."""

    answer: Answer
    engine_id: str
    ids: list[TokenIds] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: engine_pb2.GenerateFinish | None = None


def checked_sample(generation: Generation, *, prompt_tokens: int, prompt_crc32: int) -> Sample:
    """Returns what was sampled, cut at the stop string.

    Raises:
        GenerationAbortedError: An operator aborted the generation.
        RollmeshError: The engine contradicts itself or received other ids than were sent.
    """
    finish = generation.finish
    assert finish is not None
    ids, logprobs = np.concatenate(generation.ids), np.concatenate(generation.logprobs)
    if len(ids) != len(logprobs):
        raise RollmeshError(f"the engine gave {len(logprobs)} log-probs for {len(ids)} tokens")
    if finish.prompt_crc32 != prompt_crc32:
        raise RollmeshError("the engine received other prompt ids than the session recorded")
    cut = generation.answer.stopped_at
    if cut is None and finish.reason == types_pb2.FINISH_REASON_ABORT:
        raise GenerationAbortedError("the generation was aborted; nothing was kept, try again")
    size = len(ids) if cut is None else cut
    spans = tuple(
        VersionSpan(span.policy_version, span.start, min(span.end, size))
        for span in finish.version_spans
        if span.start < size
    )
    if size and (not spans or spans[0].start != 0 or spans[-1].end != size):
        raise RollmeshError("the engine's version spans do not cover what it sampled")
    return Sample(
        token_ids=ids[:size],
        logprobs=logprobs[:size],
        spans=spans,
        finish=Finish.STOP if cut is not None else Finish(finish.reason),
        engine_id=generation.engine_id,
        prompt_tokens=prompt_tokens,
        cached_tokens=finish.cached_tokens,
        prompt_crc32=finish.prompt_crc32,
    )
