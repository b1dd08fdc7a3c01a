"""Generates the answer of a turn on one engine, and on others if that one is lost."""

import asyncio
import uuid
from contextlib import aclosing
from dataclasses import dataclass

from rollmesh.chat.constraints.structural_tag import Calls
from rollmesh.chat.messages import new_call_id
from rollmesh.chat.parsing.answer import Answer
from rollmesh.chat.parsing.decoding import IncrementalDecoder
from rollmesh.chat.parsing.formats import AnswerFormat
from rollmesh.chat.parsing.reasoning import ReasoningSplitter
from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.gateway import metrics
from rollmesh.gateway.conversation.session import Session, Turn, TurnRequest
from rollmesh.gateway.turns.continuing import continued, ended, prompt_crc32, why_not_continued
from rollmesh.gateway.turns.engines import EngineClients
from rollmesh.gateway.turns.generate import Generation
from rollmesh.gateway.turns.prepare import Prepared, Workers
from rollmesh.gateway.turns.reporting import Reporter
from rollmesh.mesh.leases import LeaseClient
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EngineLostError,
    GenerationAbortedError,
    InvalidConstraintError,
    OverloadedError,
    RemoteError,
    RollmeshError,
    StartingError,
)
from rollmesh.runtime.process import faults
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2

_STREAMED_TOKENS = 16
_COLLECTED_TOKENS = 16
"""Tokens that an engine collects for a message if nobody waits for each; it may lose as many."""
_INLINE_IDS = 128  # more ids than these are decoded off the event loop
_ATTEMPTS = 8
"""Attempts in a row, none of which brings a token that is kept, before a turn fails."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a turn needs from the engines."""

    session: Session
    turn: Turn
    request: TurnRequest
    prepared: Prepared
    generate: engine_pb2.GenerateRequest
    """The request for the complete generation, without an id."""


