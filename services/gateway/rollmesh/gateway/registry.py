"""The sessions of one journal: opening, turns, retries, closing, and the way to the collector."""

import asyncio
import base64
import dataclasses
import hashlib
import hmac
import json
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf import json_format

from rollmesh.chat import write_message
from rollmesh.gateway import journal, metrics, outbox
from rollmesh.gateway.conversation import facts_of
from rollmesh.gateway.deps import Deps
from rollmesh.gateway.export import check_close, trajectory_id
from rollmesh.gateway.journal import (
    Journal,
    KeyRevision,
    Transaction,
    read_revisions,
    store_revision,
)
from rollmesh.gateway.limits import check_budget, check_edges, check_start
from rollmesh.gateway.outbox import Outbox, damaged_error, dead_letter
from rollmesh.gateway.requests import edges_of_close
from rollmesh.gateway.responses import (
    events_of,
    write_answer,
    write_begun,
    write_deltas,
    write_final,
    write_final_answer,
    write_prompt,
)
from rollmesh.gateway.session import Budget, GroupName, Session, SessionSpec, Turn, TurnRequest
from rollmesh.gateway.starts import Start
from rollmesh.gateway.tree import Edge, Node
from rollmesh.gateway.turn import run_turn, tokens_of
from rollmesh.gateway.upstream import UpstreamDeps, run_text_turn
from rollmesh.runtime import begun, clock
from rollmesh.runtime.errors import (
    BudgetSpentError,
    GroupSizeError,
    RepeatConflictError,
    RollmeshError,
    SessionClosedError,
    SessionKeyWrongError,
    SessionUnknownError,
    ShuttingDownError,
    StoreError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc import digest_of
from rollmesh.runtime.telemetry import content_of, current_request, fields, genai, tracing
from rollmesh.v1 import gateway_admin_pb2, gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2


def closed_error(session_id: str) -> SessionClosedError:
    """Returns the error of a session that is closed."""
    return SessionClosedError(
        f"session {session_id} is closed; open another", session_id=session_id
    )


async def end_turns(session: Session, error: RollmeshError) -> None:
    """Ends the turns that are being sampled with an error, and waits for commits."""
    session.cancel_all(error)
    committing = [turn.task for turn in session.in_flight if turn.committing and turn.task]
    if committing:
        await asyncio.wait(committing)


# Sizes of the groups that have open sessions. All sessions of a group must give the same size.
#
# Once none is open, the collector decides.


class GroupSizes:
    """The sizes of the groups with open sessions."""

    def __init__(self) -> None:
        self._open: dict[GroupName, tuple[int, int]] = {}
        """The size and the number of open sessions, by group."""

    def check(self, spec: SessionSpec) -> None:
        """Checks the size that a new session gives for its group.

        Raises:
            GroupSizeError: Another session of the group gave a different size.
        """
        known, _ = self._open.get(spec.group or ("", ""), (spec.group_size, 0))
        if known != spec.group_size:
            raise GroupSizeError(
                "group_size",
                f"is {spec.group_size}, and group {spec.group_id!r} of run {spec.run_id!r} has "
                f"{known}; give all its sessions one, and each run a run_id",
            )

    def add(self, spec: SessionSpec) -> None:
        """Records a group's session that is opened."""
        if spec.group:
            size, count = self._open.get(spec.group, (spec.group_size, 0))
            self._open[spec.group] = size, count + 1

    def remove(self, spec: SessionSpec) -> None:
        """Forgets a group's session that is no longer open."""
        if spec.group in self._open:
            size, count = self._open.pop(spec.group)
            if count > 1:
                self._open[spec.group] = size, count - 1


# Records in the journal which answers were sent. Retries depend on it after a restart.

_log = logging.getLogger(__name__)
_INTERVAL_S = 0.2
_MAX_PENDING = 4096


class SentAnswers:
    """The answers that were sent completely and are not recorded yet.

    They are written in batches, and no request waits for that. An answer may stay unrecorded: the
    process is killed, or the journal cannot be written. After a restart it counts as lost, so an
    equal request gets it again and no sample is lost.
    """

    def __init__(self, store: Journal) -> None:
        self._journal = store
        self._pending: deque[tuple[Session, int]] = deque(maxlen=_MAX_PENDING)
        self._added = asyncio.Event()

    def add(self, session: Session, turn: Turn) -> None:
        """Adds the answer of a turn. The oldest one is dropped if too many wait to be written."""
        turn.sent = True
        self._pending.append((session, turn.node_id))
        self._added.set()

    async def run(self) -> None:
        """Records answers until it is cancelled when the gateway stops."""
        while True:
            await self._added.wait()
            await asyncio.sleep(_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        """Records the answers, except answers of closed sessions and continued answers.

        A continued answer has been received, and no request can retry one of a closed session.
        """
        self._added.clear()
        rows: list[tuple[str, int]] = []
        while self._pending:
            session, node_id = self._pending.popleft()
            if not (session.closing or session.tree.nodes[node_id].children):
                rows.append((session.spec.session_id, node_id))
        if not rows:
            return
        try:
            await self._journal.run(lambda tx: journal.insert_sent(tx, rows))
        except RollmeshError as error:
            _log.warning(
                "recording sent answers failed, retries may repeat them",
                extra=fields(count=len(rows), error=str(error)),
            )


# Session keys, each of which grants access to one session only.
#
# A key is derived from the session's id, the journal's secret and the key's revision. So keys need
# not be stored, a repeated CreateSession returns the same key, and a gateway that takes over the
# journal accepts it. To end a key is to count its revision up.

_FIRST = KeyRevision(0, "")


class SessionKeys:
    """The keys of one journal's sessions. Everything here runs on the event loop."""

    def __init__(self, store: Journal, tasks: asyncio.TaskGroup) -> None:
        """Takes the journal and the owner of its writes. `restore` must be called first."""
        self._journal = store
        self._tasks = tasks
        self._revisions: dict[str, KeyRevision] = {}
        self._ending = asyncio.Lock()

    async def restore(self) -> None:
        """Reads the revisions from the journal."""
        self._revisions = await self._journal.read(read_revisions)

    def key(self, session_id: str, number: int | None = None) -> str:
        """Returns the key of a session: `rmk-<session id>-<43 characters>`.

        Args:
            session_id: Id of the session.
            number: Number of keys that were ended before it. None means the current key.
        """
        if number is None:
            number = self._revisions.get(session_id, _FIRST).number
        derived_from = f"{session_id}/{number}" if number else session_id
        digest = hmac.digest(self._journal.secret, derived_from.encode(), hashlib.sha256)
        return f"rmk-{session_id}-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"

    def check(self, session_id: str, key: str) -> None:
        """Checks a key in constant time.

        Raises:
            SessionKeyWrongError: The key is empty, was ended, or is not the key of this session.
        """
        if not hmac.compare_digest(key.encode(), self.key(session_id).encode()):
            problem = "does not open this session" if key else "is empty"
            raise SessionKeyWrongError(
                f"session_key: {problem}; give the key that CreateSession returned with the id, "
                "or the one that followed it"
            )

    async def revoke(self, session_id: str, key: str | None, request_id: str) -> str:
        """Ends a key and returns its successor, once that is durable.

        A caller that leaves does not stop it: the journal and this process must agree.

        Args:
            session_id: Id of the session.
            key: The key. None means the current one, for an operator.
            request_id: A repeat of the call that ended the last key changes nothing. May be empty.

        Raises:
            SessionKeyWrongError: The key is not the current one, and this is no repeat.
            RepeatConflictError: The request id ended another key of the session.
        """

        async def advance() -> str:
            async with self._ending:
                revision = self.next_revision(session_id, key, request_id)
                if revision is not None:
                    await self._journal.run(lambda tx: store_revision(tx, session_id, revision))
                    self._revisions[session_id] = revision
                return self.key(session_id)

        return await asyncio.shield(begun(self._tasks, advance()))

    def next_revision(
        self, session_id: str, key: str | None, request_id: str
    ) -> KeyRevision | None:
        """Returns the revision that follows if a key is ended, or None for a repeat.

        Raises:
            SessionKeyWrongError: The key is not the current one, and this is no repeat.
            RepeatConflictError: The request id ended another key of the session.
        """
        number, ended_by = self._revisions.get(session_id, _FIRST)
        named = request_id
        if key is None:
            # An operator's id returns no key, so it must not equal any that comes with a key. Those
            # have 128 characters at most.
            named = f"operator:{hashlib.sha512(request_id.encode()).hexdigest()}"
        is_repeat = bool(request_id) and named == ended_by
        if key is None:
            return None if is_repeat else KeyRevision(number + 1, named)
        if is_repeat:
            ended = self.key(session_id, number - 1)
            if hmac.compare_digest(key.encode(), ended.encode()):
                return None
        self.check(session_id, key)
        if is_repeat:
            raise RepeatConflictError(
                f"request_id: {request_id!r} ended another key of the session; "
                "give another id to end this one"
            )
        return KeyRevision(number + 1, request_id)

    def forget(self, session_ids: Iterable[str]) -> None:
        """Forgets the revisions of sessions that the journal does not know any more."""
        for session_id in session_ids:
            self._revisions.pop(session_id, None)


_RETRY_MS = 1000
_LOST_IDS = 1024
"""Upper bound of a session's turns that had started to stream and were lost with the process."""


class Registry:
    """The sessions of one journal. Everything here runs on the event loop."""

    def __init__(
        self,
        deps: Deps | UpstreamDeps,
        store: Journal,
        outbox: Outbox,
        tasks: asyncio.TaskGroup,
        groups: GroupSizes,
    ) -> None:
        """Starts without sessions. Call `restore` to load the journal's."""
        self.deps = deps
        """What turns are run with."""
        self.tasks = tasks
        """Owns the turns."""
        self.journal = store
        """Where its sessions are stored."""
        self.outbox = outbox
        """Its closed sessions on their way to the collector."""
        self._groups = groups
        self._new_tree = deps.new_tree
        self._sessions: dict[str, Session] = {}
        self.named_adapters: Counter[tuple[str, int]] = Counter()
        """The adapter revisions that open sessions name, with the number of sessions."""
        self._by_request_id: dict[str, asyncio.Future[SessionSpec]] = {}
        """The sessions that request ids opened, also while they are being written."""
        self._closed: set[str] = set()
        self._opens: dict[str, SessionSpec] = {}
        """New sessions that are being written to the journal, by id."""
        self._closing: dict[str, tuple[bytes, asyncio.Future[list[str]]]] = {}
        """Closes that are being written to the journal, each with the digest of its request."""
        self._refusal: RollmeshError | None = None
        self._empty_since_ms: int | None = None
        self.over = asyncio.Event()
        """Set when the journal was given up or lost."""
        self.sent = SentAnswers(store)
        self.keys = SessionKeys(store, tasks)
        outbox.forgotten = self._forget_closes

    @property
    def live_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def sessions(self) -> Iterable[Session]:
        """The open sessions."""
        return (one for one in self._sessions.values() if not one.closing)

    @property
    def booked_sessions(self) -> int:
        """Number of open sessions, including sessions that are being opened."""
        return len(self._sessions) + len(self._opens)

    @property
    def is_busy(self) -> bool:
        """Whether turns run, or sessions are being opened or closed."""
        in_flight = any(session.in_flight for session in self._sessions.values())
        return in_flight or bool(self._opens or self._closing)

    def empty_ms(self) -> int:
        """Returns how long the journal has had no sessions, as far as anybody looked."""
        now_ms = clock.monotonic_ms()
        if self._sessions or self.outbox.undelivered or self.outbox.dead or self.is_busy:
            self._empty_since_ms = None
            return 0
        self._empty_since_ms = self._empty_since_ms or now_ms
        return now_ms - self._empty_since_ms

    async def restore(self) -> None:
        """Rebuilds the open sessions from the journal.

        Raises:
            StoreError: The journal has open sessions of a model with another name.
        """
        sessions, damaged = await self.journal.read(
            lambda tx: journal.read_open(tx, self._new_tree)
        )
        served = self.deps.config.model
        others = [one.spec.model for one in sessions if one.spec.model != served]
        if others:
            raise StoreError(
                f"the journal holds {len(others)} open sessions of model {others[0]!r}, and this "
                f"gateway serves {served!r}; serve them under that name until they are closed, or "
                "name another data_dir"
            )
        for session in sessions:
            self.reopen(session)
        self._closed |= await self.journal.read(outbox.read_closes)
        await self.keys.restore()
        await self.outbox.restore()
        reason = gateway_admin_pb2.DEAD_LETTER_REASON_DAMAGED
        letters = [dead_letter(id_, reason, error) for id_, error in damaged.items()]
        await self.outbox.set_aside(letters)
        _log.info(
            "sessions were restored",
            extra=fields(
                journal=self.journal.journal_id,
                open=len(sessions),
                closed=len(self._closed),
                dead_letters=len(self.outbox.dead),
            ),
        )

    def reopen(self, session: Session) -> None:
        """Adds a session from the journal to the open sessions."""
        spec = session.spec
        session.tree.skip_ids(_LOST_IDS)
        self._groups.add(spec)
        if spec.request_id and spec.request_id not in self._by_request_id:
            opened: asyncio.Future[SessionSpec] = asyncio.get_running_loop().create_future()
            opened.set_result(spec)
            self._by_request_id[spec.request_id] = opened
        self._sessions[spec.session_id] = session
        self.named_adapters.update(spec.named_adapters)

    def refuse(self, error: RollmeshError) -> None:
        """Refuses new sessions and turns from now on. The first error counts."""
        self._refusal = self._refusal or error

    def abandon(self, error: RollmeshError) -> None:
        """Gives up the sessions: their turns end, and the store refuses those being committed."""
        self._refusal = error
        for session in self._sessions.values():
            session.cancel_all(error)

    def leave(self) -> None:
        """Leaves the sessions to another gateway: their groups are no longer this one's."""
        for spec in ({id_: one.spec for id_, one in self._sessions.items()} | self._opens).values():
            self._groups.remove(spec)
        self._groups = GroupSizes()

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
            if session_id in self.outbox.dead:
                raise damaged_error(session_id)
            raise SessionUnknownError(
                f"session_id: there is no session {session_id!r}; "
                "give the id that CreateSession returned",
                session_id=session_id,
            )
        return session

    def opened(self, request_id: str) -> asyncio.Future[SessionSpec] | None:
        """Returns the open session that a request id opened, maybe while it is being written."""
        return self._by_request_id.get(request_id)

    async def create(
        self,
        request: gateway_pb2.CreateSessionRequest,
        adapters: Sequence[tuple[str, int]] = (),
        start: Start | None = None,
    ) -> SessionSpec:
        """Opens a session, with the policies that its request means, and the context of its start.

        Raises:
            SessionClosedError: The session opened by the same request id is closed.
            InvalidFieldError: The group has another size.
            SessionLimitError: The context is too large.
        """
        if self._refusal is not None:
            raise self._refusal
        session_id, config = self.journal.journal_id + secrets.token_hex(12), self.deps.config
        records_messages = config.record_messages
        if request.HasField("record_messages"):
            records_messages = request.record_messages
        records_messages |= self.deps.capture != session_pb2.CAPTURE_TOKENS
        spec = SessionSpec(
            session_id=session_id,
            opened_unix_ms=clock.unix_ms(),
            model=config.model,
            request_id=request.request_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            group_size=request.group_size or 1,
            sampling=json_format.MessageToJson(request.sampling, indent=None),
            sampling_policy=request.sampling_policy or sampling_pb2.SAMPLING_POLICY_AGENT,
            metadata=dict(request.metadata),
            finish_on_disconnect=request.disconnect_policy == gateway_pb2.DISCONNECT_POLICY_FINISH,
            export_mode=request.export_mode or gateway_pb2.EXPORT_MODE_LEAVES,
            purpose=request.purpose or session_pb2.SESSION_PURPOSE_TRAIN,
            run_id=request.run_id,
            adapters=adapters,
            columns=[*request.columns],
            budget=Budget(
                request.budget.calls,
                request.budget.sampled_tokens,
                request.budget.time_ms,
                request.budget.action == gateway_pb2.BUDGET_ACTION_REFUSE,
            ),
            message_bytes=config.max_session_message_bytes if records_messages else 0,
            capture=self.deps.capture,
            tokenizer_sha256=self.deps.model_files.tokenizer_sha256,
            template_sha256=self.deps.model_files.template_sha256,
            origin=json_format.MessageToJson(start.origin, indent=None) if start else "",
        )
        session = Session(spec, self._new_tree())
        if start is not None:
            session.images = {one.sha256: facts_of(one) for one in start.images}
            for node in start.nodes:
                session.tree.attach(node)
            check_start(config, session)
        nodes = [*session.tree.nodes.values()]

        def work(tx: Transaction) -> None:
            journal.insert_session(tx, spec)
            if start is not None and nodes:
                journal.insert_turn(tx, session_id, nodes, None, start.images)

        async def opened() -> SessionSpec:
            await self.journal.run(work)
            for node in nodes:
                node.stored = True
            self._sessions[session_id] = session
            self.named_adapters.update(spec.named_adapters)
            await faults.reach("gateway-after-open")
            return spec

        def count(opening: asyncio.Future[SessionSpec]) -> None:
            del self._opens[session_id]
            if opening.cancelled() or opening.exception() is not None:
                self._groups.remove(spec)
                self._by_request_id.pop(spec.request_id, None)

        self._groups.check(spec)
        self._groups.add(spec)
        opening = begun(self.tasks, opened())
        if spec.request_id:
            self._by_request_id[spec.request_id] = opening
        self._opens[session_id] = spec
        opening.add_done_callback(count)
        return await asyncio.shield(opening)

    def begin(self, session: Session, request: TurnRequest) -> Turn:
        """Begins the turn of a request.

        Raises:
            RollmeshError: The session is closed, or the gateway is about to stop.
        """
        if self._refusal is not None:
            raise self._refusal
        if session.closing:  # it may have closed while a thread read the request
            raise closed_error(session.spec.session_id)
        turn = session.begin(request)
        for name in request.settings.sampling.ignored:
            metrics.IGNORED_SAMPLING.labels(name).inc()
        turn.task = self.tasks.create_task(self._run(session, turn, request))
        # Not inside the task: a task that is cancelled before its first step never runs.
        turn.task.add_done_callback(partial(session.end_cancelled, turn))
        return turn

    async def withdraw(self, session: Session, answer_id: str) -> None:
        """Withdraws an answer: it is no longer found by its id, and is still trained.

        Raises:
            AnswerUnknownError: The session does not have it, or it was withdrawn.
            RollmeshError: It could not be stored.
        """
        turn = session.find_answer(answer_id)
        receipt = dataclasses.replace(turn, is_withdrawn=True)
        session_id = session.spec.session_id
        await self.journal.run(
            lambda tx: journal.update_answer(tx, session_id, turn.node_id, receipt)
        )
        turn.is_withdrawn = True

    async def declare(self, session: Session, edges: Sequence[Edge]) -> int:
        """Keeps edges that the agent declares, and returns how many the session has.

        A caller that leaves does not stop it: the journal and this process must agree.

        Raises:
            SessionClosedError: The close of the session has arrived.
            SessionLimitError: The session would have too many.
            RollmeshError: They could not be stored.
        """
        session.used_ms = clock.monotonic_ms()
        return await asyncio.shield(begun(self.tasks, self._declare(session, edges)))

    async def _declare(self, session: Session, edges: Sequence[Edge]) -> int:
        session_id, known = session.spec.session_id, session.tree.edges
        async with session.declaring:
            if session.closing:
                raise closed_error(session_id)
            if self._refusal is not None:
                raise self._refusal
            new = [one for one in edges if one not in known]
            check_edges(self.deps.config, session, new)
            if new:
                facts = [("edge", *one) for one in new]
                await self.journal.run(lambda tx: journal.insert_facts(tx, session_id, facts))
                known.update(dict.fromkeys(new))
                await faults.reach("gateway-after-declare")
            return len(known)

    async def mark_spent(self, session: Session, error: BudgetSpentError) -> None:
        """Records that a budget stopped a request. A caller that leaves does not stop it.

        Raises:
            SessionClosedError: The close of the session has arrived.
            RollmeshError: It could not be stored.
        """
        kind = session_pb2.BudgetKind.Value(f"BUDGET_KIND_{error.metadata['budget'].upper()}")
        session_id, facts = session.spec.session_id, [("budget", kind)]

        async def mark() -> None:
            async with session.declaring:
                if session.closing:
                    raise closed_error(session_id)
                await self.journal.run(lambda tx: journal.insert_facts(tx, session_id, facts))
                session.tree.spent.add(kind)

        if kind not in session.tree.spent:
            await asyncio.shield(begun(self.tasks, mark()))

    async def mark_replayed(self, session: Session, turn: Turn, node: Node) -> None:
        """Records that one sample answered more than one request, and the ids of these.

        The mark is informational. If it cannot be stored, the committed answer is sent anyway.
        """
        ids, stored, reasons = turn.request_ids[turn.stored_ids :], turn.stored_ids, node.reasons
        if trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in reasons and not ids:
            return
        turn.stored_ids += len(ids)
        node.reasons |= {trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY}
        session_id = session.spec.session_id

        def work(tx: Transaction) -> None:
            journal.update_reasons(tx, session_id, node)
            facts = [("request", node.node_id, one) for one in ids]
            journal.insert_facts(tx, session_id, facts)

        try:
            await self.journal.run(work)
        except RollmeshError as error:  # the next replay tries again
            turn.stored_ids, node.reasons = stored, reasons
            _log.warning(
                "recording a replay failed, the next replay will try again",
                extra=fields(session_id=session_id, error=str(error)),
            )

    async def close(self, request: gateway_pb2.CloseSessionRequest) -> list[str]:
        """Closes a session and adds it to the outbox. A repeated close returns the same ids.

        Raises:
            SessionUnknownError: There is no session with this id.
            InvalidFieldError: A reward refers to something the session does not have. The session
                stays open.
            RepeatConflictError: It was closed with another outcome, other rewards or metadata.
        """
        session_id, digest = request.session_id, digest_of(request)
        closing: asyncio.Future[list[str]] | None = None
        ids: list[str] = []
        if session_id in self._closed:
            first, leaves = await self.journal.run(lambda tx: outbox.read_close(tx, session_id))
            ids = [trajectory_id(session_id, leaf) for leaf in leaves]
        else:
            if session_id not in self._closing:
                session = self.session(session_id)
                closing = begun(self.tasks, self._close(session, request, digest))
                self._closing[session_id] = digest, closing
                closing.add_done_callback(lambda _: self._closing.pop(session_id))
            first, closing = self._closing[session_id]
        if first != digest:
            raise RepeatConflictError(
                f"session {session_id} was already closed with another outcome, rewards or "
                "metadata, which were kept; change its rewards with SetRewards at the collector",
                session_id=session_id,
            )
        return ids if closing is None else await asyncio.shield(closing)

    async def _close(
        self, session: Session, request: gateway_pb2.CloseSessionRequest, digest: bytes
    ) -> list[str]:
        check_close(session, request.rewards)
        if edges := edges_of_close(request):
            await self._declare(session, edges)
        session.closing = True
        try:
            async with session.declaring:  # edges that are being stored are part of the record
                pass
            await end_turns(session, closed_error(request.session_id))
            # Check again: a turn that was being committed may have extended a leaf.
            leaves = check_close(session, request.rewards)
            session_id, closed_ms = request.session_id, clock.unix_ms()
            orphans = session.mark_orphans()
            stored = await asyncio.to_thread(outbox.stored_close, session, request, closed_ms)
            await self.journal.run(
                lambda tx: outbox.close_session(
                    tx, session, stored, digest, closed_ms, leaves, orphans
                )
            )
        except BaseException:
            session.closing = False
            raise
        await faults.reach("gateway-after-close")
        if tracing.is_on():
            _record_close(session, request, closed_ms)
        self._closed.add(session_id)
        self._forget(session)
        self.outbox.added()
        return [trajectory_id(session_id, leaf) for leaf in leaves]

    def unused_since(self, time_ms: int) -> Iterator[Session]:
        """Yields the open sessions that have not been used since a time of the monotonic clock.

        Each session is checked only when the iterator reaches it: closing earlier ones takes time.
        """
        for session in list(self._sessions.values()):
            if not (session.in_flight or session.closing) and session.used_ms <= time_ms:
                yield session

    async def retry_dead_letter(self, session_id: str) -> None:
        """Revives a session: a closed one is sent again, an open one is reopened.

        Raises:
            SessionUnknownError: It is not a dead letter.
            SessionDamagedError: It still cannot be read, and stays a dead letter.
        """
        session = await self.outbox.revive(session_id, self._new_tree)
        if session is not None:
            self.reopen(session)

    async def set_aside(self, session: Session, error: Exception) -> None:
        """Makes an open session a dead letter, because an error of its own prevents its close.

        Raises:
            RollmeshError: The journal cannot be written. The session stays open.
        """
        unexportable = gateway_admin_pb2.DEAD_LETTER_REASON_UNEXPORTABLE
        letter = dead_letter(session.spec.session_id, unexportable, error)
        session.closing = True
        try:
            await self.outbox.set_aside([letter])
        except BaseException:
            session.closing = False
            raise
        self._forget(session)

    def _forget(self, session: Session) -> None:
        if self._sessions.pop(session.spec.session_id, None) is not None:
            self._groups.remove(session.spec)
            self.named_adapters -= Counter(session.spec.named_adapters)
        opened = self._by_request_id.get(session.spec.request_id)
        if opened is not None and opened.done() and opened.result() is session.spec:
            del self._by_request_id[session.spec.request_id]
        self.deps.leases.forget(session.spec.session_id)

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
        """Runs one turn. Any outcome, including an unexpected error, ends it."""
        deps, store = self.deps, self.journal
        try:
            with tracing.span(f"chat {deps.config.model}", "client") as span:
                if span is not None:
                    span.describe(partial(_asked, span, session, turn, request))
                if isinstance(deps, UpstreamDeps):
                    node = await run_text_turn(deps, store, session, turn, request)
                else:
                    node = await run_turn(deps, store, session, turn, request)
                if span is not None:
                    span.describe(partial(_answered, span, session, turn, node))
            if turn.joins > 1:  # checked here: a retry may join during the commit
                await self.mark_replayed(session, turn, node)
            metrics.committed(node)
            session.end(turn, node)
        except RollmeshError as error:
            metrics.TURNS.labels(error.reason).inc()
            session.end(turn, error)
        except Exception as error:  # task edge: one turn must not end the others
            _log.exception("turn failed", extra=fields(session_id=session.spec.session_id))
            session.end(turn, RollmeshError(f"unexpected {type(error).__name__}; see the log"))


# Closes idle sessions with the turns they have.
#
# One without a turn takes no seat in its group. A client whose CreateSession got no answer may have
# opened another session elsewhere, with which the group is complete.

_CHECK_S = 60.0


async def close_idle(registry: Registry, idle_ms: int) -> None:
    """Closes sessions that have been idle for `idle_ms`. Runs until it is cancelled."""
    while True:
        for session in registry.unused_since(clock.monotonic_ms() - idle_ms):
            _log.warning("session closed as idle", extra=fields(session_id=session.spec.session_id))
            try:
                await end_session(registry, session.spec.session_id, "idle")
            except RollmeshError as error:  # retried in the next round
                _log.warning(
                    "closing an idle session failed, will retry",
                    extra=fields(session_id=session.spec.session_id, error=str(error)),
                )
        await asyncio.sleep(min(idle_ms / 4000, _CHECK_S))


async def end_session(registry: Registry, session_id: str, closed_by: str) -> list[str]:
    """Closes a session as aborted, an idle one as lost, or sets it aside if it cannot be closed.

    Returns:
        The ids of its trajectories. A repeat with the same `closed_by` returns them again.

    Raises:
        RepeatConflictError: It was closed otherwise.
    """
    is_idle = closed_by == "idle"  # nobody closed it: its runner is lost, or has lost the gateway
    request = gateway_pb2.CloseSessionRequest(
        session_id=session_id,
        outcome=(
            session_pb2.SESSION_OUTCOME_LOST if is_idle else session_pb2.SESSION_OUTCOME_ABORTED
        ),
        metadata={"closed_by": closed_by},
    )
    try:
        session = registry.session(session_id)
    except SessionClosedError:
        with suppress(RepeatConflictError):
            return await registry.close(request)
        request.superseded = True
        return await registry.close(request)
    request.superseded = not (session.tree.turns or session.in_flight)
    try:
        return await registry.close(request)
    except RollmeshError:
        raise
    except Exception as error:  # affects only this session
        await registry.set_aside(session, error)
        return []


# Chat requests that wait for turns: joining them, and replying once the answers are durable.


@dataclasses.dataclass
class ChatCall:
    """A chat request, which waits for one turn for each of its choices.

    The owner calls `leave` once the reply was sent, or will not be sent.
    """

    _registry: Registry
    _session: Session
    _turns: list[Turn] = dataclasses.field(default_factory=list)
    _changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when there is news of a turn."""

    async def answers(self, choices: Sequence[TurnRequest]) -> gateway_pb2.ChatResponse:
        """Returns the durable answers of all choices, in order.

        Raises:
            IdempotencyKeyReusedError: The key belongs to the sample of another request.
            RollmeshError: An answer failed, and nothing of it was kept.
        """
        try:
            turns = await self._join(choices)
        except BudgetSpentError as error:
            return gateway_pb2.ChatResponse(
                answers=[await self._final(error, choice) for choice in choices]
            )
        while True:
            self._changed.clear()
            outcomes = [turn.outcome for turn in turns]
            for outcome in outcomes:
                is_spent = isinstance(outcome, BudgetSpentError)
                if isinstance(outcome, RollmeshError) and not is_spent:
                    raise outcome
            if None not in outcomes:
                break
            await self._changed.wait()
        await faults.reach("gateway-before-reply")
        response = gateway_pb2.ChatResponse()
        for turn, choice in zip(turns, choices, strict=True):
            if isinstance(turn.outcome, BudgetSpentError):
                response.answers.append(await self._final(turn.outcome, choice, turn))
                continue
            tokens = None
            if choice.settings.returns_tokens and turn.node is not None:
                assert isinstance(self._registry.deps, Deps)  # an upstream gives none
                prompt, tokens = await tokens_of(
                    self._registry.deps, turn.node, choice.settings.returns
                )
                response.prompt_token_ids_u32le = prompt  # every choice has the same
            response.answers.append(write_answer(turn, tokens))
        for turn in turns:
            turn.handed = True
        return response

    async def stream(
        self, choices: Sequence[TurnRequest]
    ) -> AsyncGenerator[gateway_pb2.StreamChatResponse, None]:
        """Yields the beginning and the deltas of each answer, and the answer once it is durable.

        Raises:
            IdempotencyKeyReusedError: The key belongs to the sample of another request.
            RollmeshError: An answer failed, and nothing of it was kept.
        """
        try:
            turns = await self._join(choices)
        except BudgetSpentError as error:
            for choice in choices:
                final = await self._final(error, choice)
                yield write_begun(final.answer_id, choice.sampling, choice.choice)
                for response in write_final(final, choice.choice):
                    yield response
            return
        # The stream of each choice, and the number of its responses that were sent. A stream is
        # None until the answer is complete, if it is not streamed while it is sampled.
        given: dict[int, Sequence[gateway_pb2.StreamChatResponse] | None] = {}
        sent: dict[int, int] = {}
        for at, (turn, choice) in enumerate(zip(turns, choices, strict=True)):
            given[at] = turn.responses if turn.stream and turn.outcome is None else None
            sent[at] = 0
            yield write_begun(turn.answer_id, turn.sampling, choice.choice)
        is_prompted = False  # every choice begins with the same prompt
        while given:
            self._changed.clear()
            for at in list(given):
                turn, choice, outcome = turns[at], choices[at], turns[at].outcome
                if isinstance(outcome, Node) and given[at] is None:
                    given[at] = await self._replay(outcome, choice)
                responses = given[at] or ()
                while sent[at] < len(responses):
                    response = responses[sent[at]]
                    sent[at] += 1
                    if response.HasField("prompt"):
                        if is_prompted:
                            continue
                        is_prompted = True
                    yield response
                if outcome is None:
                    continue
                if isinstance(outcome, BudgetSpentError):
                    final = await self._final(outcome, choice, turn)
                    for response in write_final(final, choice.choice):
                        yield response
                    del given[at]
                    continue
                if isinstance(outcome, RollmeshError):
                    raise outcome
                await faults.reach("gateway-before-reply")
                turn.handed = True
                yield gateway_pb2.StreamChatResponse(
                    done=write_answer(turn), choice_index=choice.choice
                )
                self._registry.sent.add(self._session, turn)
                del given[at]
                await faults.reach("gateway-after-reply")
            if given:
                await self._changed.wait()

    def leave(self, *, sent: bool) -> None:
        """Ends the wait for all turns. The last request to leave a turn cancels it."""
        if sent and faults.is_armed("gateway-after-reply"):
            begun(self._registry.tasks, faults.reach("gateway-after-reply"))
        while self._turns:
            turn = self._turns.pop()
            if sent and turn.node is not None:
                self._registry.sent.add(self._session, turn)
            self._session.leave(turn, self._changed)

    async def _join(self, choices: Sequence[TurnRequest]) -> list[Turn]:
        """Joins the turns that the choices retry, begins the others, and returns all of them."""
        registry, session = self._registry, self._session
        session.used_ms = clock.monotonic_ms()
        known = list(map(session.find_turn, choices))
        if new := known.count(None):
            check_budget(session, new)
        turns: list[Turn] = []
        for choice, found in zip(choices, known, strict=True):
            turn = found or registry.begin(session, choice)
            session.join(turn, choice, self._changed)
            self._turns.append(turn)
            turns.append(turn)
        for turn in turns:
            if turn.node is not None:
                metrics.REPLAYED_ANSWERS.inc()
                await begun(registry.tasks, registry.mark_replayed(session, turn, turn.node))
        return turns

    async def _final(
        self, error: BudgetSpentError, choice: TurnRequest, turn: Turn | None = None
    ) -> gateway_pb2.ChatAnswer:
        """Returns the final answer to a request without room in the budget, once that is durable.

        Raises:
            BudgetSpentError: The session refuses such requests.
            RollmeshError: It could not be stored.
        """
        registry, session = self._registry, self._session
        await registry.mark_spent(session, error)
        if turn is None:
            metrics.TURNS.labels(error.reason).inc()
        if session.spec.budget.refuses:
            raise error
        answer_id = turn.answer_id if turn else session.new_answer_id()
        return write_final_answer(answer_id, error, choice, turn.prompt_tokens if turn else 0)

    async def _replay(
        self, node: Node, choice: TurnRequest
    ) -> list[gateway_pb2.StreamChatResponse]:
        """Returns the stream of a complete answer, which was not sampled for this request."""
        returns = choice.settings.returns
        assert node.sample is not None
        responses, deltas = [], write_deltas(events_of(node.messages[0]), choice.choice)
        if choice.settings.returns_tokens:
            assert isinstance(self._registry.deps, Deps)  # an upstream gives none
            packed, tokens = await tokens_of(self._registry.deps, node, returns)
            responses = [write_prompt(packed, choice.choice)] if packed else []
            deltas = write_deltas((), choice.choice, tokens) + deltas
        if deltas:
            deltas[0].delta.prompt_tokens = node.sample.prompt_tokens
        return responses + deltas


# The spans of turns and sessions, with the names of `telemetry.genai`.


def _asked(
    span: tracing.Span, session: Session, turn: Turn, request: TurnRequest
) -> dict[str, Any]:
    """Links the span of a turn to its session's, and returns its attributes at its beginning."""
    spec, settings = session.spec, request.settings
    root = tracing.place_of_session(spec.session_id)
    span.links = (root,) if root.sampled else ()
    return {
        **genai.operation(genai.CHAT, spec.session_id, spec.model),
        **genai.session(spec.run_id, spec.group_id, spec.sample_index, spec.purpose),
        **genai.request(
            request.sampling, stops=settings.stops, stream=request.stream, choice=request.choice
        ),
        genai.REQUEST_ID: current_request.get(),
        genai.NODE_ID: turn.node_id,
    }


def _answered(span: tracing.Span, session: Session, turn: Turn, node: Node) -> dict[str, Any]:
    """Returns the attributes of a turn that was committed."""
    spec, sample = session.spec, node.sample
    assert sample is not None
    message = node.messages[0]
    finish = genai.finish_reason(sample.finish, calls=bool(message.tool_calls))
    events = [name for name, _, _ in span.events]
    first_ns = next((at for name, at, _ in span.events if name == genai.FIRST_TOKENS), None)
    found = {
        **genai.response(
            spec.session_id,
            node.node_id,
            spec.model,
            finish,
            prompt_tokens=sample.prompt_tokens,
            sampled_tokens=sample.completion_tokens,
            cached_tokens=sample.cached_tokens,
        ),
        **genai.policy(sample.spans),
        **genai.training(node.reasons, turn.lineage, sample.request_ids),
        genai.TIME_TO_FIRST: None if first_ns is None else (first_ns - span.start_ns) / 1e9,
        genai.MIGRATIONS: events.count(genai.MIGRATION),
    }
    if tracing.takes_content() and node.parent is not None:
        groups = [one.messages for one in node.parent.up()]
        prompt = (write_message(one) for group in groups for one in reversed(group))
        tools = json.loads(node.render_context.tools_json or b"[]")
        count = sum(map(len, groups))
        found |= content_of(prompt, count, write_message(message), finish, tools)
    return found


def _record_close(
    session: Session, request: gateway_pb2.CloseSessionRequest, closed_ms: int
) -> None:
    """Records the root of a session's own trace, to which its end belongs."""
    spec, place = session.spec, tracing.place_of_session(session.spec.session_id)
    if not place.sampled:
        return
    reward = request.rewards.reward if request.rewards.HasField("reward") else None
    attributes = {
        **genai.operation(genai.INVOKE_AGENT, spec.session_id, spec.model),
        **genai.session(spec.run_id, spec.group_id, spec.sample_index, spec.purpose),
        **genai.ended(request.outcome, reward, session.tree.turns),
    }
    start_ns, end_ns = spec.opened_unix_ms * 1_000_000, closed_ms * 1_000_000
    span = tracing.Span(genai.INVOKE_AGENT, "internal", place, 0, start_ns, attributes)
    span.end_ns = max(start_ns, end_ns)
    tracing.record(span)
