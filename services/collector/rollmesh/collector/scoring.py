"""Scores stored sessions before delivery: rewards by a scorer, trajectories by a teacher.

A session that the scorer cannot score goes out unscored.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import grpc

from rollmesh.collector import metrics
from rollmesh.collector.log import Unit
from rollmesh.collector.store import RETRY_MS, Store, Unscored
from rollmesh.mesh import ScoringEngines
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    RollmeshError,
    SessionDamagedError,
    SessionUnknownError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    VocabularyMismatchError,
)
from rollmesh.runtime.rpc import typed_errors
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import (
    collector_pb2 as pb,
    engine_pb2,
    scorer_pb2,
    scorer_pb2_grpc,
    session_pb2,
    trajectory_pb2,
)

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_WARNING_S = 30.0
_MOST_WAITING = 100_000
_TAKE_OVER_S = 2.0
_REQUEST_ID = "scorer"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0

# Rewards, by a `ScorerService` that may be away.


def wants_score(record: session_pb2.SessionRecord) -> bool:
    """Returns whether to score a session: it may have a reward, has none, and waits for none."""
    rewarded = record.HasField("reward") or record.HasField("reward_timeout_ms")
    is_lost = record.outcome == session_pb2.SESSION_OUTCOME_LOST or record.abandoned
    return not rewarded and not is_lost


class Scoring:
    """Queue of sessions waiting for the scorer. The sessions themselves are in the store."""

    def __init__(
        self, store: Store, announce: Callable[[], None], tries: int, timeout_s: float
    ) -> None:
        """Creates an empty queue."""
        self._store = store
        self._announce = announce
        self._tries = tries
        self._timeout_s = timeout_s
        self._waiting: asyncio.Queue[str] = asyncio.Queue(_MOST_WAITING)

    def check_room(self, count: int) -> None:
        """Rejects sessions when the queue is full.

        Raises:
            StoreFullError: The scorer cannot keep up.
        """
        if self._waiting.qsize() + count > _MOST_WAITING:
            raise StoreFullError(
                "too many sessions wait for the scorer; try again later", retry_delay_ms=RETRY_MS
            )

    def add(self, session_id: str) -> None:
        """Queues a stored session. If the queue is full, it is delivered when its wait ends."""
        if not self._waiting.full():
            self._waiting.put_nowait(session_id)

    async def run(self, scorer: grpc.aio.Channel, concurrency: int) -> None:
        """Scores sessions, `concurrency` at a time, until the collector stops and cancels it."""
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(scorer))
            while True:  # an earlier process or a dead collector may have left sessions
                try:
                    if room := self._waiting.maxsize - self._waiting.qsize():
                        for session_id in await self._store.to_score(room):
                            self.add(session_id)
                except (StoreAwayError, StoreFullError, StoreError) as error:
                    said = fields(reason=error.reason, error=str(error))
                    _log.warning("store failed", extra=said)
                await asyncio.sleep(_TAKE_OVER_S)

    async def _work(self, scorer: grpc.aio.Channel) -> None:
        while True:
            session_id = await self._waiting.get()
            try:
                await self._score(scorer, session_id)
            except (SessionUnknownError, SessionDamagedError):  # removed, or logged as damaged
                continue
            except Exception as error:  # one session must not stop the others
                _log.error(
                    "session not scored", exc_info=error, extra=fields(session_id=session_id)
                )

    async def _score(self, scorer: grpc.aio.Channel, session_id: str) -> None:
        record = await _persistently(lambda: self._store.session(session_id, arrays=True))
        if not wants_score(record):
            return
        stub = scorer_pb2_grpc.ScorerServiceStub(scorer)
        request = scorer_pb2.ScoreRequest(session=record)
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        for attempt in range(1, self._tries + 1):
            try:
                await _connected(scorer)
                with typed_errors():
                    scored = await stub.Score(request, timeout=self._timeout_s)
                await self._set(record, scored.rewards)
            except RepeatConflictError:  # another collector, which was thought dead, scored it
                return
            except RollmeshError as error:
                metrics.SCORES.labels("failed").inc()
                said = fields(session_id=session_id, reason=error.reason, error=str(error))
                _log.warning("session not scored", extra=said)
                if isinstance(error, InvalidFieldError):  # a retry would fail the same way
                    break
                if attempt < self._tries:
                    await asyncio.sleep(backoff.next_s())
            else:
                metrics.SCORES.labels("scored").inc()
                return
        metrics.SCORES.labels("given_up").inc()
        await self._set(record, session_pb2.SessionRewards())

    async def _set(
        self, record: session_pb2.SessionRecord, rewards: session_pb2.SessionRewards
    ) -> None:
        """Sets rewards, unless a client has set one while the scorer was asked."""
        is_repeat = await _persistently(
            lambda: self._store.set_rewards(
                record.session_id, rewards, _REQUEST_ID, clock.steady_unix_ms(), is_late=True
            )
        )
        if rewards.HasField("reward") and not is_repeat:
            metrics.observe_reward(record, rewards.reward)
        self._announce()


async def _connected(scorer: grpc.aio.Channel) -> None:
    """Waits while the scorer cannot be reached: its restart costs waiting sessions no attempt."""
    while True:
        try:
            async with asyncio.timeout(_WARNING_S):
                return await scorer.channel_ready()
        except TimeoutError:
            _log.warning("scorer unreachable", extra=fields(for_s=_WARNING_S))


async def _persistently(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Makes a call of the store, retrying until the store can answer."""
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    while True:
        try:
            return await call()
        except (StoreAwayError, StoreFullError, StoreError):
            await asyncio.sleep(backoff.next_s())