class Generator:
    """Generates answers; holds no state of its own."""

    def __init__(  # noqa: PLR0913 - keywords, given once
        self,
        *,
        tokenizer: ModelTokenizer,
        answer_format: AnswerFormat,
        leases: LeaseClient,
        engines: EngineClients,
        workers: Workers,
        reporter: Reporter,
        model: str,
        vocabulary_tokens: int,
        lease_timeout_ms: int,
        turn_timeout_ms: int,
    ) -> None:
        """Takes the dependencies and limits of a generation."""
        self._tokenizer = tokenizer
        self._format = answer_format
        self._leases = leases
        self._engines = engines
        self._workers = workers
        self._reporter = reporter
        self._model = model
        self._vocabulary_tokens = vocabulary_tokens
        self._lease_timeout_ms = lease_timeout_ms
        self._turn_timeout_ms = turn_timeout_ms

    async def generate(
        self,
        session: Session,
        turn: Turn,
        request: TurnRequest,
        prepared: Prepared,
        sampling: sampling_pb2.SamplingParams,
    ) -> Generation:
        """Generates the answer of a turn, whatever becomes of the engines.

        If an engine is lost, another one continues from the tokens that it sampled. Where that is
        not exact, the generation begins anew, unless part of the answer was sent.

        Raises:
            EngineLostError: The engines were lost, and the answer cannot go on.
            GenerationAbortedError: An operator aborted it, and the answer cannot go on.
        """
        complete = engine_pb2.GenerateRequest(
            session_id=session.spec.session_id,
            token_ids_u32le=prepared.packed,
            sampling=sampling,
            constraint=prepared.constraint,
            top_logprobs=request.returns.top_logprobs,
            model=self._model,
        )
        return await self._through(Wanted(session, turn, request, prepared, complete))

    async def _through(self, wanted: Wanted) -> Generation:
        """Tries one engine after the other until the generation is complete."""
        generation = self._begin(wanted)
        lost: list[str] = []
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            held = generation.taken
            try:
                await self._attempt(wanted, generation, lost)
                if generation.complete:
                    return generation
                error: RollmeshError = GenerationAbortedError(
                    "the generation was aborted; nothing was committed, try again"
                )
            except InvalidConstraintError as refusal:
                raise wanted.request.wanted.refused(refusal) from refusal
            except (OverloadedError, StartingError) as refusal:  # backpressure is not a failure
                await asyncio.sleep((refusal.retry_delay_ms or _RETRY_MS) / 1000)
                continue
            except (EngineDeadError, EngineFaultError, RemoteError) as loss:
                metrics.ENGINE_LOSSES.inc()
                error = self._lost(loss, generation.engine_id)
            after = self._after(wanted, generation, error)
            if after is None:
                raise error from error.__cause__
            if after.complete:
                return after
            if after.taken > held:
                lost.clear()
                backoff.reset()
            elif len(lost) == _ATTEMPTS - 1:
                raise error from error.__cause__
            else:
                await asyncio.sleep(backoff.next_s())
            lost.append(generation.engine_id)
            generation = after

    def _lost(self, loss: RollmeshError, engine_id: str) -> EngineLostError:
        did = "is wrong" if isinstance(loss, EngineFaultError) else "went away"
        error = EngineLostError(
            f"engine {engine_id} {did} in the middle of the turn; nothing was committed, try again",
            retry_delay_ms=_RETRY_MS,
        )
        error.__cause__ = loss
        return error

    def _after(
        self, wanted: Wanted, generation: Generation, error: RollmeshError
    ) -> Generation | None:
        """Returns what goes on after an engine was lost; None if nothing can."""
        cause = error.__cause__
        spoilt = isinstance(cause, EngineFaultError) and cause.spoils_tokens and generation.fresh
        if not spoilt and generation.is_known:
            reason = ended(wanted.generate, generation.token_ids())
            if generation.answer.stopped_at is not None:
                reason = sampling_pb2.FINISH_REASON_STOP
            if reason is not None:
                generation.end(engine_pb2.GenerateFinish(reason=reason))
                return generation
            if not generation.taken or not why_not_continued(wanted.generate):
                return generation
        if wanted.turn.has_emitted:
            return None
        wanted.turn.begin_again()
        return self._begin(wanted)

    def _begin(self, wanted: Wanted) -> Generation:
        return Generation(
            self._answer(wanted),
            wanted.request.returns.top_logprobs,
            vocabulary_tokens=self._vocabulary_tokens,
            max_tokens=wanted.generate.sampling.max_tokens,
        )

    async def _attempt(self, wanted: Wanted, generation: Generation, lost: list[str]) -> None:
        """Takes what one engine samples, until its end or the engine's.

        Raises:
            RollmeshError: The engine is lost, or refuses the request.
        """
        spec = wanted.session.spec
        async with self._leases.lease(
            session_id=spec.session_id,
            group_id=spec.group_id,
            excluded=lost,
            deadline_ms=self._lease_timeout_ms,
        ) as grant:
            await self._generate(wanted, generation, grant)

    async def _generate(
        self, wanted: Wanted, generation: Generation, grant: router_pb2.LeaseGrant
    ) -> None:
        request = continued(wanted.generate, generation.token_ids(), uuid.uuid4().hex)
        if generation.taken:
            metrics.MIGRATIONS.inc()
        generation.begin(grant.engine_id, prompt_crc32(request))
        early = wanted.request.may_stop_early
        stream = self._engines.generate(
            grant.address,
            engine_pb2.StreamGenerateRequest(
                generate=request,
                max_chunk_tokens=_STREAMED_TOKENS if early else 2 * _COLLECTED_TOKENS,
                min_chunk_tokens=0 if early else _COLLECTED_TOKENS,
            ),
            self._turn_timeout_ms,
        )
        aborted = False
        async with aclosing(stream) as responses:
            async for response in responses:
                await self._take(wanted, generation, response)
                if generation.answer.stopped_at is not None and not aborted:
                    aborted = True  # the engine then finishes its stream, with version spans
                    await self._engines.abort(grant.address, request.request_id)
        if generation.finish is None:
            raise EngineDeadError(
                f"engine {grant.engine_id} ended its stream without a finish reason"
            )

    async def _take(
        self,
        wanted: Wanted,
        generation: Generation,
        response: engine_pb2.StreamGenerateResponse,
    ) -> None:
        await faults.reach("gateway-mid-turn")
        tokens = generation.take(response)
        if len(tokens) > _INLINE_IDS:
            events = await self._workers.run(lambda: generation.answer.feed(tokens))
        else:
            events = generation.answer.feed(tokens)
        wanted.turn.emit(self._reporter.with_tokens(wanted.request, generation, events))

    def _answer(self, wanted: Wanted) -> Answer:
        request, inside_reasoning = wanted.request, wanted.prepared.inside_reasoning
        splitter = ReasoningSplitter(inside=inside_reasoning, tags=self._format.reasoning_tags)
        return Answer(
            IncrementalDecoder(
                self._tokenizer,
                self._format.delimiters,
                hidden=() if request.keeps_stop else wanted.generate.sampling.stop_token_ids,
                special=request.shows_special,
            ),
            request.stops,
            parser=self._format.parser(
                request.render_context,
                calls=request.wanted.calls is not Calls.NONE,
                inside_reasoning=inside_reasoning,
            ),
            reasoning=splitter if self._format.reasoning else None,
            new_call_id=new_call_id,
            one_call=request.wanted.one_call,
            keeps_stop=request.keeps_stop,
        )
