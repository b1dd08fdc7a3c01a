"""verl's agent loop manager, backed by a mesh.

verl loads the class by name and uses it for rollouts only:

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollmesh.integrations.verl.manager.AgentLoopManager
    +rollmesh.router=HOST:PORT
    +rollmesh.runners.my_agent=my_package.my_module:run

Prompts become groups of sessions, `agent_name` names the runner, and delivered sessions are written
to the TransferQueue, from which verl's replay buffer reads them.
"""

import asyncio
import concurrent.futures
import importlib
import json
import logging
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rollmesh.batches import ImageProcessor, MissingRewardError, StepCounts, rows_of
from rollmesh.client import (
    REWARD_NAMES,
    AgentRunner,
    Client,
    Group,
    GroupIds,
    RolloutSummary,
    SampleOutcome,
    Session,
    SessionResult,
    rollout_groups,
)
from rollmesh.integrations.verl.queue import (
    TransferQueueWriter,
    prompt_uid,
    queue_rows,
)
from rollmesh.integrations.verl.settings import Settings, run_of, sampling_of, served
from rollmesh.runtime.errors import (
    CheckpointUnknownError,
    ConsumerUnknownError,
    InvalidFieldError,
    RollmeshError,
    ShuttingDownError,
)
from rollmesh.v1.sampling_pb2 import PolicyRun

# Rolls out verl's prompts as groups of sessions and writes the rows to the TransferQueue.

RewardLoopScore: TypeAlias = Callable[
    [SessionResult, Mapping[str, Any]], Awaitable[tuple[float, dict[str, Any]]]
]
"""Returns the reward of a session whose runner gave none, and verl's extra reward info."""

_MAX_PROMPTS = 65_536
_JOB = "job"
"""Name of the sessions' run id in the state of a checkpoint."""
_EXTRA = "reward_extra_info"
"""Name of verl's extra reward info in the metadata of a session."""
_SUBMIT_S = 60.0
_STATE_S = 60.0
_REPORT_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to roll out."""

    row: dict[str, Any]
    """The trainer's columns. The runner gets them, and the rows carry them."""
    runner: AgentRunner
    n: int
    """Number of sessions."""
    sampling: dict[str, Any]
    partition: str
    """"train" or "val"."""
    group_id: str
    """Id of its group, which it has again in a job that resumes."""

    @property
    def uid(self) -> str:
        """The id that verl gave the prompt, another one in each job.

        Raises:
            InvalidFieldError: It has a "_".
        """
        return prompt_uid(self.row)


