"""Scores stored sessions before delivery. A session that cannot be scored goes out unscored."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from rollmesh.collector import metrics
from rollmesh.collector.store import RETRY_MS, Store
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RepeatConflictError,
    RollmeshError,
    SessionDamagedError,
    SessionUnknownError,
    StoreAwayError,
    StoreError,
    StoreFullError,
)
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc, session_pb2

# Calls to the scorer.

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_WARNING_S = 30.0


class RemoteScorer:
    """A `ScorerService` that may be away, and may be called concurrently."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """Takes a channel, which the caller closes, and the timeout of one call."""
        self._channel = channel
        self._stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        self._timeout_s = timeout_s

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards of a session.

        Waits while the scorer cannot be reached: a scorer that restarts costs no session an
        attempt, except those that it was scoring.

        Raises:
            RollmeshError: The call failed or timed out.
        """
        await self._connected()
        request = scorer_pb2.ScoreRequest(session=record)
        with typed_errors():
            return (await self._stub.Score(request, timeout=self._timeout_s)).rewards

    async def _connected(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_WARNING_S):
                    await self._channel.channel_ready()
            except TimeoutError:
                _log.warning("scorer unreachable", extra=fields(for_s=_WARNING_S))
            else:
                return


_MOST_WAITING = 100_000
_TAKE_OVER_S = 2.0
_REQUEST_ID = "scorer"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0


def wants_score(record: session_pb2.SessionRecord) -> bool:
    """Returns whether to score a session: it has no reward, and none was announced."""
    rewarded = record.HasField("reward") or record.HasField("reward_timeout_ms")
    return not rewarded and not record.abandoned


class Scoring:
    """Queue of sessions waiting for the scorer. The sessions themselves are in the store."""

    def __init__(self, store: Store, announce: Callable[[], None], tries: int) -> None:
        """Creates an empty queue.

        Args:
            store: The store.
            announce: Called when a session has its rewards and may be deliverable.
            tries: Attempts to score a session.
        """
        self._store = store
        self._announce = announce
        self._tries = tries
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

    async def run(self, scorer: RemoteScorer, concurrency: int) -> None:
        """Scores sessions until cancelled, when the collector stops.

        Args:
            scorer: The scorer.
            concurrency: Number of sessions scored at a time.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(scorer))
            while True:
                await self._take_over()
                await asyncio.sleep(_TAKE_OVER_S)

    async def _take_over(self) -> None:
        """Queues sessions left by an earlier process or a dead collector."""
        room = self._waiting.maxsize - self._waiting.qsize()
        if not room:
            return
        try:
            for session_id in await self._store.to_score(room):
                self.add(session_id)
        except (StoreAwayError, StoreFullError, StoreError) as error:
            _log.warning("store failed", extra=fields(reason=error.reason, error=str(error)))

    async def _work(self, scorer: RemoteScorer) -> None:
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

    async def _score(self, scorer: RemoteScorer, session_id: str) -> None:
        record = await _persistently(lambda: self._store.session(session_id, arrays=True))
        if not wants_score(record):
            return
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        for attempt in range(1, self._tries + 1):
            try:
                rewards = await scorer.score(record)
                await self._set(session_id, rewards)
            except RepeatConflictError:  # another collector, which was thought dead, scored it
                return
            except InvalidFieldError as error:  # a retry would fail the same way
                self._failed(session_id, error)
                break
            except RollmeshError as error:
                self._failed(session_id, error)
                if attempt < self._tries:
                    await asyncio.sleep(backoff.next_s())
            else:
                metrics.SCORES.labels("scored").inc()
                return
        metrics.SCORES.labels("given_up").inc()
        await self._set(session_id, session_pb2.SessionRewards())

    def _failed(self, session_id: str, error: RollmeshError) -> None:
        metrics.SCORES.labels("failed").inc()
        _log.warning(
            "session not scored",
            extra=fields(session_id=session_id, reason=error.reason, error=str(error)),
        )

    async def _set(self, session_id: str, rewards: session_pb2.SessionRewards) -> None:
        await _persistently(
            lambda: self._store.set_rewards(
                session_id, rewards, _REQUEST_ID, clock.steady_unix_ms()
            )
        )
        self._announce()


async def _persistently(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Makes a call of the store, retrying until the store can answer."""
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    while True:
        try:
            return await call()
        except (StoreAwayError, StoreFullError, StoreError):
            await asyncio.sleep(backoff.next_s())
