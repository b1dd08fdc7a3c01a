"""Prompts rolled out as groups of sessions, their rows written to the TransferQueue."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields as dataclass_fields, replace
from typing import Any, TypeAlias

import numpy as np

from rollmesh.batches import rows_of
from rollmesh.client import AgentRunner, Client, MeshAddresses, Session, SessionResult
from rollmesh.integrations.arrivals import Arrivals
from rollmesh.integrations.sessions import Limits, Sample, SessionRuns
from rollmesh.integrations.verl.queue import (
    PromptStatus,
    TransferQueueWriter,
    checked_status,
    prompt_uid,
    queue_rows,
)
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, ShuttingDownError
from rollmesh.runtime.telemetry.logs import fields

Scorer: TypeAlias = Callable[
    [SessionResult, Mapping[str, Any]], Awaitable[tuple[float, dict[str, Any]]]
]
"""Gives a session that came without a reward one, and says what else there is to say."""

_log = logging.getLogger(__name__)
_SUBMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The `rollmesh` part of a trainer's configuration."""

    addresses: MeshAddresses
    runners: dict[str, str]
    """Functions as `package.module:function`, by agent name."""
    consumer: str = "verl"
    """Name at the collector; one for each trainer."""
    limits: Limits = field(default_factory=Limits)
    status: PromptStatus = "any_failed"
    """When a prompt is a failure."""
    flat_extra_fields: bool = False
    """Whether each entry of `extra_fields` is a column as well."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: The status is none.
        """
        checked_status(self.status)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None) -> "Settings":
        """Reads the settings.

        Raises:
            InvalidFieldError: One is missing, not known, or wrong.
        """
        found = {str(name): value for name, value in (config or {}).items()}
        try:
            names = ("router", "gateway", "collector", "sidecar")
            addresses = MeshAddresses(**{name: str(found.pop(name)) for name in names})
            runners = dict(found.pop("runners"))
            limits = {
                field.name: found.pop(field.name)
                for field in dataclass_fields(Limits)
                if field.name in found
            }
            return cls(addresses=addresses, runners=runners, limits=Limits(**limits), **found)
        except (KeyError, TypeError) as error:
            raise InvalidFieldError("rollmesh", f"{error}; see docs/trainers.md") from error


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to roll out."""

    row: dict[str, Any]
    """The trainer's columns; the runner gets them, and the rows carry them."""
    runner: AgentRunner
    n: int
    """Number of sessions."""
    sampling: dict[str, Any]
    partition: str
    """"train" or "val"."""
    scorer: Scorer | None = None
    """For sessions whose runner returned no reward."""


@dataclass(slots=True)
class PromptRollouts:
    """Runs agents, waits for their sessions, and writes them."""

    settings: Settings
    _prompts: asyncio.Queue[Prompt | None] = field(default_factory=lambda: asyncio.Queue(4096))
    _loop: asyncio.AbstractEventLoop | None = None
    _error: Exception | None = None

    def submit(self, prompt: Prompt) -> None:
        """Takes a prompt, from any thread.

        Raises:
            RollmeshError: The rollouts have ended, with the reason.
            InvalidFieldError: The uid has a "_".
        """
        prompt_uid(prompt.row)
        self._put(prompt)

    def stop(self) -> None:
        """Ends `serve`, from any thread."""
        self._put(None)

    def fail(self, error: Exception) -> None:
        """Lets every further `submit` say why the rollouts have ended."""
        self._error = error

    def _put(self, item: Prompt | None) -> None:
        if self._error is not None or self._loop is None or self._loop.is_closed():
            raise self._error or ShuttingDownError("the rollouts have ended")
        asyncio.run_coroutine_threadsafe(self._prompts.put(item), self._loop).result(_SUBMIT_S)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Rolls out what is submitted until `stop`; calls `ready` when prompts may come.

        Raises:
            RollmeshError: The collector refuses the subscription.
        """
        self._loop = asyncio.get_running_loop()
        settings = self.settings
        places = asyncio.Semaphore(settings.limits.concurrency)
        try:
            async with (
                Client(settings.addresses) as client,
                client.subscribe(
                    settings.consumer, unit="session", credits=settings.limits.concurrency
                ) as sessions,
                asyncio.TaskGroup() as group,
            ):
                arrivals = Arrivals(sessions)
                tasks = {group.create_task(arrivals.serve())}
                runs = SessionRuns(client, arrivals, settings.limits, places)
                ready()
                while (prompt := await self._prompts.get()) is not None:
                    task = group.create_task(self._roll_out(runs, prompt))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                for task in tasks:
                    task.cancel()
        except* RollmeshError as errors:
            raise errors.exceptions[0] from None

    async def _roll_out(self, runs: SessionRuns, prompt: Prompt) -> None:
        """Runs all sessions of a prompt, and says how it ended only when all of them have."""
        uid = prompt_uid(prompt.row)
        writer = TransferQueueWriter(prompt.partition, self.settings.status)
        await writer.begin(uid)
        failed = prompt.n
        try:
            async with asyncio.TaskGroup() as group:
                samples = [
                    group.create_task(self._sample(runs, prompt, uid, index, writer))
                    for index in range(prompt.n)
                ]
            failed = sum(not sample.result() for sample in samples)
        finally:
            await asyncio.shield(writer.end(uid, prompt.n, failed))

    async def _sample(
        self, runs: SessionRuns, prompt: Prompt, uid: str, index: int, writer: TransferQueueWriter
    ) -> bool:
        """Runs one session; returns whether its rows are in the queue."""
        extra: dict[str, Any] = {}

        def score(session: Session, given: Any) -> None:
            extra.update(_take_reward(session, given, needed=prompt.scorer is None))

        async def keep(result: SessionResult) -> None:
            if result.reward is None and prompt.scorer is not None:
                reward, said = await prompt.scorer(result, prompt.row)
                extra.update(said)
                result = replace(result, reward=reward)
            rows = rows_of([result])
            if not rows:
                raise InvalidFieldError("session", f"{result.session_id} has nothing to train on")
            flat = self.settings.flat_extra_fields
            await writer.write(
                queue_rows(rows, prompt.row, reward_extra_info=extra, flat_extra_fields=flat)
            )

        sample = Sample(prompt.row, uid, index, prompt.n, prompt.sampling)
        try:
            await runs.run(sample, prompt.runner, score, keep)
        except Exception:  # noqa: BLE001 - the edge to the user's code: siblings go on
            _log.exception("sample failed", extra=fields(group=uid, sample=index))
            return False
        return True


def _take_reward(session: Session, given: Any, *, needed: bool) -> dict[str, Any]:
    """Sets the session's reward from what a runner returned; returns what else the scorer said.

    Raises:
        InvalidFieldError: It is neither a number nor a mapping with a `reward`.
    """
    extra: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"reward": given}
    reward = extra.pop("reward", None)
    if reward is None and not needed:
        return extra
    if isinstance(reward, bool) or not isinstance(reward, (int, float, np.number)):
        raise InvalidFieldError("reward", f"{reward!r} is no number; the runner must return one")
    session.reward = float(reward)
    return extra
