"""Runs one turn: match, prepare, lease, generate, commit."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial

from rollmesh.chat.constraints.masks import is_masked
from rollmesh.chat.constraints.structural_tag import Calls
from rollmesh.chat.messages import Message
from rollmesh.chat.parsing.detection import check_readable
from rollmesh.chat.parsing.formats import AnswerFormat
from rollmesh.chat.parsing.vllm.client import VllmParser
from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.special_text import SpecialText
from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.gateway.conversation.limits import SessionLimits
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.reasons import Fidelity
from rollmesh.gateway.conversation.session import (
    Answered,
    PromptIds,
    Report,
    Session,
    Turn,
    TurnRequest,
)
from rollmesh.gateway.conversation.spec import AnswerReceipt
from rollmesh.gateway.conversation.tree import path_bytes
from rollmesh.gateway.export.record import record_bytes
from rollmesh.gateway.storage import journal
from rollmesh.gateway.storage.images import read_image_bytes
from rollmesh.gateway.storage.transaction import Journal
from rollmesh.gateway.turns.generate import checked_sample
from rollmesh.gateway.turns.generating import Generator
from rollmesh.gateway.turns.prepare import Prepared, Preparer, PromptSize, Workers
from rollmesh.gateway.turns.reporting import Reporter
from rollmesh.mesh.generations.engines import EngineClients
from rollmesh.mesh.leasing.leases import LeaseClient
from rollmesh.runtime import clock
from rollmesh.runtime.errors import DeadlineError, RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.v1 import gateway_pb2, trajectory_pb2


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
        workers: Workers,
        vllm_parser: VllmParser | None,
        model: str,
        max_context_tokens: int,
        vocabulary_tokens: int,
        special_text: SpecialText,
        banned_ids: Sequence[int],
        limits: SessionLimits,
        rewrite_history: bool,
        lease_timeout_ms: int,
        turn_timeout_ms: int,
    ) -> None:
        """Takes the dependencies and limits of a turn."""
        self._format = answer_format
        self._preparer = Preparer(
            tokenizer=tokenizer,
            continuation=continuation,
            answer_format=answer_format,
            workers=workers,
            max_context_tokens=max_context_tokens,
            rewrite_history=rewrite_history,
            special_text=special_text,
        )
        self._reporter = Reporter(tokenizer, workers)
        self._generator = Generator(
            tokenizer=tokenizer,
            answer_format=answer_format,
            leases=leases,
            engines=engines,
            workers=workers,
            reporter=self._reporter,
            model=model,
            vocabulary_tokens=vocabulary_tokens,
            banned_ids=banned_ids,
            lease_timeout_ms=lease_timeout_ms,
            turn_timeout_ms=turn_timeout_ms,
        )
        self._vllm_parser = vllm_parser
        self._limits = limits
        self._turn_timeout_ms = turn_timeout_ms

    async def report(self, node: Node, request: TurnRequest) -> Report:
        """Returns what a request wants from a turn in addition to its answer."""
        return await self._reporter.report(node, request)

    async def count(self, session: Session, request: TurnRequest) -> PromptSize:
        """Returns the size of a request's prompt; nothing is sampled.

        Raises:
            RollmeshError: The request has no prompt.
        """
        try:
            async with asyncio.timeout(self._turn_timeout_ms / 1000):
                return await self._preparer.count(session, request)
        except TimeoutError as error:
            message = f"counting took longer than {self._turn_timeout_ms} ms"
            raise DeadlineError(message) from error

    async def run(
        self, store: Journal, session: Session, turn: Turn, request: TurnRequest
    ) -> Answered:
        """Samples one turn and commits it to the session's journal.

        The timeout does not interrupt the commit.

        Raises:
            RollmeshError: The turn failed and nothing was committed.
        """
        try:
            async with asyncio.timeout(self._turn_timeout_ms / 1000):
                sampled = await self._sample(store, session, turn, request)
        except TimeoutError as error:
            message = f"the turn took longer than {self._turn_timeout_ms} ms"
            raise DeadlineError(message) from error
        turn.committing = True
        return await self._commit(store, session, turn, *sampled)

    async def _sample(
        self, store: Journal, session: Session, turn: Turn, request: TurnRequest
    ) -> tuple[Prepared, Message, Sample, frozenset[Fidelity]]:
        tools_json = request.callable_context.tools_json
        if tools_json and request.wanted.calls is not Calls.NONE:
            check_readable(self._format)
        self._limits.check(session)
        prepared: Prepared = await request.shared.get(
            lambda: self._preparer.begin(session, request)
        )
        turn.prompt_tokens = prepared.prompt_tokens
        if request.returns.token_ids:
            turn.begin(PromptIds(prepared.packed))
        sampling = self._preparer.sampling(request, prepared)
        known = (
            prepared.prompt.match.node.end
            if session.spec.export_mode == gateway_pb2.EXPORT_MODE_TREE
            else 0
        )
        tokens = prepared.prompt_tokens - known + sampling.max_tokens
        added = path_bytes(tokens, len(request.conversation.groups) + 1)
        turn.images = request.conversation.fresh
        self._limits.reserve(session, turn, record_bytes(session), added)
        load_images = partial(_load_images, store, session.spec.session_id)
        answering = await self._generator.generate(
            session, turn, request, prepared, sampling, load_images
        )
        answer = answering.answer
        turn.emit(answer.end_text())
        if self._vllm_parser is not None and (whole := answer.whole) is not None:
            whole.take(await self._vllm_parser.read(whole.text, tools_json))
        turn.emit(self._reporter.with_tokens(request, answering, answer.finish(), over=True))
        sample = checked_sample(
            answering,
            prompt_tokens=prepared.prompt_tokens,
            prompt_crc32=prepared.prompt_crc32,
        )
        turn.stop = answer.stop
        reasons = set(prepared.prompt.match.reasons)
        if answering.generation.migrated:
            reasons.add(trajectory_pb2.FIDELITY_REASON_MIGRATED)
        if answer.malformed:
            reasons.add(trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL)
        if answer.stopped_at is not None:
            reasons.add(trajectory_pb2.FIDELITY_REASON_STOP_STRING)
        # Banned ids are part of the model: they carry no reason.
        masked = is_masked(request.sampling) or bool(prepared.bad_sequences)
        if prepared.constraint is not None or masked:
            reasons.add(trajectory_pb2.FIDELITY_REASON_CONSTRAINED)
        return prepared, answer.message(), sample, frozenset(reasons)

    async def _commit(
        self,
        store: Journal,
        session: Session,
        turn: Turn,
        prepared: Prepared,
        message: Message,
        sample: Sample,
        reasons: frozenset[Fidelity],
    ) -> Answered:
        """Attaches the turn, and detaches it again if the journal cannot store it."""
        tree, prompt = session.tree, prepared.prompt
        parent = tree.reattach(prompt.match.node)
        for (group, ids), places in zip(prompt.new_groups, prompt.new_images, strict=True):
            parent = tree.add_messages(parent, group, ids, places)
        parent.seen = prompt.seen or parent.seen
        node = tree.add_sample(
            parent,
            message,
            prompt.generation_prompt,
            sample,
            reasons,
            node_id=turn.node_id,
            said=turn.lineage,
        )
        # Another turn that shares a group may not have stored it yet, or may fail to store it.
        added = list(itertools.takewhile(lambda one: not one.stored, node.up()))[::-1]
        receipt = AnswerReceipt(
            answer_id=turn.answer_id,
            fingerprint=turn.fingerprint,
            idempotency_key=turn.idempotency_key,
            created_unix_ms=clock.unix_ms(),
            lineage=turn.lineage,
            awaited=turn.waiting > 0,
            tries=turn.tries,
            stop=turn.stop,
        )
        session_id = session.spec.session_id
        shown = {one.sha256 for node in added for one in node.images}
        images = [image for sha256, image in turn.images.items() if sha256 in shown]
        try:
            await store.run(lambda tx: journal.insert_turn(tx, session_id, added, receipt, images))
        except RollmeshError:
            for one in reversed(added):
                tree.detach(one)
            raise
        for one in added:
            one.stored = True
        session.images.add(images)
        await faults.reach("gateway-after-commit")
        return Answered(node, receipt)


async def _load_images(store: Journal, session_id: str, wanted: Sequence[str]) -> dict[str, bytes]:
    """Returns the bytes of images of committed turns, by hash."""
    return await store.read(lambda tx: read_image_bytes(tx, session_id, wanted))
