"""What came back from an engine, and whether it may become a turn."""

from dataclasses import dataclass, field

from rollmesh.gateway.answer import Answer
from rollmesh.gateway.fidelity import Finish
from rollmesh.gateway.sampled import Sampled, Tops, joined
from rollmesh.gateway.tree import Sample, VersionSpan
from rollmesh.runtime.arrays import unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import GenerationAbortedError, RollmeshError
from rollmesh.v1 import engine_pb2, types_pb2


@dataclass(slots=True)
class Generation:
    """What came back from the engine so far."""

    answer: Answer
    engine_id: str
    top_logprobs: int = 0
    """How many of the most likely ids were asked for at each place."""
    runs: list[Sampled] = field(default_factory=list)
    finish: engine_pb2.GenerateFinish | None = None
    _taken: int = 0
    _told: int = 0
    _untold: list[Sampled] = field(default_factory=list)

    def take(self, response: engine_pb2.GenerateResponse) -> list[int]:
        """Takes a message of the engine; returns its ids.

        Raises:
            RollmeshError: The engine contradicts itself.
        """
        ids = unpack_ids(response.token_ids_u32le, "token_ids_u32le")
        logprobs = unpack_logprobs(response.logprobs_f32le, "logprobs_f32le")
        top_ids = unpack_ids(response.top_ids_u32le, "top_ids_u32le")
        top_logprobs = unpack_logprobs(response.top_logprobs_f32le, "top_logprobs_f32le")
        if len(ids) != len(logprobs):
            raise RollmeshError(f"the engine gave {len(logprobs)} log-probs for {len(ids)} tokens")
        if not len(top_ids) == len(top_logprobs) == len(ids) * self.top_logprobs:
            raise RollmeshError(
                f"the engine gave {len(top_ids)} most likely ids with {len(top_logprobs)} "
                f"log-probs for {len(ids)} tokens; {self.top_logprobs} for each were asked for"
            )
        shape = len(ids), self.top_logprobs
        run = Sampled(ids, logprobs, Tops(top_ids.reshape(shape), top_logprobs.reshape(shape)))
        self.runs.append(run)
        self._untold.append(run)
        self._taken += len(ids)
        if response.HasField("finish"):
            self.finish = response.finish
        return [int(id_) for id_ in ids.tolist()]

    def tell(self, *, over: bool = False) -> Sampled | None:
        """Returns the tokens that were not told yet and are certainly kept; None where none are."""
        certain = self.answer.stopped_at if over else self.answer.certain
        end = self._taken if certain is None else certain
        if end <= self._told:
            return None
        run = joined(self._untold).until(end - self._told)
        self._untold.clear()
        self._told = end
        return run


def checked_sample(generation: Generation, *, prompt_tokens: int, prompt_crc32: int) -> Sample:
    """Returns what was sampled, cut at the stop string.

    Raises:
        GenerationAbortedError: An operator aborted the generation.
        RollmeshError: The engine contradicts itself or received other ids than were sent.
    """
    finish = generation.finish
    assert finish is not None
    if not generation.runs:
        raise RollmeshError("the engine ended without a token; nothing was kept, try again")
    sampled = joined(generation.runs)
    if finish.prompt_crc32 != prompt_crc32:
        raise RollmeshError("the engine received other prompt ids than the session recorded")
    cut = generation.answer.stopped_at
    if cut is None and finish.reason == types_pb2.FINISH_REASON_ABORT:
        raise GenerationAbortedError("the generation was aborted; nothing was kept, try again")
    size = len(sampled) if cut is None else cut
    sampled = sampled.until(size)
    spans = tuple(
        VersionSpan(span.policy_version, span.start, min(span.end, size))
        for span in finish.version_spans
        if span.start < size
    )
    if not size:
        raise RollmeshError("the engine ended without a token; nothing was kept, try again")
    bounds = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != bounds[:-1] or bounds[-1] != size:
        raise RollmeshError(
            "the engine's version spans do not cover what it sampled, one after the other"
        )
    if any(span.start >= span.end for span in spans):
        raise RollmeshError("the engine gave an empty version span")
    return Sample(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=spans,
        finish=Finish.STOP if cut is not None else Finish(finish.reason),
        engine_id=generation.engine_id,
        prompt_tokens=prompt_tokens,
        cached_tokens=finish.cached_tokens,
        prompt_crc32=finish.prompt_crc32,
        tops=sampled.tops if generation.top_logprobs else None,
    )
