"""One place of a group: its attempts, each in a session of its own, until one counts.

A failed attempt that is followed by another closes *superseded*: it is kept, and its place in the
group is the next one's. That close must be known to be durable before there is a next attempt; so
a group never has two sessions in one place.
"""

import asyncio
import inspect
import logging
import math
import traceback
from dataclasses import dataclass
from typing import Any

from rollmesh.client.client import Client
from rollmesh.client.rollouts.groups import GroupState, Outcome, SampleOutcome
from rollmesh.client.rollouts.scoring import Episode, Scorer
from rollmesh.client.rollouts.settings import RolloutSettings
from rollmesh.client.rollouts.supervision import (
    AgentStoppedError,
    AgentTimeLimitError,
    shielded,
    supervised,
)
from rollmesh.client.runners import agent_name, find_runner
from rollmesh.client.sessions.rewards import Rewards, read_rewards
from rollmesh.client.sessions.session import Session
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.telemetry.logs import fields, without_keys

_log = logging.getLogger(__name__)
_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt belongs."""

    group: GroupState
    index: int
    stop: asyncio.Future[None]
    """Done when the group needs its sessions no more."""
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Ended:
    """How an attempt ended."""

    outcome: Outcome
    session: Session
    started_ms: int
    result: Any = None
    error: Exception | None = None
    again: bool = False


class Attempts:
    """Runs places; the same settings for all of a rollout."""

    def __init__(self, client: Client, settings: RolloutSettings) -> None:
        """Takes what every attempt needs."""
        self._client = client
        self._settings = settings
        self._limits = settings.limits
        self._retries = settings.retries
        limits, reward = settings.limits, settings.reward
        self._scorer = reward and Scorer(
            reward, timeout_s=limits.reward_s, threads=settings.reward_threads
        )

    async def run(self, place: Place) -> SampleOutcome:
        """Runs a place to its end; whatever the agent does becomes an outcome."""
        attempt, backoff = 1, Backoff(self._retries.delay_s, math.inf)
        while True:
            try:
                ended = await self._attempt(place, attempt)
            except Exception as error:  # noqa: BLE001 - the edge to the mesh: a lost place is data
                return _lost(place, error, attempt)
            if not ended.again:
                return _outcome(place, ended, attempt)
            await asyncio.wait({place.stop}, timeout=backoff.next_s())
            attempt += 1

    async def _attempt(self, place: Place, attempt: int) -> _Ended:
        """Runs an agent in a new session and closes it.

        Raises:
            RollmeshError: The session could not be opened, or its good end not be kept.
        """
        started_ms = clock.monotonic_ms()
        session = await self._open(place, attempt)
        try:
            result = await self._work(place, session)
        except asyncio.CancelledError:
            session.rewards = Rewards()
            closing = self._client.close_session(session, outcome="ABORTED")
            await shielded(self._within(closing), self._limits.close_s)
            raise
        except Exception as error:  # noqa: BLE001 - the edge to the user's code: a failed agent is data
            return await self._failed(place, session, attempt, error, started_ms)
        try:
            await self._close(session, "COMPLETED")
        except InvalidFieldError as error:  # a reward of what is not there; the session is open
            return await self._failed(place, session, attempt, error, started_ms)
        return _Ended("COMPLETED", session, started_ms, result)

    async def _work(self, place: Place, session: Session) -> Any:
        """Returns what the runner returned; the session has its rewards by then."""
        sample = place.group.sample
        if place.stop.done():
            raise AgentStoppedError("the group had failed")
        run = find_runner(agent_name(sample) or self._settings.runner)

        async def agent() -> Any:
            running = run(sample, session)
            if not inspect.isawaitable(running):
                said = f"gave a {type(running).__name__}; give an asynchronous function"
                raise InvalidFieldError("runner", said)
            return await running

        timeout_s, grace_s = self._settings.timeout_s, self._limits.grace_s
        result = await supervised(agent(), timeout_s, grace_s, place.stop)
        if self._scorer is None:
            scored: Any = result
        else:
            transcript = await self._client.transcript(session)
            scored = await self._scorer(Episode(sample, session, result, transcript))
        if scored is not None:  # else what the runner may have left in the session
            session.rewards = read_rewards(scored)
        return result

    async def _failed(
        self, place: Place, session: Session, attempt: int, error: Exception, started_ms: int
    ) -> _Ended:
        again = self._retries.after(error, attempt) and not place.stop.done()
        stopped = isinstance(error, (AgentStoppedError, AgentTimeLimitError))
        outcome: Outcome = "ABORTED" if stopped else "FAILED"
        session.rewards = Rewards()
        _log.warning(
            "agent failed",
            extra=fields(
                session=session.session_id,
                group=place.group.group_id,
                sample=place.index,
                attempt=attempt,
                error=type(error).__name__,
            ),
        )
        try:
            await self._close(session, outcome, superseded=again)
        except RollmeshError as refused:  # without its close there is no room for another attempt
            _log.warning("session left open", extra=fields(error=type(refused).__name__))
            again = False
        return _Ended(outcome, session, started_ms, error=error, again=again)

    async def _open(self, place: Place, attempt: int) -> Session:
        """Opens a session; one that opens while the rollout is cancelled is closed again."""
        metadata = dict(place.metadata)
        if name := agent_name(place.group.sample):
            metadata["agent_name"] = name
        if attempt > 1:
            metadata["attempt"] = str(attempt)
        opened: list[Session] = []

        async def opening() -> None:
            request = self._client.session_request(
                group_id=place.group.group_id,
                sample_index=place.index,
                group_size=place.group.size,
                sampling=self._settings.sampling,
                metadata=metadata,
                export=self._settings.export,
            )
            opened.append(await self._client.open_session(request))

        try:
            await shielded(opening(), self._limits.close_s)
        except asyncio.CancelledError:
            for session in opened:
                closing = self._client.close_session(session, outcome="ABORTED")
                await shielded(self._within(closing), self._limits.close_s)
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

    async def _within(self, closing: Any) -> None:
        """Closes on the way out: late or refused is logged, and left to the gateway's idle time."""
        try:
            async with asyncio.timeout(self._limits.close_s):
                await closing
        except (TimeoutError, RollmeshError) as error:
            _log.warning("session left open", extra=fields(error=type(error).__name__))


def _outcome(place: Place, ended: _Ended, attempt: int) -> SampleOutcome:
    return SampleOutcome(
        group_id=place.group.group_id,
        sample_index=place.index,
        outcome=ended.outcome,
        session_id=ended.session.session_id,
        reward=ended.session.reward,
        result=ended.result,
        error=_text(ended.error) if ended.error else "",
        error_type=type(ended.error).__name__ if ended.error else "",
        attempts=attempt,
        seconds=(clock.monotonic_ms() - ended.started_ms) / 1000,
    )


def _lost(place: Place, error: Exception, attempt: int) -> SampleOutcome:
    """Returns the outcome of a place whose session could not be opened or closed."""
    return SampleOutcome(
        group_id=place.group.group_id,
        sample_index=place.index,
        outcome="FAILED",
        error=_text(error),
        error_type=type(error).__name__,
        attempts=attempt,
    )


def _text(error: Exception) -> str:
    return without_keys("".join(traceback.format_exception_only(error)).strip()[:_ERROR_CHARS])
