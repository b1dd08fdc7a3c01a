"""How one turn happens: match, prepare, lease, generate, commit."""

import asyncio
import itertools
import secrets
import string
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rollmesh.client.leases import LeaseClient
from rollmesh.gateway import journal, metrics
from rollmesh.gateway.answer import Answer
from rollmesh.gateway.continuation import Continuation
from rollmesh.gateway.detection import check_readable
from rollmesh.gateway.ends import TemplateRefusedError
from rollmesh.gateway.engines import EngineClients
from rollmesh.gateway.fidelity import Fidelity
from rollmesh.gateway.forced import Calls, constraint_of
from rollmesh.gateway.formats import AnswerFormat
from rollmesh.gateway.generation import Generation, checked_sample
from rollmesh.gateway.messages import Frame, Message, Unit, units_of
from rollmesh.gateway.reasoning import ReasoningSplitter
from rollmesh.gateway.session import Answered, Session, SessionLimits, Turn, TurnRequest
from rollmesh.gateway.special_text import SpecialText
from rollmesh.gateway.template import TemplateRenderError
from rollmesh.gateway.text import IncrementalDecoder
from rollmesh.gateway.tokenizer import ModelTokenizer, SpecialTextError
from rollmesh.gateway.tree import Match, Sample
from rollmesh.gateway.vllm_parser import VllmParser
from rollmesh.runtime import clock, faults
from rollmesh.runtime.arrays import TokenIds, pack_ids, unpack_ids, unpack_logprobs
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import (
    ContextLengthExceededError,
    DeadlineError,
    EngineDeadError,
    EngineLostError,
    InvalidConstraintError,
    InvalidMessagesError,
    RemoteError,
    RollmeshError,
)
from rollmesh.v1 import engine_pb2, router_pb2, types_pb2

