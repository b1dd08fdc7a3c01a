"""Evaluation of one policy version: attempts at tasks, pass@k, and results that can be resumed."""

import json
import math
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from rollmesh.client.client import Client
from rollmesh.client.rollouts import Group, RolloutSettings, SampleOutcome, rollout
from rollmesh.client.runners import AgentRunner
from rollmesh.client.sessions import SessionResult
from rollmesh.runtime.errors import ConsumerUnknownError, InvalidFieldError, RollmeshError
from rollmesh.v1.sampling_pb2 import AdapterChoice

_Z = 1.96
"""Of a 95 % interval."""


class PolicyVersionChangedError(RollmeshError):
    """More than one policy version sampled in an evaluation, or not the wanted one.

    Results of the first version are in the file. Evaluate an adapter's version, which engines keep
    beside newer ones, or do not push weights meanwhile.
    """

    code = "FAILED_PRECONDITION"
    reason = "POLICY_VERSION_CHANGED"

    def __init__(self, wanted: int, tokens: Mapping[int, int]) -> None:
        """Takes the version of the evaluation, and the number of tokens that each one sampled."""
        found = ", ".join(f"version {one} {count}" for one, count in sorted(tokens.items()))
        super().__init__(
            f"the evaluation is of version {wanted}, and sampled tokens are: {found}; start "
            "another one, of an adapter's version or without pushes of weights meanwhile",
            policy_version=wanted,
        )
        self.tokens = dict(tokens)


@dataclass(frozen=True, slots=True)
class EvaluatedPolicy:
    """What sampled in an evaluation."""

    model: str
    policy_version: int
    adapter: str = ""
    """Name of the adapter. Empty for the model's own weights."""


@dataclass(frozen=True, slots=True)
class EvaluatedAttempt:
    """One attempt at a task. A line of the file of results."""

    task_id: str
    attempt: int
    """From 0."""
    reward: float | None
    """None if the attempt has no result: it does not count, and a resumed evaluation repeats it."""
    passed: bool | None
    session_id: str = ""
    error: str = ""
    """Why there is no result, or "time limit" for a failed attempt."""
    turns: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    numerics: tuple[str, ...] = ()
    """Ids of the numerics of the engines that sampled."""
    policy: EvaluatedPolicy | None = None
    """None if no token was sampled."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int
    """Number of tasks in it: those with at least k results."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation."""

    attempts: tuple[EvaluatedAttempt, ...]
    """In order of task and attempt."""
    policy: EvaluatedPolicy | None
    """None if no token was sampled."""

    @property
    def errors(self) -> dict[str, int]:
        """The number of attempts without a result, by error. They are in no figure."""
        return dict(Counter(one.error for one in self.attempts if one.passed is None))

    @property
    def mean_reward(self) -> float | None:
        """Mean over tasks of the mean reward of a task's attempts. None without results."""
        rewards = defaultdict[str, list[float]](list)
        for one in self.attempts:
            if one.reward is not None:
                rewards[one.task_id].append(one.reward)
        means = [sum(of_task) / len(of_task) for of_task in rewards.values()]
        return sum(means) / len(means) if means else None

    def pass_at(self, k: int = 1) -> Estimate:
        """Estimates the share of tasks of which at least one of k attempts passes.

        A task with n results, c of them passed, counts 1 - C(n - c, k) / C(n, k), the unbiased
        estimate of Chen et al. 2021, "Evaluating large language models trained on code". The
        interval is Wilson's, with each task as one trial, so more attempts at a task do not make
        it narrower.

        Raises:
            InvalidFieldError: No task has k results.
        """
        passed = defaultdict[str, list[bool]](list)
        for one in self.attempts:
            if one.passed is not None:
                passed[one.task_id].append(one.passed)
        shares = [
            1 - math.comb(len(of_task) - sum(of_task), k) / math.comb(len(of_task), k)
            for of_task in passed.values()
            if len(of_task) >= k > 0
        ]
        if not shares:
            raise InvalidFieldError("k", f"is {k}; no task has so many results")
        count, value = len(shares), sum(shares) / len(shares)
        middle = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        spread = math.sqrt(value * (1 - value) / count + _Z**2 / (4 * count**2))
        half = _Z * spread / (1 + _Z**2 / count)
        return Estimate(value, max(middle - half, 0.0), min(middle + half, 1.0), count)


