"""Runs one seat of a group: attempts, each in its own session, until one counts.

A failed attempt that is retried is closed as *superseded*: the collector keeps it, and its seat
belongs to the next attempt. The next attempt starts only after that close is durable, so a seat
never has two sessions that count.
"""

import asyncio
import inspect
import logging
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollmesh.client.client import Client
from rollmesh.client.deliveries.arrivals import Arrival, Arrivals
from rollmesh.client.rollouts.groups import GroupState, SampleOutcome
from rollmesh.client.rollouts.scoring import Episode, RewardCalls
from rollmesh.client.rollouts.settings import RolloutSettings
from rollmesh.client.rollouts.supervision import (
    AgentStoppedError,
    AgentTimeLimitError,
    supervised,
)
from rollmesh.client.runners import find_runner
from rollmesh.client.sessions.rewards import Rewards, read_rewards
from rollmesh.client.sessions.session import Outcome, Session
from rollmesh.client.shielding import shielded
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.telemetry.logs import fields, without_keys

_log = logging.getLogger(__name__)
_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Seat:
    """The seat of an attempt: a group and an index in it."""

    group: GroupState
    index: int
    stop: asyncio.Future[None]
    """Done when the group has failed and needs no more sessions."""


class Attempts:
    """Runs the seats of one rollout."""

    def __init__(
        self, client: Client, settings: RolloutSettings, arrivals: Arrivals | None
    ) -> None:
        """Takes the rollout's settings; `arrivals` is None without `on_session`."""
        self._client = client
        self._settings = settings
        self._arrivals = arrivals
        self._limits = settings.limits
        self._retries = settings.retries
        limits, reward = settings.limits, settings.reward
        self._score = reward and RewardCalls(
            reward, timeout_s=limits.reward_s, threads=settings.reward_threads
        )

    async def run(self, seat: Seat) -> SampleOutcome:
        """Runs a seat to its end and returns the outcome; errors of the agent are part of it."""
        attempt, backoff = 1, Backoff(self._retries.delay_s, math.inf)
        while True:
            try:
                outcome = await self._attempt(seat, attempt)
            except Exception as error:  # noqa: BLE001 - a lost session is an outcome
                _log.warning("session lost", extra=_where(seat, attempt, error))
                return _outcome(seat, attempt, "FAILED", error=error)
            if outcome is not None:
                return outcome
            await asyncio.wait({seat.stop}, timeout=backoff.next_s())
            attempt += 1

    async def _attempt(self, seat: Seat, attempt: int) -> SampleOutcome | None:
        """Runs an agent in a new session and closes it; returns None if it must be retried.

        Raises:
            RollmeshError: The session could not be opened, or its close was not confirmed.
        """
        started_ms = clock.monotonic_ms()
        session = await self._open(seat, attempt)
        ended = partial(_outcome, seat, attempt, session=session, started_ms=started_ms)
        try:
            result = await self._work(seat, session)
        except asyncio.CancelledError:
            session.rewards = Rewards()
            await self._abort(session)
            raise
        except Exception as error:  # noqa: BLE001 - a failed agent is an outcome
            return await self._failed(seat, session, attempt, error, ended)
        try:
            return await self._completed(session, partial(ended, "COMPLETED", result=result))
        except InvalidFieldError as error:
            if session.closed:
                raise
            # A reward names a turn or trajectory that does not exist; the session is still open.
            return await self._failed(seat, session, attempt, error, ended)

    async def _completed(
        self, session: Session, ended: Callable[[], SampleOutcome]
    ) -> SampleOutcome:
        """Closes a session and, with `on_session`, hands over what the collector delivers.

        Raises:
            InvalidFieldError: The rewards do not fit the session, which is still open.
            RollmeshError: The close was not confirmed.
        """
        async with self._awaited(session) as arrival:
            await self._close(session, "COMPLETED")
            outcome = ended()
            if arrival is None or self._settings.on_session is None:
                return outcome
            try:
                delivered = await arrival.session(self._limits.delivery_s)
                await self._settings.on_session(outcome, delivered)
            except Exception as error:  # noqa: BLE001 - the trainer's code failed
                said, kind = _text(error), type(error).__name__
                _log.warning(
                    "session lost", extra=fields(session_id=session.session_id, error=said)
                )
                return replace(outcome, outcome="FAILED", result=None, error=said, error_type=kind)
            return outcome

    def _awaited(self, session: Session) -> AbstractAsyncContextManager[Arrival | None]:
        return self._arrivals.awaited(session.session_id) if self._arrivals else nullcontext()

    async def _work(self, seat: Seat, session: Session) -> Any:
        """Runs and scores the agent; returns the runner's result."""
        sample = seat.group.sample
        if seat.stop.done():
            raise AgentStoppedError("stopped because its group failed")
        run = find_runner(seat.group.runner)

        async def agent() -> Any:
            running = run(sample, session)
            if not inspect.isawaitable(running):
                said = f"gave a {type(running).__name__}; give an asynchronous function"
                raise InvalidFieldError("runner", said)
            return await running

        timeout_s, grace_s = self._settings.timeout_s, self._limits.grace_s
        result = await supervised(agent(), timeout_s, grace_s, seat.stop)
        if self._score is None:
            scored: Any = result
        else:
            transcript = await self._client.transcript(session)
            scored = await self._score(Episode(sample, session, result, transcript))
        if scored is not None:  # otherwise the runner may have set them itself
            session.rewards = read_rewards(scored)
        return result

    async def _failed(
        self,
        seat: Seat,
        session: Session,
        attempt: int,
        error: Exception,
        ended: Callable[..., SampleOutcome],
    ) -> SampleOutcome | None:
        """Closes the session of a failed attempt; returns None if it must be retried."""
        again = self._retries.after(error, attempt) and not seat.stop.done()
        stopped = isinstance(error, (AgentStoppedError, AgentTimeLimitError))
        outcome: Outcome = "ABORTED" if stopped else "FAILED"
        session.rewards = Rewards()
        _log.warning("agent failed", extra=_where(seat, attempt, error, session.session_id))
        try:
            await self._close(session, outcome, superseded=again)
        except RollmeshError as refused:  # its seat is not free for another attempt
            _log.warning("session left open", extra=fields(error=type(refused).__name__))
            again = False
        return None if again else ended(outcome, error=error)

    async def _open(self, seat: Seat, attempt: int) -> Session:
        """Opens a session; if the rollout is cancelled meanwhile, closes it again."""
        metadata = dict(seat.group.metadata)
        if attempt > 1:
            metadata["attempt"] = str(attempt)
        opened: list[Session] = []

        async def opening() -> None:
            request = self._client.session_request(
                model=self._settings.model,
                group_id=seat.group.group_id,
                sample_index=seat.index,
                group_size=seat.group.size,
                sampling=seat.group.sampling,
                metadata=metadata,
                export=self._settings.export,
            )
            opened.append(await self._client.open_session(request))

        try:
            await shielded(opening(), self._limits.close_s)
        except asyncio.CancelledError:
            for session in opened:
                await self._abort(session)
            raise
        return opened[0]

    async def _close(self, session: Session, outcome: Outcome, *, superseded: bool = False) -> None:
        closing = self._client.close_session(
            session,
            outcome=outcome,
            superseded=superseded,
            reward_timeout_ms=(
                self._settings.reward_timeout_ms if outcome == "COMPLETED" else None
            ),
        )
        await shielded(closing, self._limits.close_s)

    async def _abort(self, session: Session) -> None:
        """Closes a session after a cancellation; on failure, the gateway's idle limit closes it."""

        async def closing() -> None:
            try:
                async with asyncio.timeout(self._limits.close_s):
                    await self._client.close_session(session, outcome="ABORTED")
            except (TimeoutError, RollmeshError) as error:
                _log.warning("session left open", extra=fields(error=type(error).__name__))

        await shielded(closing(), self._limits.close_s)


def _outcome(
    seat: Seat,
    attempt: int,
    outcome: Outcome,
    *,
    session: Session | None = None,
    started_ms: int = 0,
    result: Any = None,
    error: Exception | None = None,
) -> SampleOutcome:
    """Returns the outcome of a seat; it has no session if opening or closing it failed."""
    return SampleOutcome(
        group_id=seat.group.group_id,
        sample_index=seat.index,
        outcome=outcome,
        session_id=session.session_id if session else "",
        reward=session.reward if session else None,
        result=result,
        attempts=attempt,
        seconds=(clock.monotonic_ms() - started_ms) / 1000 if session else 0.0,
        error=_text(error) if error else "",
        error_type=type(error).__name__ if error else "",
    )


def _where(
    seat: Seat, attempt: int, error: Exception, session_id: str = ""
) -> dict[str, dict[str, object]]:
    return fields(
        session_id=session_id,
        group=seat.group.group_id,
        sample=seat.index,
        attempt=attempt,
        error=_text(error),
    )


def _text(error: Exception) -> str:
    return without_keys("".join(traceback.format_exception_only(error)).strip()[:_ERROR_CHARS])
