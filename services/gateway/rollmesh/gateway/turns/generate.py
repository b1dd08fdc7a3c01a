"""The answer of a turn while it is generated, and what becomes of it."""

from dataclasses import dataclass, field

from rollmesh.chat.parsing.answer import Answer
from rollmesh.gateway.conversation.nodes import Sample
from rollmesh.mesh.generations.generation import Generation
from rollmesh.mesh.generations.sampled import Sampled, joined
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import sampling_pb2


@dataclass(slots=True)
class Answering:
    """What was sampled for an answer, and the answer that is read from it."""

    answer: Answer
    generation: Generation
    _told: int = 0
    _untold: list[Sampled] = field(default_factory=list)

    def take(self, run: Sampled) -> list[int]:
        """Takes the next tokens; returns their ids for the answer to read."""
        self._untold.append(run)
        token_ids: list[int] = run.token_ids.tolist()
        return token_ids

    def tell(self, *, over: bool = False) -> Sampled | None:
        """Returns the unreported tokens that are certain to be kept; None if there are none."""
        certain = self.answer.stopped_at if over else self.answer.certain
        end = self.generation.taken if certain is None else certain
        if end <= self._told:
            return None
        run = joined(self._untold).until(end - self._told)
        self._untold.clear()
        self._told = end
        return run


def checked_sample(answering: Answering, *, prompt_tokens: int, prompt_crc32: int) -> Sample:
    """Returns the sampled tokens, truncated at the stop string.

    Args:
        answering: An answer that has ended.
        prompt_tokens: Number of ids of the prompt, without continued ones.
        prompt_crc32: CRC-32 of those ids.

    Raises:
        RollmeshError: No token was sampled.
    """
    generation = answering.generation
    finish = generation.finish
    assert finish is not None
    sampled = generation.sampled()
    cut = answering.answer.stopped_at
    size = (0 if sampled is None else len(sampled)) if cut is None else cut
    if sampled is None or not size:
        raise RollmeshError("the engine ended without a token; nothing was committed, try again")
    sampled = sampled.until(size)
    spans = tuple(
        sampling_pb2.VersionSpan(
            policy_version=span.policy_version,
            start=span.start,
            end=min(span.end, size),
            engine_id=span.engine_id,
        )
        for span in generation.spans
        if span.start < min(span.end, size)
    )
    return Sample(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=spans,
        finish=sampling_pb2.FINISH_REASON_STOP if cut is not None else finish.reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(finish.cached_tokens, prompt_tokens),
        prompt_crc32=prompt_crc32,
        tops=sampled.tops if generation.request.top_logprobs else None,
    )
