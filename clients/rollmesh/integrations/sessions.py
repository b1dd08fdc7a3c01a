"""One agent in one session, from its opening to the record that the collector delivers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.client import AgentRunner, Client, Session, SessionResult
from rollmesh.integrations.arrivals import Arrivals
from rollmesh.runtime.errors import InvalidFieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much at once, and how long."""

    concurrency: int = 64
    """Most sessions at once."""
    agent_timeout_s: float = 1800.0
    """Longest run of one agent, seconds."""
    delivery_timeout_s: float = 600.0
    """Longest wait for a closed session, seconds."""

    def __post_init__(self) -> None:
        """Checks the limits.

        Raises:
            InvalidFieldError: One is not above zero.
        """
        for name in ("concurrency", "agent_timeout_s", "delivery_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidFieldError(name, f"is {getattr(self, name)}; give more than 0")


@dataclass(frozen=True, slots=True)
class Sample:
    """What to run."""

    prompt: Any
    """What the runner gets."""
    group_id: str
    index: int
    """Place in the group."""
    group_size: int
    sampling: Mapping[str, Any]


@dataclass(slots=True)
class SessionRuns:
    """Runs agents in sessions of one mesh."""

    client: Client
    arrivals: Arrivals
    limits: Limits
    places: asyncio.Semaphore

    async def run(
        self,
        sample: Sample,
        runner: AgentRunner,
        score: Callable[[Session, Any], None],
        keep: Callable[[SessionResult], Awaitable[None]],
    ) -> None:
        """Runs one agent; its session is acknowledged once it is kept.

        Args:
            sample: What to run.
            runner: The agent.
            score: Sets the session's reward from what the runner returned.
            keep: Puts the session, as the collector delivered it, where the trainer has it.

        Raises:
            Exception: What the agent or the mesh raised; the session is closed as FAILED.
        """
        async with (
            self.places,
            self.client.session(
                group_id=sample.group_id,
                sample_index=sample.index,
                group_size=sample.group_size,
                sampling=sample.sampling,
            ) as session,
            self.arrivals.awaited(session.session_id) as arrival,
        ):
            async with asyncio.timeout(self.limits.agent_timeout_s):
                score(session, await runner(sample.prompt, session))
            await self.client.close_session(session)
            await keep(await arrival.session(self.limits.delivery_timeout_s))
