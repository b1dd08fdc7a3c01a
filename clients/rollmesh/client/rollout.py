"""Runs agents: prompts times n sessions, a cap on how many at once, failures kept apart."""

import asyncio
import logging
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from rollmesh.client.client import Client, ExportForm, Session
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.logs import fields

_log = logging.getLogger(__name__)

AgentRunner: TypeAlias = Callable[[Any, Session], Awaitable[float | None]]
"""Runs one agent on one prompt in one session; returns the reward, None to leave it out."""

_RUNNERS: dict[str, AgentRunner] = {}


def register_runner(name: str, runner: AgentRunner) -> None:
    """Makes a runner known by name.

    Raises:
        InvalidFieldError: The name is taken by another one.
    """
    if _RUNNERS.get(name, runner) is not runner:
        raise InvalidFieldError("name", f"{name!r} is taken; give another")
    _RUNNERS[name] = runner


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """What came of one session."""

    group_id: str
    sample_index: int
    outcome: str
    """COMPLETED, FAILED or ABORTED (past its time)."""
    reward: float | None
    error: str = ""


@dataclass(slots=True)
class RolloutSummary:
    """What came of a rollout."""

    samples: list[SampleOutcome] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples by outcome."""
        return dict(Counter(sample.outcome for sample in self.samples))

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards that were given."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


async def rollout(  # noqa: PLR0913 - all but two are keywords with defaults
    client: Client,
    prompts: Sequence[Any],
    *,
    runner: str | AgentRunner,
    n: int = 8,
    concurrency: int = 64,
    timeout_s: float = 600.0,
    sampling: Mapping[str, Any] | None = None,
    export: ExportForm = "leaves",
    on_sample: Callable[[SampleOutcome], None] | None = None,
) -> RolloutSummary:
    """Runs every prompt `n` times, as one group each; waits for all.

    Args:
        client: The mesh.
        prompts: What the runner gets; one group each.
        runner: A function, or the name it was registered under.
        n: Sessions per prompt.
        concurrency: Most sessions at once.
        timeout_s: Longest run of one agent, seconds.
        sampling: Defaults of all turns.
        export: In which form the sessions are delivered.
        on_sample: Called with each outcome as it comes, for progress.

    Returns:
        One outcome per session; a failed one never touches its siblings.

    Raises:
        InvalidFieldError: The runner is not known.
    """
    run = _RUNNERS.get(runner) if isinstance(runner, str) else runner
    if run is None:
        raise InvalidFieldError("runner", f"{runner!r} is not registered: {sorted(_RUNNERS)}")
    places, summary = asyncio.Semaphore(concurrency), RolloutSummary()

    async def sample(prompt: Any, group_id: str, index: int) -> None:
        session = client.session(
            group_id=group_id, sample_index=index, group_size=n, sampling=sampling, export=export
        )
        async with places:
            outcome = await _run_sample(
                client, session, partial(run, prompt), timeout_s, (group_id, index)
            )
        summary.samples.append(outcome)
        if on_sample is not None:
            on_sample(outcome)

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group_id = uuid.uuid4().hex
            for index in range(n):
                group.create_task(sample(prompt, group_id, index))
    return summary


async def _run_sample(
    client: Client,
    opening: AbstractAsyncContextManager[Session],
    run: Callable[[Session], Awaitable[float | None]],
    timeout_s: float,
    place: tuple[str, int],
) -> SampleOutcome:
    group_id, index = place
    try:
        async with opening as session:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    session.reward = await run(session)
            except TimeoutError:
                if not limit.expired():
                    raise  # the agent's own: it failed
                await client.close_session(session, outcome="ABORTED")
                return SampleOutcome(group_id, index, "ABORTED", None, f"over {timeout_s} s")
            return SampleOutcome(group_id, index, "COMPLETED", session.reward)
    except Exception as error:  # noqa: BLE001 - the edge to the user's code: a failed agent is data
        place_fields = fields(group=group_id, sample=index, error=type(error).__name__)
        _log.warning("agent failed", extra=place_fields)
        text = "".join(traceback.format_exception_only(error)).strip()
        return SampleOutcome(group_id, index, "FAILED", None, text)