# Log-probabilities, by the engines of a teacher.

_AT_ONCE = 8
"""Sessions that a teacher scores for this process at the same time."""
_OF_SEQUENCE = ("token_ids_u32le", "start")
"""The fields of a refusal that another try would not change."""
_TIMEOUT_S, _LONGEST_S = 60.0, 3_600.0  # for a trajectory: doubled until that suffices


class Teachers:
    """The models of a mesh that score trajectories."""

    def __init__(self, store: Store, engines: ScoringEngines) -> None:
        self._store = store
        self._engines = engines
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By teacher."""
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By teacher and session. Consumers with the same teacher share its work."""

    async def score(self, consumer: pb.Consumer, unit: Unit, wanted: Callable[[], bool]) -> None:
        """Has the scores stored that a unit lacks. Waits while no engine of the teacher can score.

        A trajectory that the teacher cannot score is stored as refused.

        Args:
            consumer: The consumer's settings.
            unit: A unit that was fetched for it.
            wanted: Whether the consumer still waits for the unit. Otherwise the work ends early.

        Raises:
            InvalidFieldError: The consumer's settings do not fit the teacher: it has another
                tokenizer than the model of a session, or offers fewer ids at each position.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for session_id in unit.session_ids:
                    group.create_task(self._session(consumer, unit, session_id, wanted))
        except* InvalidFieldError as errors:
            raise errors.exceptions[0] from None

    async def _session(
        self, consumer: pb.Consumer, unit: Unit, session_id: str, wanted: Callable[[], bool]
    ) -> None:
        key = (consumer.teacher.SerializeToString().hex(), session_id)
        lock = self._locks.setdefault(key, asyncio.Lock())
        place = self._places.setdefault(key[0], asyncio.Semaphore(_AT_ONCE))
        backoff, limit_s = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S), _TIMEOUT_S
        while wanted():
            try:
                async with lock, place:
                    for one in await self._store.unscored(consumer, unit, session_id):
                        scores = await self._scores(consumer.teacher, one, limit_s)
                        await self._store.add_scores(consumer.teacher, one.key, scores)
                        metrics.TEACHER_SCORES.labels("scored" if scores else "refused").inc()
            except RollmeshError as error:
                if (refusal := _refusal(error)) is not None:
                    raise refusal from error
                # No engine now, an unknown model, the store, or a trajectory that takes longer.
                if error.code == "DEADLINE_EXCEEDED":
                    limit_s = min(2 * limit_s, _LONGEST_S)
                metrics.TEACHER_SCORES.labels("failed").inc()
                what = {"teacher": consumer.teacher.model, "session_id": session_id}
                said = fields(**what, reason=error.reason, error=str(error))
                _log.warning("trajectory not scored, will retry", extra=said)
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def _scores(self, teacher: pb.Teacher, one: Unscored, limit_s: float) -> bytes:
        """Returns the scores of a trajectory as they are stored. Empty bytes are a refusal."""
        start = max(one.start, 1)
        request = engine_pb2.ScoreTokensRequest(
            token_ids_u32le=one.token_ids, start=start, top_k=teacher.top_k
        )
        try:
            found, _ = await self._engines.score(
                request, limit_s, model=teacher.model, same_vocabulary_as=one.model
            )
        except InvalidFieldError as error:
            if error.field not in _OF_SEQUENCE:
                raise
            said = fields(teacher=teacher.model, session_id=one.key[0], error=str(error))
            _log.warning("trajectory refused by its teacher", extra=said)
            return b""
        return trajectory_pb2.TeacherScores(
            model=teacher.model,
            policy_version=found.policy_version,
            start=start,
            logprobs_f32le=found.logprobs_f32le,
            top_ids_u32le=found.top_ids_u32le,
            top_logprobs_f32le=found.top_logprobs_f32le,
        ).SerializeToString()


def _refusal(error: RollmeshError) -> InvalidFieldError | None:
    """Returns the refusal of a consumer's settings. None if another try may succeed."""
    if isinstance(error, VocabularyMismatchError):
        return VocabularyMismatchError("consumer.teacher.model", error.message)
    if isinstance(error, InvalidFieldError) and error.field == "top_k":
        return InvalidFieldError("consumer.teacher.top_k", error.message.removeprefix("top_k: "))
    return None
