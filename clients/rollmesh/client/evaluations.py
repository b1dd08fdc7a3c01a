"""Evaluation of one policy version: attempts at tasks, pass@k, and results that can be resumed."""

import asyncio
import importlib
import json
import logging
import math
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

from rollmesh.client.arguments import chosen
from rollmesh.client.client import Client
from rollmesh.client.rollouts import (
    Group,
    RolloutSettings,
    SampleOutcome,
    Samples,
    each,
    rollout,
    with_settings,
)
from rollmesh.client.sessions import SessionResult
from rollmesh.mesh import retried, weights_of
from rollmesh.runtime import Background, number_of, run_of, told
from rollmesh.runtime.errors import (
    ConsumerUnknownError,
    InvalidFieldError,
    RollmeshError,
    VersionGoneError,
)
from rollmesh.v1.sampling_pb2 import AdapterChoice

_Z = 1.96
"""Of a 95 % interval."""
_MOST_PIN_S = 3_600.0
_PIN_TRIED_S = 60.0
"""Time in which a push that is under way ends."""
_RELEASE_S = 5.0
_RENEWED = 0.1
"""Share of a pin's time after which it is renewed."""
_TASK_CHARACTERS = 1000
_log = logging.getLogger(__name__)


class PolicyVersionChangedError(RollmeshError):
    """More than one policy version sampled in an evaluation, or not the wanted one.

    Results of the first version are in the file. Evaluate an adapter's version, which engines keep
    beside newer ones, let pushes wait with `pin="drain"`, or do not push weights meanwhile.
    """

    code = "FAILED_PRECONDITION"
    reason = "POLICY_VERSION_CHANGED"

    def __init__(self, wanted: int, tokens: Mapping[int, int]) -> None:
        """Takes the version of the evaluation, and the number of tokens that each one sampled.

        They are the policy versions of the protocol, which name the run, too.
        """
        found = ", ".join(f"{told(one)} {count}" for one, count in sorted(tokens.items()))
        super().__init__(
            f"the evaluation is of {told(wanted)}, and sampled tokens are: {found}; start "
            'another one, of an adapter\'s version, or with pushes that wait (pin="drain")',
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
    run: int = 0
    """Number of the run in which the version was pushed."""


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

    @property
    def has_result(self) -> bool:
        """Whether it counts."""
        return self.passed is not None


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

        See `pass_at`.

        Raises:
            InvalidFieldError: No task has k results.
        """
        results, passed = Counter[str](), Counter[str]()
        for one in self.attempts:
            if one.passed is not None:
                results[one.task_id] += 1
                passed[one.task_id] += one.passed
        return pass_at([(count, passed[name]) for name, count in results.items()], k)


def pass_at(results: Iterable[tuple[int, int]], k: int = 1) -> Estimate:
    """Estimates the share of tasks of which at least one of k attempts passes.

    A task with n results, c of them passed, counts 1 - C(n - c, k) / C(n, k), the unbiased estimate
    of Chen et al. 2021, "Evaluating large language models trained on code". The interval is
    Wilson's, with each task as one trial, so more attempts at a task do not make it narrower.

    Args:
        results: By task, the number of attempts with a result, and of those that passed.
        k: Number of attempts.

    Raises:
        InvalidFieldError: No task has k results.
    """
    shares = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in results if n >= k > 0]
    if not shares:
        raise InvalidFieldError("k", f"is {k}; no task has so many results")
    count, value = len(shares), sum(shares) / len(shares)
    middle = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    spread = math.sqrt(value * (1 - value) / count + _Z**2 / (4 * count**2))
    half = _Z * spread / (1 + _Z**2 / count)
    return Estimate(value, max(middle - half, 0.0), min(middle + half, 1.0), count)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(RolloutSettings):
    """The keyword arguments of `evaluate`: a rollout's, and these."""

    n: int = 1
    """Attempts at each task."""
    policy_version: int | None = None
    """The version that must sample. None: the newest one."""
    adapter: str = ""
    """Name of the adapter that samples. Engines keep this version of it while newer ones are
    pushed. Empty: the model's weights."""
    pin: Literal["refuse", "drain"] = "refuse"
    """The treatment of weights that are pushed meanwhile. "refuse": the evaluation ends with an
    error. "drain": the push waits until the evaluation has ended, for at most `pin_s`."""
    pin_s: float = 600.0
    """Longest time for which pushes wait, seconds, at most the router's `max_pin_ms`, an hour."""
    path: Path | None = None
    """File of results, one line of JSON for each attempt. Attempts that have a result there are not
    repeated. None: results are only returned."""
    task_id: Callable[[Any], str] = str
    """Returns the id of a task, unique in the evaluation."""
    passes: Callable[[float], bool] = lambda reward: reward >= 1
    """Whether an attempt with this reward passed. An attempt out of time has the reward 0."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: A setting is invalid, or an evaluation sets it itself.
        """
        RolloutSettings.__post_init__(self)
        chosen("pin", self.pin, dict.fromkeys(("refuse", "drain")))
        if self.pin == "drain" and self.adapter:
            raise InvalidFieldError(
                "pin", "is for the model's weights; engines keep an adapter's version anyway"
            )
        if not 0 < self.pin_s <= _MOST_PIN_S:
            raise InvalidFieldError(
                "pin_s", f"is {self.pin_s}; give above 0, at most {_MOST_PIN_S}"
            )
        names = "on_sample on_session consumer purpose adapters group_id resume seed"
        for name in names.split():
            if getattr(self, name) != getattr(_DEFAULTS, name):
                raise InvalidFieldError(name, "is set by the evaluation; leave it out")


_DEFAULTS = RolloutSettings()


@with_settings(EvaluationSettings)
async def evaluate(client: Client, tasks: Samples, settings: EvaluationSettings) -> Evaluation:
    """Attempts each task n times with one policy version.

    Its sessions have the purpose "eval", so trainers do not receive them. `EvaluationSettings` has
    the keyword arguments.

    Args:
        client: A client of the mesh.
        tasks: Samples for the runner.
        settings: Of the rollout and of the evaluation.

    Raises:
        InvalidFieldError: A setting is invalid, two tasks have one id, or the file has results of
            another policy, or another evaluation writes it.
        PolicyVersionChangedError: Another version sampled. The evaluation ends at once.
        VersionGoneError: With `pin="drain"`: the engines have another version than the wanted one.
    """
    run = _Run(client, settings)
    with _locked(settings.path):
        async with run.pinned():
            async for task in each(tasks):
                run.add(task)
            return await run.finish()


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Keeps the file of results for one evaluation, as far as the system can.

    Raises:
        InvalidFieldError: Another evaluation has it.
    """
    if path is None:
        yield
        return
    with path.open("ab") as file:
        with suppress(ImportError):  # the system has no such locks
            fcntl: Any = importlib.import_module("fcntl")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"{path} is written by another evaluation; wait, or give another file"
                raise InvalidFieldError("path", problem) from None
        yield


class _Pin(Background):
    """Keeps the weights as they are while it is entered, and renews that."""

    def __init__(self, client: Client, for_s: float) -> None:
        super().__init__()
        self._client = client
        self._id = uuid.uuid4().hex[:8]
        self._until_s = asyncio.get_running_loop().time() + for_s
        self._model, self._number, self._every_s = "", 0, 0.0

    async def hold(self, model: str, number: int) -> None:
        """Pins a policy version of the protocol, for the first time.

        Raises:
            VersionGoneError: The engines hold another one, or another one is being pushed.
        """
        self._model, self._number = model, number
        self._every_s = await self._call(self._left_s()) * _RENEWED

    def _left_s(self) -> float:
        return self._until_s - asyncio.get_running_loop().time()

    async def _call(self, for_s: float) -> float:
        holder = f"evaluation-{self._id} (process {os.getpid()} of {gethostname():.64})"
        return await self._client.pin_weights(holder, self._number, for_s, model=self._model)

    async def _stay(self) -> None:
        try:
            while self._left_s() > self._every_s:
                await asyncio.sleep(self._every_s)
                try:
                    await self._call(self._left_s())
                except RollmeshError as error:
                    _log.warning("pin of the weights not renewed: %s", error)
        finally:
            with suppress(RollmeshError, TimeoutError):  # it lapses
                async with asyncio.timeout(_RELEASE_S):
                    await self._call(0)


@dataclass(slots=True)
class _Run:
    """A running evaluation."""

    client: Client
    settings: EvaluationSettings
    version: int = 0
    number: int = 0
    """The version in the protocol, which names the run, too."""
    model: str = ""
    groups: dict[str, Group] = field(default_factory=dict)
    """The attempts to make, by task."""
    seats: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    """By group id: the task, and the attempt of each seat."""
    results: dict[tuple[str, int], EvaluatedAttempt] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    """Number of tokens that each policy version sampled."""
    unseen: bool = False
    """Whether an attempt exceeded its time."""

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[None]:
        """Begins, and keeps the version for the block if pushes are to wait.

        Of weights that are being pushed it waits for the end.
        """
        await self.begin()
        if self.settings.pin == "refuse":
            yield
            return
        pin = _Pin(self.client, self.settings.pin_s)

        async def hold(_: float) -> None:
            try:
                await pin.hold(self.model, self.number)
            except VersionGoneError:
                await self.begin()  # the next one, unless another version was asked for
                raise

        await retried(hold, _PIN_TRIED_S, VersionGoneError)
        async with pin:
            yield

    async def begin(self) -> None:
        """Finds the version, and reads the results that there are."""
        settings = self.settings
        newest = await self.client.policy_version(settings.model, settings.adapter)
        weights = weights_of(await self.client.replicas(), settings.model)
        run = next((one.number for one in weights.runs if one.adapter == settings.adapter), 0)
        self.model = weights.model
        given = settings.policy_version
        self.version = newest if given is None else given
        self.number = number_of(run, self.version)
        if settings.adapter and not newest:
            said = f"{settings.adapter!r} has no version; push one first"
            raise InvalidFieldError("adapter", said)
        if not settings.adapter and self.version != newest:
            raise InvalidFieldError(
                "policy_version",
                f"is {self.version}, and the engines have {newest}; give that, or an adapter",
            )
        if settings.path is not None and settings.path.exists():
            self._read(settings.path)

    def _read(self, path: Path) -> None:
        lines = path.read_bytes().split(b"\n")
        for at, line in enumerate(lines[:-1]):
            try:
                read = json.loads(line)
                policy = read["policy"] and EvaluatedPolicy(**read["policy"])
                numerics = tuple(read["numerics"])
                one = EvaluatedAttempt(**{**read, "policy": policy, "numerics": numerics})
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidFieldError(
                    "path", f"line {at + 1} of {path} is no attempt; give another file"
                ) from error
            own = self.version, self.settings.adapter, run_of(self.number)
            if policy and (policy.policy_version, policy.adapter, policy.run) != own:
                raise InvalidFieldError(
                    "path",
                    f"line {at + 1} of {path} is of {one.policy}, and this evaluation is of "
                    f"{told(self.number)}; give another file",
                )
            self.results[one.task_id, one.attempt] = one
        if lines[-1]:  # of an evaluation that was killed
            with path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in lines[:-1]))

    def add(self, task: Any) -> None:
        """Adds the attempts at a task that have no result."""
        name = self.settings.task_id(task)
        if name in self.groups:
            raise InvalidFieldError("task_id", f"returns {name!r} twice; give each task its own")
        found = [self.results.get((name, at)) for at in range(self.settings.n)]
        open_ = [at for at, one in enumerate(found) if one is None or not one.has_result]
        group_id = uuid.uuid4().hex
        self.seats[group_id] = name, open_
        metadata = dict(self.settings.metadata(task) if self.settings.metadata else {})
        metadata.setdefault("task_id", name[:_TASK_CHARACTERS])
        self.groups[name] = Group(sample=task, group_id=group_id, n=len(open_), metadata=metadata)

    async def finish(self) -> Evaluation:
        """Runs the attempts.

        Raises:
            PolicyVersionChangedError: Another version sampled.
        """
        groups = [one for one in self.groups.values() if one.n]
        if groups:
            adapter = self.settings.adapter
            settings = {one.name: getattr(self.settings, one.name) for one in fields(_DEFAULTS)}
            settings |= {"purpose": "eval", "needed": 0, "on_sample": self._ended}
            settings["consumer"] = consumer = f"evaluation-{uuid.uuid4().hex}"
            settings["on_session"] = self._delivered
            if adapter:
                settings["adapters"] = [AdapterChoice(name=adapter, version=self.version)]
            try:
                await rollout(self.client, groups, **settings)
            finally:
                try:
                    await self.client.delete_consumer(consumer)
                except RollmeshError as error:
                    if not isinstance(error, ConsumerUnknownError):  # no session came so far
                        _log.warning("consumer %s stays until delete_consumer: %s", consumer, error)
            if self.unseen and not adapter:  # the tokens of such an attempt were not read
                newest = await self.client.policy_version(self.settings.model)
                if newest != self.version:
                    raise PolicyVersionChangedError(self.number, self.tokens | {newest: 0})
        attempts = tuple(
            one
            for (name, at), one in sorted(self.results.items())
            if name in self.groups and at < self.settings.n
        )
        policies = {one.policy for one in attempts if one.policy is not None}
        return Evaluation(attempts, next(iter(policies), None))

    def _is_mixed(self) -> bool:
        return bool(set(self.tokens) - {self.number})

    async def _delivered(self, outcome: SampleOutcome, session: SessionResult) -> None:
        sampled = Counter[int]()
        for part, where in session.sampled():
            pairs = zip(part.policy_runs[where], part.policy_versions[where], strict=True)
            sampled.update(number_of(int(run), int(version)) for run, version in pairs)
        self.tokens += sampled
        if self._is_mixed():
            return  # `_ended` ends the evaluation
        reward = session.reward  # of the runner, or a late one
        self._keep(
            outcome,
            reward,
            error="" if reward is not None else "the runner returned no reward",
            turns=session.turns,
            sampled_tokens=sampled.total(),
            numerics=tuple(sorted(session.numerics)),
            policy=self._policy() if sampled else None,
        )

    def _policy(self) -> EvaluatedPolicy:
        return EvaluatedPolicy(self.model, self.version, self.settings.adapter, run_of(self.number))

    def _ended(self, outcome: SampleOutcome) -> None:
        if self._is_mixed():
            raise PolicyVersionChangedError(self.number, self.tokens)
        if outcome.outcome == "ABORTED":
            self.unseen = True
            self._keep(outcome, 0.0, error="time limit", policy=self._policy())
        elif outcome.outcome in {"FAILED", "LOST"}:
            self._keep(outcome, None, error=outcome.error)

    def _keep(self, outcome: SampleOutcome, reward: float | None, **values: Any) -> None:
        name, attempts = self.seats[outcome.group_id]
        one = EvaluatedAttempt(
            name,
            attempts[outcome.sample_index],
            reward,
            None if reward is None else self.settings.passes(reward),
            session_id=outcome.session_id,
            seconds=round(outcome.seconds, 3),
            **values,
        )
        self.results[one.task_id, one.attempt] = one
        if self.settings.path is not None:
            with self.settings.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
