"""What a request wants to know beside its answer: piece by piece, or of a turn that is stored."""

import numpy as np

from rollmesh.chat.parsing.answer import Delta
from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.gateway.conversation.sampled import Sampled, no_tops, show
from rollmesh.gateway.conversation.tree import Node
from rollmesh.gateway.sessions.session import Piece, PromptIds, Report, Told, TurnRequest
from rollmesh.gateway.turns.generate import Generation
from rollmesh.gateway.turns.prepare import Workers
from rollmesh.runtime.codec.arrays import pack_ids


class Reporter:
    """Shows sampled tokens."""

    def __init__(self, tokenizer: ModelTokenizer, workers: Workers) -> None:
        """Takes the model's tokenizer, and where long work is done."""
        self._tokenizer = tokenizer
        self._workers = workers

    async def report(self, node: Node, request: TurnRequest) -> Report:
        """Returns what a request wants to know of a turn beside its answer."""
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

    def pieces(
        self,
        request: TurnRequest,
        generation: Generation,
        deltas: list[Delta],
        *,
        over: bool = False,
    ) -> list[Piece]:
        """Returns pieces with the tokens that came with them, where those are wanted."""
        run = generation.tell(over=over) if request.stream and request.returns else None
        if run is None:
            return [*deltas]
        shown = show(run, request.returns, self._tokenizer)
        return [Told(shown, deltas[0] if deltas else None), *deltas[1:]]


def retold(report: Report | None) -> list[Piece]:
    """Returns what a stream of a stored answer begins with: its prompt and all its tokens."""
    if report is None:
        return []
    prompt: list[Piece] = [PromptIds(report.prompt)] if report.prompt else []
    return [*prompt, Told(report.tokens, None)]