Passes: TypeAlias = Callable[[float], bool]
"""Returns whether an attempt with this reward passed."""


async def evaluate(  # noqa: PLR0913 - keywords, each with a default
    client: Client,
    tasks: Iterable[Any],
    /,
    *,
    runner: str | AgentRunner,
    n: int = 1,
    policy_version: int | None = None,
    adapter: str = "",
    path: Path | None = None,
    task_id: Callable[[Any], str] = str,
    passes: Passes = lambda reward: reward >= 1,
    **settings: Any,
) -> Evaluation:
    """Attempts each task n times with one policy version.

    Its sessions have the purpose "eval", so trainers do not receive them.

    Args:
        client: A client of the mesh.
        tasks: Samples for the runner.
        runner: Attempts a task, and returns its reward.
        n: Attempts at each task.
        policy_version: The version that must sample. None: the newest one.
        adapter: Name of the adapter that samples. Engines keep this version of it while newer ones
            are pushed. Empty: the model's weights.
        path: File of results, one line of JSON for each attempt. Attempts that have a result there
            are not repeated. None: results are only returned.
        task_id: Returns the id of a task, unique in the evaluation.
        passes: Whether an attempt passed. An attempt that exceeds `timeout_s` has the reward 0.
        settings: Further settings of `RolloutSettings`: `concurrency`, `timeout_s`, `retries`,
            `sampling`, `model`, `reward`.

    Raises:
        InvalidFieldError: A setting is invalid, two tasks have one id, or the file has results of
            another policy.
        PolicyVersionChangedError: Another version sampled. The evaluation ends at once.
    """
    run = _Run(client, RolloutSettings(runner=runner, n=n, **settings), passes, adapter, path)
    await run.begin(policy_version)
    given = list(tasks)
    samples = {task_id(task): task for task in given}
    if len(samples) < len(given):
        raise InvalidFieldError("task_id", "returns one id for two tasks; give each its own")
    for name, task in samples.items():
        run.add(name, task)
    return await run.finish()


_OWN = ("on_sample", "on_session", "consumer", "purpose", "adapters", "group_id", "needed")


