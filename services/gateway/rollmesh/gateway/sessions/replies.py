"""Replies to chat requests: picks the turn that answers, and tracks when its answer was sent."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable

from rollmesh.gateway import metrics
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.session import (
    Answered,
    Reading,
    Report,
    Session,
    StreamEvent,
    Told,
    Turn,
    TurnEvent,
    TurnRequest,
)
from rollmesh.gateway.sessions.ending import subscribed
from rollmesh.gateway.sessions.sent import SentAnswers
from rollmesh.gateway.storage import journal
from rollmesh.gateway.storage.transaction import Journal
from rollmesh.gateway.turns.prepare import PromptSize
from rollmesh.gateway.turns.reporting import retold
from rollmesh.gateway.turns.turns import TurnRunner
from rollmesh.runtime import clock
from rollmesh.runtime.errors import AnswerUnknownError, RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.tasks import begun
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import trajectory_pb2

_log = logging.getLogger(__name__)


class Replies:
    """Answers the chat requests of all sessions."""

    def __init__(
        self,
        store: Journal,
        runner: TurnRunner,
        tasks: asyncio.TaskGroup,
        begin: Callable[[Session, TurnRequest], Turn],
        sent: SentAnswers,
    ) -> None:
        """Takes the dependencies; `begin` begins a turn for a request that is not a retry."""
        self._journal = store
        self._runner = runner
        self._tasks = tasks
        self._begin = begin
        self._sent = sent

    async def chat(self, session: Session, request: TurnRequest) -> tuple[Turn, Answered]:
        """Returns a turn and its durable answer; the caller must then call `replied`.

        Raises:
            IdempotencyKeyReusedError: The key belongs to the sample of another request.
            RollmeshError: There is no answer and nothing was kept.
        """
        turn = self._join(session, request)
        async with subscribed(session, turn):
            await self._count_replay(session, turn)
            answered = await turn.result()
            await faults.reach("gateway-before-reply")
            report = await self._report(answered, request)
            turn.handed = True
            turn.waiting += 1  # until the reply is sent, an equal request is not a retry
        return turn, dataclasses.replace(answered, report=report)

    def replied(self, session: Session, turn: Turn, *, sent: bool) -> None:
        """Releases a turn that `chat` returned; `sent` is whether the complete reply was sent."""
        turn.waiting -= 1
        if sent:
            self._mark_sent(session, turn)
        if faults.is_armed("gateway-after-reply"):
            begun(self._tasks, faults.reach("gateway-after-reply"))

    async def stream_chat(
        self, session: Session, request: TurnRequest
    ) -> AsyncGenerator[TurnEvent, None]:
        """Yields the beginning and the events of an answer, then the answer once it is durable.

        Raises:
            IdempotencyKeyReusedError: The key belongs to the sample of another request.
            RollmeshError: There is no answer and nothing was kept.
        """
        turn = self._join(session, request)
        turn.stream = True
        told, again = False, list[StreamEvent]()
        async with subscribed(session, turn):
            await self._count_replay(session, turn)
            if turn.answered is not None:
                again = retold(await self._report(turn.answered, request))
            async for event in turn.events():
                if isinstance(event, Answered):
                    await faults.reach("gateway-before-reply")
                    report = None if told else await self._report(event, request)
                    if report is not None:
                        yield Told(report.tokens, None)
                    turn.handed = True
                    yield event
                    self._mark_sent(session, turn)
                    await faults.reach("gateway-after-reply")
                    continue
                yield event
                told |= isinstance(event, Told)
                for early in again if isinstance(event, Reading) else ():
                    yield early
                    told |= isinstance(early, Told)

    async def count_tokens(self, session: Session, request: TurnRequest) -> PromptSize:
        """Returns the size of a request's prompt.

        Raises:
            RollmeshError: The request has no prompt.
        """
        session.used_ms = clock.monotonic_ms()
        return await self._runner.count(session, request)

    def answered(self, session: Session, answer_id: str) -> Answered:
        """Returns an answer by its id.

        Raises:
            AnswerUnknownError: The session does not have it, or it was withdrawn.
        """
        session.used_ms = clock.monotonic_ms()
        turn = session.find_answer(answer_id)
        if turn is None or turn.answered is None:
            raise AnswerUnknownError(
                f"answer_id: this session has no answer {answer_id!r:.200}; give the id of one "
                "that it sampled"
            )
        return turn.answered

    async def withdraw(self, session: Session, answer_id: str) -> None:
        """Withdraws an answer: it is no longer found by its id, and is trained all the same.

        Raises:
            AnswerUnknownError: The session does not have it, or it was withdrawn.
            RollmeshError: It could not be stored.
        """
        answered = self.answered(session, answer_id)
        receipt = dataclasses.replace(answered.receipt, is_withdrawn=True)
        session_id = session.spec.session_id
        await self._journal.run(
            lambda tx: journal.update_answer(tx, session_id, answered.node, receipt)
        )
        turn = session.find_answer(answer_id)
        if turn is not None:
            turn.replace(dataclasses.replace(answered, receipt=receipt))

    def _join(self, session: Session, request: TurnRequest) -> Turn:
        """Returns the turn that a request retries, or begins a new one."""
        session.used_ms = clock.monotonic_ms()
        turn = session.find_turn(request) or self._begin(session, request)
        turn.tries = max(turn.tries, request.retry_count)
        return turn

    def _mark_sent(self, session: Session, turn: Turn) -> None:
        turn.sent = True
        self._sent.add(session, turn)

    async def _count_replay(self, session: Session, turn: Turn) -> None:
        if turn.answered is not None:
            metrics.REPLAYED_ANSWERS.inc()
            await self.mark_replayed(session, turn.answered.node)

    async def _report(self, answered: Answered, request: TurnRequest) -> Report | None:
        """Returns what a request wants in addition to its answer; None if nothing."""
        return await self._runner.report(answered.node, request) if request.returns else None

    async def mark_replayed(self, session: Session, node: Node) -> None:
        """Records that one sample answered more than one request.

        The mark is informational. If it cannot be stored, the committed answer is sent anyway.
        """
        if trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in node.reasons:
            return
        node.reasons |= {trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY}
        session_id = session.spec.session_id
        try:
            await self._journal.run(lambda tx: journal.update_reasons(tx, session_id, node))
        except RollmeshError as error:
            node.reasons -= {
                trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY
            }  # the next replay tries again
            _log.warning(
                "replay not recorded", extra=fields(session_id=session_id, error=str(error))
            )
