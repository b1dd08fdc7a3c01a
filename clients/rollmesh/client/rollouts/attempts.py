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
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollmesh.client.client import Client
from rollmesh.client.deliveries.arrivals import Arrival, Arrivals
from rollmesh.client.rollouts.groups import GroupState, SampleOutcome
from rollmesh.client.rollouts.scoring import Episode, Scorer
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
class Place:
    """Where an attempt belongs."""

    group: GroupState
    index: int
    stop: asyncio.Future[None]
    """Done when the group needs its sessions no more."""


class Attempts:
    """Runs places; the same settings for all of a rollout."""

    def __init__(
        self, client: Client, settings: RolloutSettings, arrivals: Arrivals | None
    ) -> None:
        """Takes what every attempt needs; `arrivals` is None without `on_session`."""
        self._client = client
        self._settings = settings
        self._arrivals = arrivals
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
                outcome = await self._attempt(place, attempt)
            except Exception as error:  # noqa: BLE001 - the edge to the mesh: a lost place is data
                _log.warning("session lost", extra=_where(place, attempt, error))
                return _outcome(place, attempt, "FAILED", error=error)
            if outcome is not None:
                return outcome
            await asyncio.wait({place.stop}, timeout=backoff.next_s())
            attempt += 1

    async def _attempt(self, place: Place, attempt: int) -> SampleOutcome | None:
        """Runs an agent in a new session and closes it; returns None if another has to follow.

        Raises:
            RollmeshError: The session could not be opened, or its good end not be kept.
        """
        started_ms = clock.monotonic_ms()
        session = await self._open(place, attempt)
        ended = partial(_outcome, place, attempt, session=session, started_ms=started_ms)
        try:
            result = await self._work(place, session)
        except asyncio.CancelledError:
            session.rewards = Rewards()
            await self._abort(session)
            raise
        except Exception as error:  # noqa: BLE001 - the edge to the user's code: a failed agent is data
            return await self._failed(place, session, attempt, error, ended)
        try:
            return await self._completed(session, partial(ended, "COMPLETED", result=result))
        except InvalidFieldError as error:  # a reward of what is not there; the session is open
            return await self._failed(place, session, attempt, error, ended)

    async def _completed(
        self, session: Session, ended: Callable[[], SampleOutcome]
    ) -> SampleOutcome:
        """Closes a session and, with `on_session`, hands over what the collector delivers.

        Raises:
            InvalidFieldError: The rewards are not of this session, which is still open.
            RollmeshError: The session may be open or closed.
        """
        async with self._awaited(session) as arrival:
            await self._close(session, "COMPLETED")
            outcome = ended()
            if arrival is None or self._settings.on_session is None:
                return outcome
            try:
                delivered = await arrival.session(self._limits.delivery_s)
                await self._settings.on_session(outcome, delivered)
            except Exception as error:  # noqa: BLE001 - the edge to the user's code
                said, kind = _text(error), type(error).__name__
                _log.warning("session lost", extra=fields(session=session.session_id, error=said))
                return replace(outcome, outcome="FAILED", result=None, error=said, error_type=kind)
            return outcome

    def _awaited(self, session: Session) -> AbstractAsyncContextManager[Arrival | None]:
        return self._arrivals.awaited(session.session_id) if self._arrivals else nullcontext()

    async def _work(self, place: Place, session: Session) -> Any:
        """Returns what the runner returned; the session has its rewards by then."""
        sample = place.group.sample
        if place.stop.done():
            raise AgentStoppedError("the group had failed")
        run = find_runner(place.group.runner)

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
        self,
        place: Place,
        session: Session,
        attempt: int,
        error: Exception,
        ended: Callable[..., SampleOutcome],
    ) -> SampleOutcome | None:
        """Closes the session of a failed attempt; returns None if another has to follow."""
        again = self._retries.after(error, attempt) and not place.stop.done()
        stopped = isinstance(error, (AgentStoppedError, AgentTimeLimitError))
        outcome: Outcome = "ABORTED" if stopped else "FAILED"
        session.rewards = Rewards()
        _log.warning("agent failed", extra=_where(place, attempt, error, session.session_id))
        try:
            await self._close(session, outcome, superseded=again)
        except RollmeshError as refused:  # without its close there is no room for another attempt
            _log.warning("session left open", extra=fields(error=type(refused).__name__))
            again = False
        return None if again else ended(outcome, error=error)

    async def _open(self, place: Place, attempt: int) -> Session:
        """Opens a session; one that opens while the rollout is cancelled is closed again."""
        metadata = dict(place.group.metadata)
        if attempt > 1:
            metadata["attempt"] = str(attempt)
        opened: list[Session] = []

        async def opening() -> None:
            request = self._client.session_request(
                group_id=place.group.group_id,
                sample_index=place.index,
                group_size=place.group.size,
                sampling=place.group.sampling,
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
        """Closes on the way out: late or refused is logged, and left to the gateway's idle time."""

        async def closing() -> None:
            try:
                async with asyncio.timeout(self._limits.close_s):
                    await self._client.close_session(session, outcome="ABORTED")
            except (TimeoutError, RollmeshError) as error:
                _log.warning("session left open", extra=fields(error=type(error).__name__))

        await shielded(closing(), self._limits.close_s)


def _outcome(
    place: Place,
    attempt: int,
    outcome: Outcome,
    *,
    session: Session | None = None,
    started_ms: int = 0,
    result: Any = None,
    error: Exception | None = None,
) -> SampleOutcome:
    """Returns what came of a place; without a session where none could be opened or closed."""
    return SampleOutcome(
        group_id=place.group.group_id,
        sample_index=place.index,
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
    place: Place, attempt: int, error: Exception, session_id: str = ""
) -> dict[str, dict[str, object]]:
    return fields(
        session=session_id,
        group=place.group.group_id,
        sample=place.index,
        attempt=attempt,
        error=_text(error),
    )


def _text(error: Exception) -> str:
    return without_keys("".join(traceback.format_exception_only(error)).strip()[:_ERROR_CHARS])
