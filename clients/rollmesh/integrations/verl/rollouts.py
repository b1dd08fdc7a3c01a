"""Rolls out verl's prompts as groups of sessions and writes the rows to the TransferQueue."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rollmesh.batches import ImageProcessor, MissingRewardError, rows_of
from rollmesh.client import (
    AgentRunner,
    Client,
    Group,
    SampleOutcome,
    SessionResult,
    rollout_groups,
)
from rollmesh.client.sessions.rewards import REWARD_NAMES
from rollmesh.integrations.verl.queue import TransferQueueWriter, prompt_uid, queue_rows
from rollmesh.integrations.verl.settings import Settings
from rollmesh.runtime.errors import InvalidFieldError, ShuttingDownError

RewardLoopScore: TypeAlias = Callable[
    [SessionResult, Mapping[str, Any]], Awaitable[tuple[float, dict[str, Any]]]
]
"""Returns the reward of a session whose runner gave none, and verl's extra reward info."""

_MAX_PROMPTS = 65_536
_SUBMIT_S = 60.0


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

    @property
    def uid(self) -> str:
        """Id of the prompt and of its group.

        Raises:
            InvalidFieldError: It has a "_".
        """
        return prompt_uid(self.row)


class PromptRollouts:
    """Rolls out submitted prompts; `submit` and `stop` may be called from any thread."""

    def __init__(self, settings: Settings, score: RewardLoopScore | None = None) -> None:
        """Takes the settings, and verl's reward loop if the trainer has one."""
        self._settings = settings
        self._score = score
        path = settings.image_model_path
        self._processor = ImageProcessor(path) if path else None
        self._submitted: asyncio.Queue[Prompt] = asyncio.Queue(_MAX_PROMPTS)
        self._prompts: dict[str, Prompt] = {}
        """Submitted prompts that have not ended, by uid."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._ended: Exception | None = None

    def submit(self, prompt: Prompt) -> None:
        """Submits a prompt.

        Raises:
            RollmeshError: The rollouts have ended; the error is the reason.
            InvalidFieldError: The uid contains a "_", or a prompt with it is running.
        """
        if self._ended is not None or self._loop is None:
            raise self._ended or ShuttingDownError("the rollouts have not begun")
        if prompt.uid in self._prompts:
            raise InvalidFieldError("uid", f"{prompt.uid!r} is running; submit it once")
        self._prompts[prompt.uid] = prompt
        putting = self._submitted.put(prompt)
        asyncio.run_coroutine_threadsafe(putting, self._loop).result(_SUBMIT_S)

    def stop(self) -> None:
        """Ends `serve`; unfinished prompts become failures."""
        if self._loop is not None and self._serving is not None and self._ended is None:
            self._loop.call_soon_threadsafe(self._serving.cancel)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Rolls out submitted prompts until `stop`; calls `ready` when `submit` may be called.

        Raises:
            RollmeshError: The collector refuses the subscription.
            CancelledError: `stop` was called.
        """
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        try:
            async with (
                Client(self._settings.addresses) as client,
                rollout_groups(
                    client,
                    self._groups(),
                    **self._settings.rollout,
                    on_session=self._write,
                    consumer=self._settings.consumer,
                    progress=False,
                ) as groups,
            ):
                ready()
                async for group in groups:
                    failed = sum(one.outcome != "COMPLETED" for one in group.sessions)
                    await self._end(group.group_id, failed)
        except Exception as error:
            self._ended = error
            raise
        finally:
            self._ended = self._ended or ShuttingDownError("the rollouts have ended")
            for uid, prompt in list(self._prompts.items()):
                await self._end(uid, prompt.n)

    async def _groups(self) -> AsyncIterator[Group]:
        while True:
            prompt = await self._submitted.get()
            await self._writer(prompt).begin(prompt.uid)
            yield Group(
                sample=prompt.row,
                group_id=prompt.uid,
                n=prompt.n,
                runner=prompt.runner,
                sampling=prompt.sampling,
            )

    async def _write(self, outcome: SampleOutcome, session: SessionResult) -> None:
        """Writes the rows of a session; they are in the queue on return.

        Raises:
            MissingRewardError: Neither the runner nor verl gave a reward.
            InvalidFieldError: The session has no trainable trajectory.
        """
        prompt, extra = self._prompts[outcome.group_id], _extra_info(outcome.result)
        try:
            rows = rows_of([session])
        except MissingRewardError:
            if self._score is None:
                raise
            reward, said = await self._score(session, prompt.row)
            extra |= said
            rows = rows_of([replace(session, reward=reward)])
        if not rows:
            raise InvalidFieldError("session", f"{session.session_id} has no trainable trajectory")
        made = await asyncio.to_thread(  # an image processor takes tens of milliseconds
            queue_rows,
            rows,
            prompt.row,
            reward_extra_info=extra,
            flat_extra_fields=self._settings.flat_extra_fields,
            processor=self._processor,
        )
        await self._writer(prompt).write(made)

    async def _end(self, uid: str, failed: int) -> None:
        prompt = self._prompts.pop(uid)
        await self._writer(prompt).end(uid, prompt.n, failed)

    def _writer(self, prompt: Prompt) -> TransferQueueWriter:
        return TransferQueueWriter(prompt.partition, self._settings.status)


def _extra_info(result: object) -> dict[str, Any]:
    """Returns the entries of a runner's result that are not rewards."""
    if not isinstance(result, Mapping):
        return {}
    return {name: value for name, value in result.items() if name not in REWARD_NAMES}
