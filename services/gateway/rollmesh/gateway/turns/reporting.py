"""Reports what a request wants in addition to its answer, during sampling or for a stored turn."""

import numpy as np

from rollmesh.chat.parsing.events import ParserEvent
from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.sampled import show
from rollmesh.gateway.conversation.session import PromptIds, Report, StreamEvent, Told, TurnRequest
from rollmesh.gateway.turns.generate import Answering
from rollmesh.gateway.turns.prepare import Workers
from rollmesh.mesh.generations.sampled import Sampled, no_tops
from rollmesh.runtime.codec.arrays import pack_ids


class Reporter:
    """Reports prompts and sampled tokens to clients."""

    def __init__(self, tokenizer: ModelTokenizer, workers: Workers) -> None:
        """Takes the model's tokenizer, and the threads for long work."""
        self._tokenizer = tokenizer
        self._workers = workers

    async def report(self, node: Node, request: TurnRequest) -> Report:
        """Returns what a request wants from a turn in addition to its answer."""
        sample, parent = node.sample, node.parent
        assert sample is not None
        assert parent is not None
        tops = sample.tops
        if tops is None or not request.returns.top_logprobs:
            tops = no_tops(len(sample.token_ids))
        sampled = Sampled(sample.token_ids, sample.logprobs, tops)

        def work() -> Report:
            prompt = np.concatenate([*parent.context(), node.token_ids[: node.scaffold_tokens]])
            packed = pack_ids(prompt) if request.returns.token_ids else b""
            return Report(packed, show(sampled, request.returns, self._tokenizer))

        return await self._workers.run(work)

    def with_tokens(
        self,
        request: TurnRequest,
        answering: Answering,
        events: list[ParserEvent],
        *,
        over: bool = False,
    ) -> list[StreamEvent]:
        """Returns events, combined with the tokens that produced them if those are requested."""
        run = answering.tell(over=over) if request.stream and request.returns else None
        if run is None:
            return [*events]
        shown = show(run, request.returns, self._tokenizer)
        return [Told(shown, events[0] if events else None), *events[1:]]


def retold(report: Report | None) -> list[StreamEvent]:
    """Returns the first events in the stream of a stored answer: its prompt and all its tokens."""
    if report is None:
        return []
    prompt: list[StreamEvent] = [PromptIds(report.prompt)] if report.prompt else []
    return [*prompt, Told(report.tokens, None)]