_STREAMED_CHUNK = 16
_INLINE_IDS = 128  # more ids than these are decoded off the event loop
_SHORT_CHARS = 16_384  # tokenised in about 3 ms; more text than this has threads of its own
_ATTEMPTS = 3
_ID_CHARS, _ID_SIZE = string.ascii_letters + string.digits, 9

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as tokens."""

    match: Match
    new_units: list[tuple[Unit, TokenIds]]
    """Units the tree does not hold, each with the ids it adds."""
    glue: TokenIds
    """What stands between the last unit and the sampled ids."""
    prompt: bytes
    """The whole prompt, packed as it goes to the engine."""
    prompt_tokens: int
    """Number of its ids."""
    prompt_crc32: int
    """What the engine must say it received."""
    inside_reasoning: bool
    """Whether the generation prompt has opened the reasoning."""
    constraint: engine_pb2.Constraint | None
    """What the answer must be."""


class TurnRunner:
    """Runs turns; holds no state of its own."""

    def __init__(  # noqa: PLR0913 - keywords, given once
        self,
        *,
        tokenizer: ModelTokenizer,
        continuation: Continuation,
        answer_format: AnswerFormat,
        leases: LeaseClient,
        engines: EngineClients,
        database: Database,
        executor: Executor,
        vllm_parser: VllmParser | None,
        long_executor: Executor,
        max_context_tokens: int,
        special_text: SpecialText,
        limits: SessionLimits,
        rewrite_history: bool,
        lease_timeout_ms: int,
        turn_timeout_ms: int,
    ) -> None:
        """Takes what a turn needs.

        Long texts are tokenised in `long_executor`, so that no short one waits behind them.
        """
        self._tokenizer = tokenizer
        self._continuation = continuation
        self._format = answer_format
        self._leases = leases
        self._engines = engines
        self._database = database
        self._executor = executor
        self._vllm_parser = vllm_parser
        self._long_executor = long_executor
        self._max_context_tokens = max_context_tokens
        self._special_text = special_text
        self._limits = limits
        self._rewrite_history = rewrite_history
        self._lease_timeout_ms = lease_timeout_ms
        self._turn_timeout_ms = turn_timeout_ms

    async def run(self, session: Session, turn: Turn, request: TurnRequest) -> Answered:
        """Samples and commits one turn; what is on its way to the journal is not cut short.

        Raises:
            RollmeshError: Nothing was committed.
        """
        try:
            async with asyncio.timeout(self._turn_timeout_ms / 1000):
                sampled = await self._sample(session, turn, request)
        except TimeoutError as error:
            message = f"the turn took longer than {self._turn_timeout_ms} ms"
            raise DeadlineError(message) from error
        turn.committing = True
        return await self._commit(session, turn, *sampled)

    async def _sample(
        self, session: Session, turn: Turn, request: TurnRequest
    ) -> tuple[Prepared, Message, Sample, frozenset[Fidelity]]:
        if request.frame.tools_json and request.wanted.calls is not Calls.NONE:
            check_readable(self._format)
        units = units_of(request.messages)
        self._limits.check(session)
        match = session.tree.match(request.frame, units)
        prepared = await self._off_loop(
            lambda: self._prepare(match, request, units),
            is_long=_new_chars(match, request.frame, units) > _SHORT_CHARS,
        )
        sampling = self._sampling(request, prepared.prompt_tokens)
        generation = await self._generate_somewhere(session, turn, request, prepared, sampling)
        turn.emit(generation.answer.end_text())
        if self._vllm_parser is not None and (whole := generation.answer.whole) is not None:
            whole.take(await self._vllm_parser.read(whole.text, request.frame.tools_json))
        turn.emit(generation.answer.finish())
        sample = checked_sample(
            generation,
            prompt_tokens=prepared.prompt_tokens,
            prompt_crc32=prepared.prompt_crc32,
        )
        reasons = set(prepared.match.reasons)
        if generation.answer.malformed:
            reasons.add(Fidelity.MALFORMED_TOOL_CALL)
        if generation.answer.stopped_at is not None:
            reasons.add(Fidelity.STOP_STRING)
        if prepared.constraint is not None:
            reasons.add(Fidelity.CONSTRAINED)
        return prepared, generation.answer.message(), sample, frozenset(reasons)

    def _heed_template(self, match: Match, frame: Frame, units: list[Unit]) -> Match:
        """Returns the match with what the template would do to its path.

        Where the template prints a sampled turn otherwise by now, the session keeps what was
        sampled, or, as the gateway is set, leaves it for what the template prints.
        """
        path = match.node.path()
        at = self._continuation.first_rewritten(path, units[match.depth :], frame)
        if at is None:
            return match
        reasons = match.reasons | {Fidelity.TEMPLATE_REWRITE}
        if not self._rewrite_history:
            return match._replace(reasons=reasons)
        parent = path[at].parent
        assert parent is not None
        return Match(parent, at, reasons)

    def _prepare(self, match: Match, request: TurnRequest, units: list[Unit]) -> Prepared:
        """Tokenises what the tree does not hold. Runs in a worker thread."""
        frame = request.frame
        try:
            match = self._heed_template(match, frame, units)
            shown, framed, reasons = self._special_text.apply(units, match.depth, frame)
            match = match._replace(reasons=match.reasons | reasons)
            fresh = self._continuation.pieces(shown, match.depth, framed)
            glue = self._continuation.glue(units, frame)
        except (TemplateRenderError, TemplateRefusedError, SpecialTextError) as error:
            raise InvalidMessagesError("messages", f"the chat template: {error}") from error
        if fresh:
            fresh[0] = self._continuation.behind(match.node, fresh[0])
        else:
            glue = self._continuation.behind(match.node, glue)
        pieces = list(zip(units[match.depth :], fresh, strict=True))
        prompt = np.concatenate([*match.node.context(), *(ids for _, ids in pieces), glue])
        opening = self._format.opening
        inside = bool(opening) and self._continuation.opens_reasoning(units, frame, opening)
        constraint = constraint_of(request.wanted, self._format, frame, inside_reasoning=inside)
        packed = pack_ids(prompt)
        crc32 = zlib.crc32(packed)
        return Prepared(match, pieces, glue, packed, len(prompt), crc32, inside, constraint)

    def _sampling(self, request: TurnRequest, prompt_tokens: int) -> types_pb2.SamplingParams:
        room = self._max_context_tokens - prompt_tokens
        if room < 1:
            raise ContextLengthExceededError(
                "messages",
                f"This model's maximum context length is {self._max_context_tokens} tokens. "
                f"However, your messages resulted in {prompt_tokens} tokens. "
                "Please reduce the length of the messages.",
                max_tokens=self._max_context_tokens,
                prompt_tokens=prompt_tokens,
            )
        sampling = types_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if not sampling.ignore_eos:
            sampling.stop_token_ids.extend(self._continuation.stop_ids)
        sampling.max_tokens = min(sampling.max_tokens, room) if sampling.max_tokens else room
        return sampling

    async def _generate_somewhere(
        self,
        session: Session,
        turn: Turn,
        request: TurnRequest,
        prepared: Prepared,
        sampling: types_pb2.SamplingParams,
    ) -> Generation:
        """Generates; begins anew on another engine as long as nothing of the answer has left."""
        lost: list[str] = []
        for attempt in itertools.count(1):
            async with self._leases.lease(
                session_id=session.spec.session_id,
                group_id=session.spec.group_id,
                excluded=lost,
                deadline_ms=self._lease_timeout_ms,
            ) as grant:
                try:
                    return await self._generate(session, turn, request, prepared, sampling, grant)
                except InvalidConstraintError as error:
                    raise request.wanted.refused(error) from error
                except (EngineDeadError, RemoteError) as error:
                    metrics.ENGINE_LOSSES.inc()
                    lost.append(grant.engine_id)
                    if turn.has_emitted or attempt == _ATTEMPTS:
                        raise EngineLostError(
                            f"engine {grant.engine_id} went away in the middle of the turn; "
                            "nothing was kept, try again",
                            retry_delay_ms=1000,
                        ) from error
            # The only engine may be the one that just came back: leave it out no longer.
            lost = lost[-1:] if attempt == 1 else []
        raise AssertionError("unreachable")

    async def _generate(
        self,
        session: Session,
        turn: Turn,
        request: TurnRequest,
        prepared: Prepared,
        sampling: types_pb2.SamplingParams,
        grant: router_pb2.LeaseGrant,
    ) -> Generation:
        address, engine_id = grant.address, grant.engine_id
        generation = Generation(
            Answer(
                IncrementalDecoder(self._tokenizer, self._format.marks),
                request.stops,
                parser=self._format.parser(
                    request.frame,
                    calls=request.wanted.calls is not Calls.NONE,
                    inside_reasoning=prepared.inside_reasoning,
                ),
                reasoning=(
                    ReasoningSplitter(
                        inside=prepared.inside_reasoning, tags=self._format.reasoning_tags
                    )
                    if self._format.reasoning
                    else None
                ),
                new_call_id=new_call_id,
                one_call=request.wanted.one_call,
            ),
            engine_id,
        )
        message = engine_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            session_id=session.spec.session_id,
            token_ids_u32le=prepared.prompt,
            sampling=sampling,
            max_chunk_tokens=_STREAMED_CHUNK if request.may_stop_early else 0,
            constraint=prepared.constraint,
        )
        stream = self._engines.generate(address, message, self._turn_timeout_ms)
        aborted = False
        async with aclosing(stream) as responses:
            async for response in responses:
                await self._take(generation, turn, response)
                if generation.answer.stopped_at is not None and not aborted:
                    aborted = True  # the engine then ends its stream, version spans included
                    await self._engines.abort(address, message.request_id)
        if generation.finish is None:
            raise EngineDeadError(f"engine {engine_id} ended its stream without a finish")
        return generation

    async def _take(
        self, generation: Generation, turn: Turn, response: engine_pb2.GenerateResponse
    ) -> None:
        await faults.reach("gateway-mid-turn")
        ids = unpack_ids(response.token_ids_u32le, "token_ids_u32le")
        generation.ids.append(ids)
        generation.logprobs.append(unpack_logprobs(response.logprobs_f32le, "logprobs_f32le"))
        if response.HasField("finish"):
            generation.finish = response.finish
        tokens = ids.tolist()
        if len(tokens) > _INLINE_IDS:
            deltas = await self._off_loop(lambda: generation.answer.feed(tokens))
        else:
            deltas = generation.answer.feed(tokens)
        turn.emit(deltas)

    async def _commit(
        self,
        session: Session,
        turn: Turn,
        prepared: Prepared,
        message: Message,
        sample: Sample,
        reasons: frozenset[Fidelity],
    ) -> Answered:
        """Attaches the turn, and takes it back where the journal cannot keep it."""
        tree, parent = session.tree, prepared.match.node
        tree.reattach(parent)
        for unit, ids in prepared.new_units:
            parent = tree.add_unit(parent, unit, ids)
        node = tree.add_sample(
            parent,
            message,
            prepared.glue,
            sample,
            reasons,
            node_id=turn.node_id,
            said=turn.lineage,
        )
        # Another turn that shares a unit with this one may not have stored it, or may fail to.
        added = [one for one in node.path() if not one.stored]
        record = journal.AnswerRecord(
            answer_id=turn.answer_id,
            fingerprint=turn.fingerprint,
            idempotency_key=turn.idempotency_key,
            created_unix_ms=clock.unix_ms(),
            lineage=turn.lineage,
        )
        session_id = session.spec.session_id
        try:
            await self._database.run(lambda db: journal.insert_turn(db, session_id, added, record))
        except RollmeshError:
            for one in reversed(added):
                tree.detach(one)
            raise
        for one in added:
            one.stored = True
        await faults.reach("gateway-after-commit")
        return Answered(node, record)

    async def _off_loop(self, work: Callable[[], _Result], *, is_long: bool = False) -> _Result:
        executor = self._long_executor if is_long else self._executor
        return await asyncio.get_running_loop().run_in_executor(executor, work)


def new_call_id() -> str:
    """Returns an id for a tool call: nine letters and digits, which every template takes."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_SIZE))


def _new_chars(match: Match, frame: Frame, units: list[Unit]) -> int:
    """Returns the size of the text that the tree does not hold, about."""
    fresh = sum(len(message.content) for unit in units[match.depth :] for message in unit)
    return fresh if match.depth else fresh + len(frame.tools_json)
