"""The sessions of one journal: opening, turns, retries, closing, and the way to the collector."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator

from google.protobuf import json_format

from rollmesh.gateway import metrics
from rollmesh.gateway.conversation.session import (
    Answered,
    Session,
    Turn,
    TurnRequest,
)
from rollmesh.gateway.conversation.spec import SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.export.record import check_close, record_bytes, trajectory_ends
from rollmesh.gateway.export.trajectories import trajectory_id
from rollmesh.gateway.sessions.closing import check_repeat, closed_error, digest_of_close
from rollmesh.gateway.sessions.ending import cancelled, end_turns
from rollmesh.gateway.sessions.groups import GroupSizes
from rollmesh.gateway.sessions.keys import SessionKeys
from rollmesh.gateway.sessions.replies import Replies
from rollmesh.gateway.sessions.sent import SentAnswers
from rollmesh.gateway.storage import closed, journal
from rollmesh.gateway.storage.closed import Close
from rollmesh.gateway.storage.dead_letters import DeadLetters, damaged_error
from rollmesh.gateway.storage.journal import StoredSession
from rollmesh.gateway.storage.model_files import check_names
from rollmesh.gateway.storage.outbox import Outbox, dead_letter
from rollmesh.gateway.storage.transaction import Journal
from rollmesh.gateway.turns.turns import TurnRunner
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    RollmeshError,
    SessionUnknownError,
    ShuttingDownError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.tasks import begun
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import gateway_pb2

_log = logging.getLogger(__name__)
_RETRY_MS = 1000
_LOST_IDS = 1024
"""Upper bound of a session's turns that had started to stream and were lost with the process."""