class PromptRollouts:
    """Rolls out submitted prompts. `submit` and `stop` may be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        temperature: float,
        rollout: Mapping[str, Any],
        score: RewardLoopScore | None = None,
        state: Mapping[str, Any] | None = None,
        run: PolicyRun | None = None,
    ) -> None:
        """Takes the settings, and verl's reward loop if the trainer has one.

        Args:
            settings: The settings.
            temperature: By which verl divides the logits of samples that it trains on.
            rollout: Arguments of the rollout that verl's own settings mean.
            score: The reward loop.
            state: The consumer's state in the checkpoint that verl resumes from.
            run: The run of the job, if it opened one.
        """
        self._settings = settings
        self._state = state
        self._run = run or PolicyRun()
        self._client: Client | None = None
        self._rollout = rollout
        self._temperature = temperature
        self._score = score
        path = settings.image_model_path
        self._processor = ImageProcessor(path) if path else None
        self._submitted: asyncio.Queue[Prompt] = asyncio.Queue(_MAX_PROMPTS)
        self._job = str((state or {}).get(_JOB) or uuid.uuid4().hex)
        """Run id of the sessions. It stays the same after a resume."""
        self._prompts: dict[str, Prompt] = {}
        """Submitted prompts that have not ended, by group id."""
        self._uids: set[str] = set()
        """Their uids."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._ended: Exception | None = None
        self._counts: dict[str, StepCounts] = {}
        """Of the prompts that were not trained yet, by uid. Of those without rows by ""."""
        self.failed: Counter[str] = Counter()
        """Failed sessions by partition."""
        self.summary = RolloutSummary()
        """Summary of the sessions that have ended."""

    def submit(self, prompt: Prompt) -> None:
        """Submits a prompt.

        Raises:
            RollmeshError: The rollouts have ended. The error is the reason.
            InvalidFieldError: The uid contains a "_", or a prompt with it is running.
        """
        if self._ended is not None or self._loop is None:
            raise self._ended or ShuttingDownError("the rollouts have not begun")
        if prompt.uid in self._uids:
            raise InvalidFieldError("uid", f"{prompt.uid!r} is running; submit it once")
        self._uids.add(prompt.uid)
        self._prompts[prompt.group_id] = prompt
        asyncio.run_coroutine_threadsafe(self._submitted.put(prompt), self._loop).result(_SUBMIT_S)

    def stop(self) -> None:
        """Ends `serve`. Unfinished prompts become failures."""
        if self._loop is not None and self._serving is not None and self._ended is None:
            self._loop.call_soon_threadsafe(self._serving.cancel)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Rolls out submitted prompts until `stop`. Calls `ready` when `submit` may be called.

        Raises:
            RollmeshError: The collector refuses the subscription, or the engines return other
                log-probabilities than verl computes.
            CancelledError: `stop` was called.
        """
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        try:
            async with Client(self._settings.addresses) as client:
                client.follow_run(self._run)
                await client.check_temperature(self._temperature, self._settings.model)
                await self._restore(client)
                self._client = client
                async with rollout_groups(
                    client,
                    self._groups(),
                    **self._settings.rollout,
                    **self._rollout,
                    run_id=self._job,
                    resume=True,
                    on_session=self._write,
                    consumer=self._settings.consumer,
                    progress=False,
                ) as groups:
                    self.summary = groups.summary
                    ready()
                    async for group in groups:
                        failed = sum(one.outcome != "COMPLETED" for one in group.sessions)
                        await self._end(group.group_id, failed)
        except Exception as error:
            self._ended = error
            raise
        finally:
            self._ended = self._ended or ShuttingDownError("the rollouts have ended")
            for group_id, prompt in list(self._prompts.items()):
                await self._end(group_id, prompt.n)

    def state_dict(self, keep: int) -> dict[str, Any]:
        """Returns the state of the consumer, as `Client.state_dict` does.

        Raises:
            RollmeshError: The collector refuses, or the rollouts have ended.
        """
        if self._client is None or self._loop is None or self._ended is not None:
            raise self._ended or ShuttingDownError("the rollouts have not begun")
        saving = self._client.state_dict(self._settings.consumer, keep=keep)
        state = asyncio.run_coroutine_threadsafe(saving, self._loop).result(_STATE_S)
        return {**state, _JOB: self._job}

    def report(self, step: int, uids: list[str], numbers: dict[str, float]) -> None:
        """Reports a step that trained some prompts. An error is logged: the training goes on."""
        if self._client is None or self._loop is None or self._ended is not None:
            return
        reporting = asyncio.run_coroutine_threadsafe(
            self._report(self._client, step, uids, numbers), self._loop
        )
        try:
            reporting.result(_REPORT_S)
        except (RollmeshError, TimeoutError) as error:
            reporting.cancel()
            _log.warning("report of step %d failed: %s", step, error or "the collector is away")

    async def _report(
        self, client: Client, step: int, uids: list[str], numbers: dict[str, float]
    ) -> None:
        counts = StepCounts()
        for uid in [*uids, ""]:
            counts.merge(self._counts.pop(uid, StepCounts()))
        before = step - 1 + bool(self._settings.adapter)  # the version that the step started from
        await client.report_step(self._settings.consumer, step, counts.metrics(before) | numbers)

    async def _restore(self, client: Client) -> None:
        """Moves the consumer back to the checkpoint.

        verl submits later prompts again. Their sessions are found by their groups, unless an
        abandoned run sampled them.
        """
        if self._state is None:
            return
        try:
            again = await client.load_state_dict(self._state)
        except (ConsumerUnknownError, CheckpointUnknownError) as error:
            _log.warning("the mesh does not know verl's checkpoint, resuming without it: %s", error)
        else:
            _log.warning("resumed: %d sessions were trained after the checkpoint", again)

    async def _groups(self) -> AsyncIterator[Group]:
        while True:
            prompt = await self._submitted.get()
            await self._writer(prompt).begin(prompt.uid)
            yield Group(
                sample=prompt.row,
                group_id=prompt.group_id,
                n=prompt.n,
                runner=prompt.runner,
                sampling=prompt.sampling,
                metadata={"uid": prompt.uid},
            )

    async def _write(self, outcome: SampleOutcome, session: SessionResult) -> None:
        """Writes the rows of a session. They are in the queue on return.

        Raises:
            MissingRewardError: Neither the runner nor verl gave a reward.
            InvalidFieldError: The session has no trainable trajectory.
        """
        prompt = self._prompts[outcome.group_id]
        extra: dict[str, Any] = json.loads(session.metadata.get(_EXTRA, "{}"))
        extra |= _extra_info(outcome.result)
        try:
            rows = rows_of([session])
        except MissingRewardError:
            if self._score is None:
                raise
            reward, said = await self._score(session, prompt.row)
            extra |= said
            session = replace(session, reward=reward)
            rows = rows_of([session])
        if prompt.partition == "train":
            self._counts.setdefault(prompt.uid, StepCounts()).add(session)
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

    async def _end(self, group_id: str, failed: int) -> None:
        prompt = self._prompts.pop(group_id)
        uid = prompt.uid
        self._uids.remove(uid)
        self.failed[prompt.partition] += failed
        if not await self._writer(prompt).end(uid, prompt.n, failed):  # verl leaves it out
            counts = self._counts.pop(uid, StepCounts())
            self._counts.setdefault("", StepCounts()).merge(counts)
        while len(self._counts) > _MAX_PROMPTS:
            del self._counts[next(iter(self._counts))]

    def _writer(self, prompt: Prompt) -> TransferQueueWriter:
        return TransferQueueWriter(prompt.partition, self._settings.status)


def _extra_info(result: object) -> dict[str, Any]:
    """Returns the entries of a runner's result that are not rewards."""
    if not isinstance(result, Mapping):
        return {}
    return {name: value for name, value in result.items() if name not in REWARD_NAMES}


