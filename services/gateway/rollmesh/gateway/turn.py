"""Runs one turn: prompt, lease, generation, commit."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rollmesh.chat import Calls, InvalidInputError, Message, ParserEvent, new_call_id
from rollmesh.chat.parsing import Answer, check_readable, decoder_of
from rollmesh.gateway import journal, metrics
from rollmesh.gateway.conversation import facts_of
from rollmesh.gateway.deps import Deps
from rollmesh.gateway.journal import Journal, read_image_bytes
from rollmesh.gateway.limits import book_tokens, check_limits, reserve
from rollmesh.gateway.prompt import Prompt, prepare, sampling_of
from rollmesh.gateway.responses import write_deltas, write_prompt, write_tokens
from rollmesh.gateway.session import Session, Turn, TurnRequest
from rollmesh.gateway.tree import Fidelity, Node, Sample, path_bytes
from rollmesh.mesh import COLLECT_MS, MOST_COLLECTED_TOKENS, Generation, Order, Sampled, joined
from rollmesh.runtime import clock
from rollmesh.runtime.codec import CheckedImage, pack_ids
from rollmesh.runtime.errors import (
    ContextLengthExceededError,
    DeadlineError,
    EngineMismatchError,
    InvalidConstraintError,
    InvalidFieldError,
    ModelMismatchError,
    PoisonRequestError,
    PromptTooLongError,
    RollmeshError,
    TokenOutOfVocabularyError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.telemetry import genai, tracing
from rollmesh.v1 import engine_pb2, gateway_pb2, sampling_pb2, trajectory_pb2

_STREAMED_TOKENS = 16
_INLINE_IDS = 128  # more ids than these are decoded off the event loop
_MISMATCHES = (PromptTooLongError, TokenOutOfVocabularyError, ModelMismatchError)


async def run_turn(
    deps: Deps, store: Journal, session: Session, turn: Turn, request: TurnRequest
) -> Node:
    """Samples one turn and commits it to the session's journal.

    The timeout does not interrupt the commit.

    Raises:
        RollmeshError: The turn failed and nothing was committed.
    """
    timeout_ms = deps.config.turn_timeout_ms
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            prompt, draft = await _sample(deps, store, session, turn, request)
    except TimeoutError as error:
        raise DeadlineError(f"the turn took longer than {timeout_ms} ms") from error
    answer, generation = draft.answer, draft.generation
    sample = sample_of(draft, prompt.length, prompt.crc32, turn)
    if sample.columns:
        size = sum(one.data_bytes for one in sample.columns)
        reserve(deps.config, session, turn, turn.record_bytes + size)
    turn.committing = True
    # Banned ids are part of the model: they carry no reason.
    asked, how = request.sampling, request.settings.sampling
    masked = asked.allowed_token_ids or asked.logit_bias or asked.bad_sequences
    is_cut = turn.is_limited and sample.finish == sampling_pb2.FINISH_REASON_LENGTH
    reasons = set(prompt.match.reasons)
    for reason, holds in (
        (trajectory_pb2.FIDELITY_REASON_MIGRATED, generation.migrated),
        (trajectory_pb2.FIDELITY_REASON_RESTARTED, generation.restarted),
        (trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL, answer.malformed),
        (trajectory_pb2.FIDELITY_REASON_STOP_STRING, answer.stopped_at is not None),
        (
            trajectory_pb2.FIDELITY_REASON_CONSTRAINED,
            masked or prompt.bad_sequences or prompt.constraint is not None,
        ),
        (trajectory_pb2.FIDELITY_REASON_SAMPLING_CHANGED, how.is_changed),
        (trajectory_pb2.FIDELITY_REASON_TRUNCATED_SUPPORT, how.truncates),
        (
            trajectory_pb2.FIDELITY_REASON_LOGPROB_NOT_FINITE,
            not np.isfinite(sample.logprobs).all(),
        ),
        (
            trajectory_pb2.FIDELITY_REASON_COLUMNS_INCOMPLETE,
            not generation.has_all_rows(len(sample.token_ids)),
        ),
        (trajectory_pb2.FIDELITY_REASON_BUDGET, is_cut),
    ):
        if holds:
            reasons.add(reason)
    return await commit(store, session, turn, prompt, answer.message(), sample, frozenset(reasons))


async def count_tokens(deps: Deps, session: Session, request: TurnRequest) -> tuple[int, bool]:
    """Returns the number of ids in a request's prompt, and whether the prompt may be longer.

    Text that far exceeds the context is not counted to its end. Nothing is sampled.

    Raises:
        RollmeshError: The request has no prompt.
    """
    timeout_ms = deps.config.turn_timeout_ms
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            prompt = await prepare(deps, session, request)
    except ContextLengthExceededError as error:
        return int(error.metadata["prompt_tokens"]), True
    except TimeoutError as error:
        raise DeadlineError(f"counting took longer than {timeout_ms} ms") from error
    return prompt.length, False


async def tokens_of(
    deps: Deps, node: Node, returns: gateway_pb2.ReturnOptions
) -> tuple[bytes, gateway_pb2.SampledTokens]:
    """Returns the data that a request wants of a stored turn: packed prompt and sampled tokens."""
    sample, parent = node.sample, node.parent
    assert sample is not None
    assert parent is not None
    tops = sample.tops if returns.top_logprobs else None
    sampled = Sampled(sample.token_ids, sample.logprobs, tops)

    def work() -> tuple[bytes, gateway_pb2.SampledTokens]:
        prompt = np.concatenate(
            [*(one.token_ids for one in parent.path()), node.token_ids[: node.scaffold_tokens]]
        )
        packed = pack_ids(prompt) if returns.token_ids else b""
        return packed, write_tokens(sampled, returns, deps.tokenizer)

    return await deps.run(work)


@dataclass(slots=True)
class Draft:
    """An answer while it is sampled."""

    answer: Answer
    generation: Generation
    returned: int = 0
    """Number of its tokens that the stream has."""
    unreturned: list[Sampled] = field(default_factory=list)
    """The other tokens, if the stream wants tokens."""


async def _sample(
    deps: Deps, store: Journal, session: Session, turn: Turn, request: TurnRequest
) -> tuple[Prompt, Draft]:
    """Prepares the prompt of a turn, and generates its answer, whatever becomes of the engines.

    If an engine is lost, another one continues from the tokens that it sampled. Where that is not
    exact, the generation begins anew, unless part of the answer was sent.

    Raises:
        EngineLostError: The engines were lost, and the answer cannot be continued.
        GenerationAbortedError: An operator aborted it, and the answer cannot be continued.
        EngineMismatchError: An engine refused the prompt because it serves another model.
        RollmeshError: The request has no prompt, or the session has no room for it.
    """
    config, spec, settings = deps.config, session.spec, request.settings
    tools_json = settings.callable_context.tools_json
    if tools_json and settings.wanted.calls is not Calls.NONE:
        try:
            check_readable(deps.answer_format, tools_json)
        except InvalidInputError as error:
            raise InvalidFieldError(error.field, error.problem) from error
    check_limits(config, session)
    if request.shared is None:
        prompt: Prompt = await prepare(deps, session, request)
    else:
        prompt = await request.shared.get(partial(prepare, deps, session, request))
    turn.prompt_tokens = prompt.length
    if settings.returns.token_ids and turn.stream:
        turn.begin(write_prompt(prompt.packed, turn.choice))
    sampling = sampling_of(deps, request, prompt)
    await book_tokens(session, turn, sampling)
    turn.images = request.conversation.fresh
    parent = prompt.match.node  # a trajectory repeats its path
    is_tree = spec.export_mode == gateway_pb2.EXPORT_MODE_TREE
    most = (0 if is_tree else parent.record_bytes) + sampling.ByteSize()
    tokens = prompt.length - parent.end + sampling.max_tokens
    reserve(config, session, turn, most + path_bytes(tokens, len(prompt.new_groups) + 1))

    complete = engine_pb2.GenerateRequest(
        session_id=spec.session_id,
        token_ids_u32le=prompt.packed,
        sampling=sampling,
        constraint=prompt.constraint,
        top_logprobs=settings.returns.top_logprobs,
        model=config.model,
        banned_token_ids=deps.banned_ids,
        columns=spec.columns,
        routed_experts_start=max(parent.end - 1, 0) if spec.columns else 0,
        adapter=request.adapter,
    )
    for one in prompt.images:
        complete.images.add(sha256=one.sha256, offset=one.offset, length=one.length)
    one_call = deps.answer_format.one_call and bool(tools_json)
    # Whether parts of the answer are needed before it is complete.
    early = request.stream or bool(settings.stops) or settings.wanted.one_call or one_call
    order = Order(
        Generation(complete, deps.vocabulary_tokens, prompt.crc32, turn.restarted),
        spec.session_id,
        max_chunk_tokens=_STREAMED_TOKENS if early else MOST_COLLECTED_TOKENS,
        collect_ms=config.stream_interval_ms if early else COLLECT_MS,
        lease_timeout_ms=config.lease_timeout_ms,
        timeout_ms=config.turn_timeout_ms,
        is_sent=lambda: turn.has_emitted,
        group_id=spec.group_id,
        images={one.sha256: one.data for one in turn.images.values()} if turn.images else {},
        load_images=lambda wanted: store.read(
            lambda tx: read_image_bytes(tx, spec.session_id, wanted)
        ),
    )
    turn.running = parent, order
    draft = Draft(_new_answer(deps, request, prompt, sampling), order.generation)
    try:
        async with aclosing(deps.failover.run(order)) as runs:
            async for run in runs:
                if run is None:
                    turn.sampled = turn.sampled or order.generation.restarted
                    turn.begin_again()
                    order.stop_reason = None  # a stop string is void too
                    answer = _new_answer(deps, request, prompt, sampling)
                    draft = Draft(answer, order.generation)
                    continue
                if not turn.sampled:
                    tracing.note(genai.FIRST_TOKENS, {})
                turn.sampled = True
                await faults.reach("gateway-mid-turn")
                ids: list[int] = run.token_ids.tolist()
                if len(ids) > _INLINE_IDS:
                    events = await deps.run(partial(draft.answer.feed, ids))
                else:
                    events = draft.answer.feed(ids)
                if request.stream and settings.returns_tokens:
                    draft.unreturned.append(run)
                _emit(deps, draft, turn, request, events)
                if draft.answer.stopped_at is not None:
                    order.stop(sampling_pb2.FINISH_REASON_STOP)
    except PoisonRequestError:
        metrics.POISON.inc()
        raise
    except InvalidConstraintError as refusal:
        field_name = "tools_json" if settings.wanted.json_schema is None else "json_format"
        raise InvalidConstraintError(field_name, refusal.message) from refusal
    except InvalidFieldError as error:
        # The gateway placed the images: neither these nor the prompt are the agent's fault.
        if not (isinstance(error, _MISMATCHES) or error.field.startswith("images")):
            raise
        raise EngineMismatchError(
            f"engine {order.generation.engine_id} refused the prompt: {error.message}; "
            "start it and the gateway from the same model_path"
        ) from error
    answer = draft.answer
    turn.emit(write_deltas(answer.end_text(), turn.choice))
    if deps.vllm_parser is not None and (whole := answer.whole) is not None:
        whole.take(await deps.vllm_parser.read(whole.text, tools_json))
    _emit(deps, draft, turn, request, answer.finish(), over=True)
    turn.stop = answer.stop
    return prompt, draft


def _emit(
    deps: Deps,
    draft: Draft,
    turn: Turn,
    request: TurnRequest,
    events: Iterable[ParserEvent],
    *,
    over: bool = False,
) -> None:
    """Emits events, with the tokens that became certain to be kept if the stream wants them."""
    tokens = None
    if request.stream and request.settings.returns_tokens:
        certain = draft.answer.stopped_at if over else draft.answer.certain
        end = draft.generation.taken if certain is None else certain
        if end > draft.returned:
            run = joined(draft.unreturned).until(end - draft.returned)
            draft.unreturned.clear()
            draft.returned = end
            tokens = write_tokens(run, request.settings.returns, deps.tokenizer)
    turn.emit(write_deltas(events, turn.choice, tokens))


def _new_answer(
    deps: Deps, request: TurnRequest, prompt: Prompt, sampling: sampling_pb2.SamplingParams
) -> Answer:
    settings, answer_format, inside = request.settings, deps.answer_format, prompt.inside_reasoning
    parser = answer_format.parser(
        settings.callable_context,
        calls=settings.wanted.calls is not Calls.NONE,
        inside_reasoning=inside,
    )
    return Answer(
        decoder_of(
            deps.tokenizer,
            answer_format.delimiters,
            hidden=() if settings.keeps_stop else sampling.stop_token_ids,
            special=settings.shows_special,
        ),
        settings.stops,
        parser=parser,
        reasoning=answer_format.splitter(parser, inside=inside),
        new_call_id=new_call_id,
        one_call=settings.wanted.one_call or answer_format.one_call,
        keeps_stop=settings.keeps_stop,
    )


def sample_of(draft: Draft, prompt_tokens: int, prompt_crc32: int, turn: Turn) -> Sample:
    """Returns the sampled tokens of a complete answer, truncated at the stop string.

    Raises:
        RollmeshError: No token was sampled.
    """
    generation, cut = draft.generation, draft.answer.stopped_at
    finish = generation.finish
    assert finish is not None
    size = generation.taken if cut is None else cut
    if not size:
        raise RollmeshError("the engine ended without a token; nothing was committed, try again")
    sampled = joined(generation.runs).until(size)
    params = sampling_pb2.SamplingParams()
    params.CopyFrom(generation.request.sampling)  # a part of the request would keep all of it
    spans: list[sampling_pb2.VersionSpan] = []
    numerics: dict[str, sampling_pb2.Numerics] = {}
    for span in generation.spans:
        if span.start < min(span.end, size):
            one = sampling_pb2.VersionSpan()
            one.CopyFrom(span)
            one.end = min(span.end, size)
            spans.append(one)
            if span.numerics_id:
                numerics[span.numerics_id] = generation.numerics[span.numerics_id]
    return Sample(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        spans=tuple(spans),
        finish=sampling_pb2.FINISH_REASON_STOP if cut is not None else finish.reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(finish.cached_tokens, prompt_tokens),
        prompt_crc32=prompt_crc32,
        tops=sampled.tops,
        sampling=params,
        numerics=tuple(numerics.values()),
        columns=tuple(generation.columns),
        request_ids=turn.request_ids,
        begun_unix_ms=turn.begun_unix_ms,
        ended_unix_ms=max(clock.unix_ms(), turn.begun_unix_ms),
    )


async def commit(
    store: Journal,
    session: Session,
    turn: Turn,
    new: Prompt,
    message: Message,
    sample: Sample,
    reasons: frozenset[Fidelity],
) -> Node:
    """Attaches the turn, and detaches it again if the journal cannot store it."""
    tree = session.tree
    parent = tree.reattach(new.match.node)
    for group, ids, places in new.new_groups:
        parent = tree.add_messages(parent, group, ids, places, sample.columns)
    parent.seen = new.seen or parent.seen
    node = tree.add_sample(
        parent,
        message,
        new.generation_prompt,
        sample,
        reasons,
        node_id=turn.node_id,
        said=turn.lineage,
    )
    turn.is_attached, turn.booked_tokens = True, 0
    # Another turn that shares a group may not have stored it yet, or may fail to store it.
    added, one = [node], parent
    while not one.stored and one.parent is not None:
        added.append(one)
        one = one.parent
    added.reverse()
    turn.created_unix_ms, turn.awaited = clock.unix_ms(), bool(turn.readers)
    turn.stored_ids = len(turn.request_ids)
    images: list[CheckedImage] = []
    if turn.images:
        shown = {one.sha256 for node in added for one in node.images}
        images = [image for sha256, image in turn.images.items() if sha256 in shown]
    session_id = session.spec.session_id
    try:
        await store.run(lambda tx: journal.insert_turn(tx, session_id, added, turn, images))
    except Exception:
        for one in reversed(added):
            tree.detach(one)
        raise
    for one in added:
        one.stored, one.columns = True, b""
    if images:
        session.images.update({image.sha256: facts_of(image) for image in images})
    await faults.reach("gateway-after-commit")
    return node
