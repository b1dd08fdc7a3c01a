"""Generates the answer of a turn: engines sample ids, and the answer is read from them."""

from collections.abc import Iterable, Sequence
from contextlib import aclosing

from rollmesh.chat.constraints.structural_tag import Calls
from rollmesh.chat.messages import new_call_id
from rollmesh.chat.parsing.answer import Answer
from rollmesh.chat.parsing.decoding import IncrementalDecoder
from rollmesh.chat.parsing.formats import AnswerFormat
from rollmesh.chat.parsing.reasoning import ReasoningSplitter
from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.gateway import metrics
from rollmesh.gateway.conversation.session import Session, Turn, TurnRequest
from rollmesh.gateway.turns.generate import Answering
from rollmesh.gateway.turns.prepare import Prepared, Workers
from rollmesh.gateway.turns.reporting import Reporter
from rollmesh.mesh.generations.engines import EngineClients
from rollmesh.mesh.generations.failover import (
    COLLECTED_TOKENS,
    MOST_COLLECTED_TOKENS,
    Failover,
    LoadImages,
    Order,
)
from rollmesh.mesh.generations.generation import Generation
from rollmesh.mesh.generations.sampled import Sampled
from rollmesh.mesh.leasing.leases import LeaseClient
from rollmesh.runtime.errors import (
    EngineMismatchError,
    InvalidConstraintError,
    InvalidFieldError,
    ModelMismatchError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from rollmesh.runtime.process import faults
from rollmesh.v1 import engine_pb2, sampling_pb2

_STREAMED_TOKENS = 16
_INLINE_IDS = 128  # more ids than these are decoded off the event loop
_MISMATCHES = (PromptTooLongError, TokenOutOfVocabularyError, ModelMismatchError)


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
        banned_ids: Sequence[int],
        lease_timeout_ms: int,
        turn_timeout_ms: int,
    ) -> None:
        """Takes the dependencies and limits of a generation.

        Ids in `banned_ids` are never sampled, whatever a request says.
        """
        self._banned_ids = banned_ids
        self._tokenizer = tokenizer
        self._format = answer_format
        self._failover = Failover(
            leases,
            engines,
            on_loss=metrics.ENGINE_LOSSES.inc,
            on_migration=metrics.MIGRATIONS.inc,
        )
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
        load_images: LoadImages,
    ) -> Answering:
        """Generates the answer of a turn, whatever becomes of the engines.

        If an engine is lost, another one continues from the tokens that it sampled. Where that is
        not exact, the generation begins anew, unless part of the answer was sent.

        Args:
            session: The session.
            turn: The turn, which gets the events.
            request: What is asked.
            prepared: The request as tokens.
            sampling: How to sample.
            load_images: Returns the bytes of earlier images when an engine asks for them.

        Raises:
            EngineLostError: The engines were lost, and the answer cannot go on.
            GenerationAbortedError: An operator aborted it, and the answer cannot go on.
            EngineMismatchError: An engine refused the prompt because it serves another model.
        """
        order = self._order(session, turn, request, prepared, sampling)
        order.images = {one.sha256: one.data for one in turn.images.values()}
        order.load_images = load_images
        try:
            return await self._answer_of(order, turn, request, prepared)
        except InvalidConstraintError as refusal:
            raise request.wanted.refused(refusal) from refusal
        except InvalidFieldError as error:
            # The gateway placed the images: neither these nor the prompt are the agent's fault.
            if not (isinstance(error, _MISMATCHES) or error.field.startswith("images")):
                raise
            raise EngineMismatchError(
                f"engine {order.generation.engine_id} refused the prompt: {error.message}; "
                "start it and the gateway from the same model_path"
            ) from error

    def _order(
        self,
        session: Session,
        turn: Turn,
        request: TurnRequest,
        prepared: Prepared,
        sampling: sampling_pb2.SamplingParams,
    ) -> Order:
        spec, early = session.spec, request.may_stop_early
        complete = engine_pb2.GenerateRequest(
            session_id=spec.session_id,
            token_ids_u32le=prepared.packed,
            sampling=sampling,
            constraint=prepared.constraint,
            top_logprobs=request.returns.top_logprobs,
            model=self._model,
            images=[
                engine_pb2.PromptImage(sha256=one.sha256, offset=one.offset, length=one.length)
                for one in prepared.images
            ],
            banned_token_ids=self._banned_ids,
        )
        return Order(
            Generation(complete, self._vocabulary_tokens, prepared.prompt_crc32),
            spec.session_id,
            max_chunk_tokens=_STREAMED_TOKENS if early else MOST_COLLECTED_TOKENS,
            min_chunk_tokens=0 if early else COLLECTED_TOKENS,
            lease_timeout_ms=self._lease_timeout_ms,
            timeout_ms=self._turn_timeout_ms,
            is_sent=lambda: turn.has_emitted,
            group_id=spec.group_id,
            prefixes=prepared.prefixes,
        )

    async def _answer_of(
        self, order: Order, turn: Turn, request: TurnRequest, prepared: Prepared
    ) -> Answering:
        stop_ids = order.generation.request.sampling.stop_token_ids
        answering = Answering(self._answer(request, prepared, stop_ids), order.generation)
        async with aclosing(self._failover.run(order)) as runs:
            async for run in runs:
                if run is None:
                    turn.begin_again()
                    order.stop_reason = None  # a stop string is void too
                    answer = self._answer(request, prepared, stop_ids)
                    answering = Answering(answer, order.generation)
                    continue
                await self._take(answering, turn, request, run)
                if answering.answer.stopped_at is not None:
                    order.stop(sampling_pb2.FINISH_REASON_STOP)
        return answering

    async def _take(
        self, answering: Answering, turn: Turn, request: TurnRequest, run: Sampled
    ) -> None:
        await faults.reach("gateway-mid-turn")
        tokens = answering.take(run)
        if len(tokens) > _INLINE_IDS:
            events = await self._workers.run(lambda: answering.answer.feed(tokens))
        else:
            events = answering.answer.feed(tokens)
        turn.emit(self._reporter.with_tokens(request, answering, events))

    def _answer(self, request: TurnRequest, prepared: Prepared, stop_ids: Iterable[int]) -> Answer:
        inside_reasoning = prepared.inside_reasoning
        splitter = ReasoningSplitter(inside=inside_reasoning, tags=self._format.reasoning_tags)
        return Answer(
            IncrementalDecoder(
                self._tokenizer,
                self._format.delimiters,
                hidden=() if request.keeps_stop else stop_ids,
                special=request.shows_special,
            ),
            request.stops,
            parser=self._format.parser(
                request.callable_context,
                calls=request.wanted.calls is not Calls.NONE,
                inside_reasoning=inside_reasoning,
            ),
            reasoning=splitter if self._format.reasoning else None,
            new_call_id=new_call_id,
            one_call=request.wanted.one_call,
            keeps_stop=request.keeps_stop,
        )