_START_S = 60.0


class AgentLoopManager:
    """Rolls out prompts in a thread. Results go to the TransferQueue."""

    def __init__(
        self, config: Any, *, reward_loop_worker_handles: Any = None, **_handles: Any
    ) -> None:
        """Takes verl's configuration and its reward workers; verl's inference servers are not used.

        Raises:
            InvalidFieldError: `config.rollmesh` is incomplete or invalid, or one of verl's own
                settings cannot be served.
        """
        self._config = config
        rollout = served(config)
        settings = Settings.from_config(config.get("rollmesh"))
        self._runners = {name: load_runner(name, path) for name, path in settings.runners.items()}
        score: RewardLoopScore | None = None
        if reward_loop_worker_handles:
            score = _verl("hooks").RewardLoop(list(reward_loop_worker_handles)).score
        temperature = float(config.actor_rollout_ref.rollout.temperature)
        _, state = _verl("checkpoints").resumed(config)
        kwargs = config.actor_rollout_ref.rollout.get("engine_kwargs") or {}
        run = run_of(kwargs.get("rollmesh") or {})
        self._ids = GroupIds()
        self._rollouts = PromptRollouts(settings, temperature, rollout, score, state, run)
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="rollmesh-rollouts", daemon=True)

    @classmethod
    def create(cls, config: Any, **handles: Any) -> "AgentLoopManager":
        """Creates and starts the manager. Called by verl.

        Raises:
            RollmeshError: The collector refuses, or the configuration is wrong.
        """
        manager = cls(config, **handles)
        tq.init()
        manager._thread.start()
        manager._ready.result(_START_S)
        rollouts = manager._rollouts
        _verl("hooks").explain(rollouts.failed, rollouts.summary.first_errors)
        _verl("hooks").observe(rollouts.report)
        return manager

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Starts rolling out prompts. Returns at once.

        Args:
            prompts: Batch size [prompts]. Every row has `uid`, `global_steps` and the data set's
                columns. `validate` selects partition and sampling parameters.

        Raises:
            RollmeshError: The rollouts have ended. The error is the reason.
            InvalidFieldError: A row names a runner that is not configured, or its uid has a "_".
        """
        rows = [
            self._prompt(row, validate=bool(row.pop("validate", False))) for row in _rows(prompts)
        ]
        for prompt in rows:
            self._rollouts.submit(prompt)

    def state_dict(self, *, keep: int) -> dict[str, Any]:
        """Returns the consumer's state for a checkpoint, and releases all but `keep` of them.

        Raises:
            RollmeshError: The collector refuses, or the rollouts have ended.
        """
        return self._rollouts.state_dict(keep)

    def close(self) -> None:
        """Stops the rollouts. Unfinished prompts become failures."""
        self._rollouts.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._rollouts.serve(lambda: self._ready.set_result(None)))
        except asyncio.CancelledError:  # by `close`
            return
        except Exception as error:  # raised in the trainer's thread
            if not self._ready.done():
                self._ready.set_exception(error)

    def _prompt(self, row: dict[str, Any], *, validate: bool) -> Prompt:
        config = self._config.actor_rollout_ref.rollout
        row.setdefault("agent_name", config.agent.default_agent_loop)
        # The group's id follows from verl's step and the prompt.
        columns = {name: row[name] for name in sorted(row) if name != "uid"}
        partition = "val" if validate else "train"
        group_id = self._ids.id(partition, int(row["global_steps"]), sample=columns)
        runner = self._runners.get(row["agent_name"])
        if runner is None:
            raise InvalidFieldError(
                "agent_name",
                f"{row['agent_name']!r} is not one of {sorted(self._runners)}; "
                "add it as rollmesh.runners.NAME=package.module:function",
            )
        n = int(row.pop("__rollout_n__", config.val_kwargs.n if validate else config.n))
        greedy = not row.pop("__do_sample__", True) and not validate
        return Prompt(
            row,
            _keeping_extra_info(runner),
            n,
            sampling_of(config, validate=validate, greedy=greedy),
            partition,
            group_id,
        )


def _keeping_extra_info(run: AgentRunner) -> AgentRunner:
    """Keeps verl's extra reward info with the session, for a job that resumes."""

    async def runner(sample: Any, session: Session) -> Any:
        result = await run(sample, session)
        if extra := _extra_info(result):
            with suppress(TypeError, ValueError):  # it stays in this process
                session.metadata[_EXTRA] = json.dumps(extra)
        return result

    return runner


def _verl(module: str) -> Any:
    """Returns a module of this package that needs verl, which takes seconds to import."""
    return importlib.import_module(f"rollmesh.integrations.verl.{module}")


def load_runner(name: str, path: str) -> AgentRunner:
    """Returns the function that `package.module:function` names.

    Raises:
        InvalidFieldError: There is no such function.
    """
    module, _, function = path.partition(":")
    try:
        return cast("AgentRunner", getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"{path!r} is not a package.module:function: {error}"
        raise InvalidFieldError(f"rollmesh.runners.{name}", problem) from error


def _rows(prompts: TensorDict) -> list[dict[str, Any]]:
    columns: Mapping[str, Any] = dict(prompts.items())
    return [
        {name: _value(column, at) for name, column in columns.items()} for at in range(len(prompts))
    ]


def _value(column: Any, at: int) -> Any:
    if isinstance(column, NonTensorStack):
        return column[at].data
    return column.data if isinstance(column, NonTensorData) else column[at]