@dataclass(slots=True)
class _Run:
    """A running evaluation."""

    client: Client
    settings: RolloutSettings
    passes: Passes
    adapter: str
    path: Path | None
    version: int = 0
    groups: list[Group] = field(default_factory=list)
    seats: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """By group id: the task, and the attempt of each seat."""
    results: dict[tuple[str, int], EvaluatedAttempt] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    """Number of tokens that each version sampled."""
    unseen: bool = False
    """Whether an attempt exceeded its time."""

    async def begin(self, policy_version: int | None) -> None:
        """Finds the version, and reads the results that there are."""
        for name in _OWN:
            if getattr(self.settings, name) != getattr(_DEFAULTS, name):
                raise InvalidFieldError(name, "is set by the evaluation; leave it out")
        newest = await self.client.policy_version(self.settings.model, self.adapter)
        self.version = newest if policy_version is None else policy_version
        if self.adapter and not newest:
            raise InvalidFieldError("adapter", f"{self.adapter!r} has no version; push one first")
        if not self.adapter and self.version != newest:
            raise InvalidFieldError(
                "policy_version",
                f"is {self.version}, and the engines have {newest}; give that, or an adapter",
            )
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        lines = path.read_bytes().split(b"\n")
        for at, line in enumerate(lines[:-1]):
            try:
                one = _attempt_of(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidFieldError(
                    "path", f"line {at + 1} of {path} is no attempt; give another file"
                ) from error
            if one.policy is not None and self._differs(one.policy):
                raise InvalidFieldError(
                    "path",
                    f"line {at + 1} of {path} is of {one.policy}, and this evaluation is of "
                    f"version {self.version}; give another file",
                )
            self.results[one.task_id, one.attempt] = one
        if lines[-1]:  # of an evaluation that was killed
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in lines[:-1]))

    def _differs(self, policy: EvaluatedPolicy) -> bool:
        return (policy.policy_version, policy.adapter) != (self.version, self.adapter)

    def add(self, name: str, task: Any) -> None:
        """Adds the attempts at a task that have no result."""
        found = {at for of, at in self.results if of == name and self._has_result(of, at)}
        if open_ := [at for at in range(self.settings.n) if at not in found]:
            group_id = uuid.uuid4().hex
            self.seats[group_id] = name, open_
            self.groups.append(Group(sample=task, group_id=group_id, n=len(open_)))

    def _has_result(self, name: str, attempt: int) -> bool:
        return self.results[name, attempt].passed is not None

    async def finish(self) -> Evaluation:
        """Runs the attempts.

        Raises:
            PolicyVersionChangedError: Another version sampled.
        """
        if self.groups:
            choice = [AdapterChoice(name=self.adapter, version=self.version)]
            settings = replace(
                self.settings,
                purpose="eval",
                needed=0,
                adapters=choice if self.adapter else [],
                consumer=f"evaluation-{uuid.uuid4().hex}",
                on_session=self._delivered,
                on_sample=self._ended,
            )
            try:
                await rollout(self.client, self.groups, **vars(settings))
            finally:
                await self._leave(settings.consumer)
            await self._check_unseen()
        attempts = tuple(one for _, one in sorted(self.results.items()))
        policies = {one.policy for one in attempts if one.policy is not None}
        return Evaluation(attempts, next(iter(policies), None))

    async def _check_unseen(self) -> None:
        """Checks the version of attempts that exceeded their time: their tokens were not read."""
        if self.adapter or not self.unseen:
            return
        newest = await self.client.policy_version(self.settings.model)
        if newest != self.version:
            raise PolicyVersionChangedError(self.version, self.tokens | {newest: 0})

    async def _leave(self, consumer: str) -> None:
        with suppress(ConsumerUnknownError):  # no session came so far
            await self.client.delete_consumer(consumer)

    async def _delivered(self, outcome: SampleOutcome, session: SessionResult) -> None:
        sampled = Counter[int]()
        parts = session.trajectories or ([session.tree] if session.tree else [])
        for part in parts:
            sampled.update(part.policy_versions[part.policy_versions >= 0].tolist())
        self.tokens += sampled
        if sampled and set(sampled) != {self.version}:
            return  # `_ended` ends the evaluation
        error = "" if outcome.reward is not None else "the runner returned no reward"
        policy = EvaluatedPolicy(session.model, self.version, self.adapter) if sampled else None
        self._keep(
            outcome,
            outcome.reward,
            error=error,
            turns=session.turns,
            sampled_tokens=sampled.total(),
            numerics=tuple(sorted(session.numerics)),
            policy=policy,
        )

    def _ended(self, outcome: SampleOutcome) -> None:
        if set(self.tokens) - {self.version}:
            raise PolicyVersionChangedError(self.version, self.tokens)
        if outcome.outcome == "ABORTED":
            self.unseen = True
            self._keep(outcome, 0.0, error="time limit")
        elif outcome.outcome in {"FAILED", "LOST"}:
            self._keep(outcome, None, error=outcome.error)

    def _keep(self, outcome: SampleOutcome, reward: float | None, **values: Any) -> None:
        name, attempts = self.seats[outcome.group_id]
        one = EvaluatedAttempt(
            name,
            attempts[outcome.sample_index],
            reward,
            None if reward is None else self.passes(reward),
            session_id=outcome.session_id,
            seconds=round(outcome.seconds, 3),
            **values,
        )
        self.results[one.task_id, one.attempt] = one
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())


_DEFAULTS = RolloutSettings()


def _attempt_of(line: dict[str, Any]) -> EvaluatedAttempt:
    policy = line["policy"] and EvaluatedPolicy(**line["policy"])
    return EvaluatedAttempt(**{**line, "policy": policy, "numerics": tuple(line["numerics"])})