class Registry:
    """The sessions of one journal; everything here runs on the event loop."""

    def __init__(  # noqa: PLR0913 - keywords, given once
        self,
        *,
        new_tree: Callable[[], Tree],
        store: Journal,
        runner: TurnRunner,
        outbox: Outbox,
        tasks: asyncio.TaskGroup,
        model: str,
        groups: GroupSizes,
        forgotten: Callable[[str], None],
    ) -> None:
        """Starts without sessions; `restore` loads those of the journal.

        Args:
            new_tree: Returns an empty tree.
            store: The journal.
            runner: Runs the turns.
            outbox: The journal's closed sessions.
            tasks: Owns the turns.
            model: Name of the model that answers.
            groups: Sizes of the groups, of all journals.
            forgotten: Called with the id of each closed session, to drop its engine affinity.
        """
        self._model = model
        self._new_tree = new_tree
        self._journal = store
        self._runner = runner
        self._outbox = outbox
        self._tasks = tasks
        self._groups = groups
        self._forgotten = forgotten
        self._sessions: dict[str, Session] = {}
        self._by_request_id: dict[str, SessionSpec] = {}
        self._closed: set[str] = set()
        self._opening: dict[str, asyncio.Future[SessionSpec]] = {}
        self._opens = 0
        """Number of new sessions that are being written to the journal."""
        self._closing: dict[str, tuple[bytes, asyncio.Future[list[str]]]] = {}
        """Closes that are being written to the journal, each with the digest of its request."""
        self._refusal: RollmeshError | None = None
        self._empty_since_ms: int | None = None
        self.over = asyncio.Event()
        """Set when the journal was given up or lost."""
        self.sent = SentAnswers(store)
        self.replies = Replies(store, runner, tasks, self._begin, self.sent)
        self.keys = SessionKeys(store, tasks)
        self.dead_letters = DeadLetters(store, outbox, new_tree, self.reopen)
        outbox.forgotten = self._forget_closes

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self._journal

    @property
    def undelivered_sessions(self) -> int:
        """Number of closed sessions that the collector has not taken."""
        return self._outbox.undelivered

    @property
    def live_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def booked_sessions(self) -> int:
        """Number of open sessions and of those that are being opened."""
        return len(self._sessions) + self._opens

    @property
    def is_busy(self) -> bool:
        """Whether turns run, or sessions are being opened or closed."""
        in_flight = any(session.in_flight for session in self._sessions.values())
        return in_flight or bool(self._opens or self._closing)

    def empty_ms(self) -> int:
        """Returns how long the journal has had no sessions, as far as anybody looked."""
        now_ms = clock.monotonic_ms()
        if self._sessions or self._outbox.undelivered or self._outbox.dead or self.is_busy:
            self._empty_since_ms = None
            return 0
        self._empty_since_ms = self._empty_since_ms or now_ms
        return now_ms - self._empty_since_ms

    async def restore(self) -> None:
        """Rebuilds the open sessions from the journal.

        Raises:
            StoreError: The journal has open sessions of a model with another name.
        """
        sessions, damaged = await self._journal.read(
            lambda tx: journal.read_open(tx, self._new_tree)
        )
        check_names([stored.spec.model for stored in sessions], self._model)
        for stored in sessions:
            self.reopen(stored)
        self._closed |= await self._journal.read(closed.read_closes)
        await self.keys.restore()
        await self._outbox.restore()
        await self._outbox.set_aside(
            [
                dead_letter(
                    id_,
                    gateway_pb2.DEAD_LETTER_REASON_DAMAGED,
                    journal.DamagedSessionError(message),
                )
                for id_, message in damaged.items()
            ]
        )
        _log.info(
            "sessions restored",
            extra=fields(
                journal=self._journal.journal_id,
                open=len(sessions),
                closed=len(self._closed),
                dead_letters=len(self._outbox.dead),
            ),
        )

    def reopen(self, stored: StoredSession) -> None:
        """Adds a session from the journal to the open sessions."""
        stored.tree.skip_ids(_LOST_IDS)
        session = Session(stored.spec, stored.tree, images=stored.images)
        for node_id, record in stored.answers.items():
            answered = Answered(stored.tree.nodes[node_id], record)
            session.restore(answered, sent=node_id in stored.sent)
        self._sessions[stored.spec.session_id] = session
        self._groups.add(stored.spec.group_id, stored.spec.group_size)
        if stored.spec.request_id:
            self._by_request_id.setdefault(stored.spec.request_id, stored.spec)

    def refuse(self, error: RollmeshError) -> None:
        """Refuses new sessions and turns from now on; the first error counts."""
        self._refusal = self._refusal or error

    def abandon(self, error: RollmeshError) -> None:
        """Gives up the sessions: their turns end, and the store refuses those being committed."""
        self._refusal = error
        for session in self._sessions.values():
            for turn in list(session.in_flight):
                if not turn.committing:
                    turn.cancel(error)

    def session(self, session_id: str) -> Session:
        """Returns an open session.

        Raises:
            SessionClosedError: The session is closed.
            SessionUnknownError: There is no session with this id.
        """
        session = self._sessions.get(session_id)
        if session is None or session.closing:
            if session is not None or session_id in self._closed:
                raise closed_error(session_id)
            if session_id in self._outbox.dead:
                raise damaged_error(session_id)
            raise SessionUnknownError(
                f"session_id: there is no session {session_id!r}; "
                "give the id that CreateSession returned",
                session_id=session_id,
            )
        return session

    def opened(self, request_id: str) -> asyncio.Future[SessionSpec] | None:
        """Returns the open session that a request id opened, maybe while it is being written."""
        opening = self._opening.get(request_id)
        spec = self._by_request_id.get(request_id)
        if opening is None and spec is not None:
            opening = asyncio.get_running_loop().create_future()
            opening.set_result(spec)
        return opening

    async def create(self, request: gateway_pb2.CreateSessionRequest) -> SessionSpec:
        """Opens a session.

        Raises:
            SessionClosedError: The session opened by the same request id is closed.
            InvalidFieldError: The group has another size.
        """
        if self._refusal is not None:
            raise self._refusal
        self._groups.check(request.group_id, request.group_size or 1)
        session_id = self._journal.journal_id + secrets.token_hex(12)
        spec = SessionSpec(
            session_id=session_id,
            opened_unix_ms=clock.unix_ms(),
            model=self._model,
            request_id=request.request_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            group_size=request.group_size or 1,
            sampling=json_format.MessageToJson(request.sampling, indent=None),
            metadata=dict(request.metadata),
            finish_on_disconnect=request.disconnect_policy == gateway_pb2.DISCONNECT_POLICY_FINISH,
            export_mode=request.export_mode or gateway_pb2.EXPORT_MODE_LEAVES,
        )
        self._groups.add(spec.group_id, spec.group_size)
        opening = begun(self._tasks, self._open(spec))
        if spec.request_id:
            self._opening[spec.request_id] = opening
            opening.add_done_callback(lambda _: self._opening.pop(spec.request_id))
        self._opens += 1
        opening.add_done_callback(lambda _: self._count_opened())
        return await asyncio.shield(opening)

    def _count_opened(self) -> None:
        self._opens -= 1

    async def _open(self, spec: SessionSpec) -> SessionSpec:
        await self._journal.run(lambda tx: journal.insert_session(tx, spec))
        self._sessions[spec.session_id] = Session(spec, self._new_tree())
        if spec.request_id:
            self._by_request_id[spec.request_id] = spec
        await faults.reach("gateway-after-open")
        return spec

    def _begin(self, session: Session, request: TurnRequest) -> Turn:
        if self._refusal is not None:
            raise self._refusal
        if session.closing:  # it may have closed while a thread read the request
            raise closed_error(session.spec.session_id)
        turn = Turn.of(request, session.spec.session_id, session.tree.reserve_id())
        session.begin(turn)
        turn.task = self._tasks.create_task(self._run(session, turn, request))
        # Not inside the task: a task that is cancelled before its first step never runs.
        turn.task.add_done_callback(lambda _: session.end(turn, cancelled()))
        return turn

    async def close(self, request: gateway_pb2.CloseSessionRequest) -> list[str]:
        """Closes a session and adds it to the outbox; a repeated close returns the same ids.

        Raises:
            SessionUnknownError: There is no session with this id.
            InvalidFieldError: A reward refers to something the session does not have. The session
                stays open.
            RepeatConflictError: It was closed with another outcome, other rewards or metadata.
        """
        session_id, digest = request.session_id, digest_of_close(request)
        if session_id in self._closed:
            first, leaves = await self._journal.run(lambda tx: closed.read_close(tx, session_id))
            check_repeat(session_id, first, digest)
            return [trajectory_id(session_id, leaf) for leaf in leaves]
        if session_id not in self._closing:
            session = self.session(session_id)
            closing = begun(self._tasks, self._close(session, request, digest))
            self._closing[session_id] = digest, closing
            closing.add_done_callback(lambda _: self._closing.pop(session_id))
        first, closing = self._closing[session_id]
        check_repeat(session_id, first, digest)
        return await asyncio.shield(closing)

    async def _close(
        self, session: Session, request: gateway_pb2.CloseSessionRequest, digest: bytes
    ) -> list[str]:
        check_close(session, request.rewards)
        session.closing = True
        try:
            await end_turns(session, closed_error(request.session_id))
            # Check again: a turn that was being committed may have extended a leaf.
            check_close(session, request.rewards)
            session_id = request.session_id
            close = Close(
                session_id,
                request.SerializeToString(),
                digest,
                clock.unix_ms(),
                record_bytes(session),
                trajectory_ends(session),
                session.mark_orphans(),
            )
            await self._journal.run(lambda tx: closed.close_session(tx, close))
        except BaseException:
            session.closing = False
            raise
        await faults.reach("gateway-after-close")
        self._closed.add(session_id)
        self._forget(session)
        self._outbox.added()
        return [trajectory_id(session_id, leaf) for leaf in close.leaves]

    def unused_since(self, time_ms: int) -> Iterator[Session]:
        """Yields the open sessions that have not been used since a time of the monotonic clock.

        Each session is checked only when the iterator reaches it: closing earlier ones takes time.
        """
        for session in list(self._sessions.values()):
            if not (session.in_flight or session.closing) and session.used_ms <= time_ms:
                yield session

    async def set_aside(self, session: Session, error: Exception) -> None:
        """Makes an open session a dead letter, because an error of its own prevents its close.

        Raises:
            RollmeshError: The journal cannot be written; the session stays open.
        """
        unexportable = gateway_pb2.DEAD_LETTER_REASON_UNEXPORTABLE
        letter = dead_letter(session.spec.session_id, unexportable, error)
        session.closing = True
        try:
            await self._outbox.set_aside([letter])
        except BaseException:
            session.closing = False
            raise
        self._forget(session)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.spec.session_id]
        if self._by_request_id.get(session.spec.request_id) is session.spec:
            del self._by_request_id[session.spec.request_id]
        self._forgotten(session.spec.session_id)

    def _forget_closes(self, session_ids: list[str]) -> None:
        self._closed.difference_update(session_ids)
        self.keys.forget(session_ids)

    async def stop(self) -> None:
        """Ends the running turns, waits for those being committed, and records sent answers."""
        error = ShuttingDownError(
            "the gateway stopped; nothing was committed", retry_delay_ms=_RETRY_MS
        )
        for session in list(self._sessions.values()):
            await end_turns(session, error)
        await self.sent.flush()

    async def _run(self, session: Session, turn: Turn, request: TurnRequest) -> None:
        """Runs one turn; any outcome, including an unexpected error, ends it."""
        try:
            answered = await self._runner.run(self._journal, session, turn, request)
            if turn.joins > 1:  # checked here: a retry may join during the commit
                await self.replies.mark_replayed(session, answered.node)
            metrics.committed(answered.node)
            session.end(turn, answered)
        except RollmeshError as error:
            metrics.TURNS.labels(error.reason).inc()
            session.end(turn, error)
        except Exception as error:  # noqa: BLE001 - task edge: one turn must not end the others
            _log.exception("turn failed", extra=fields(session_id=session.spec.session_id))
            session.end(turn, RollmeshError(f"unexpected {type(error).__name__}; see the log"))
