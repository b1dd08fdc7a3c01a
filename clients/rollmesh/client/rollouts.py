"""Rolls out samples: n sessions for each, with bounded concurrency and isolated failures.

Memory does not grow with the number of samples. The next sample is taken when there is room for
another session, a group is kept from its first session to its last, and groups that the caller has
not read hold back new ones.
"""

import asyncio
import contextlib
import functools
import hashlib
import inspect
import itertools
import logging
import math
import re
import sys
import threading
import traceback
import uuid
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, cast

from rollmesh.client.arguments import (
    PURPOSES,
    Budget,
    Column,
    ExportForm,
    Purpose,
    SamplingPolicy,
    chosen,
)
from rollmesh.client.client import Client
from rollmesh.client.conversations import Start, Transcript
from rollmesh.client.deliveries import SubscribeOptions, Subscription
from rollmesh.client.failures import is_infrastructure, shielded, text_of
from rollmesh.client.runners import AgentRunner, agent_name, find_runner
from rollmesh.client.sessions import (
    Delivery,
    Outcome,
    Rewards,
    Session,
    SessionResult,
    read_rewards,
)
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    RepeatConflictError,
    RollmeshError,
    SessionClosedError,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2, gateway_pb2, session_pb2
from rollmesh.v1.sampling_pb2 import AdapterChoice

_log = logging.getLogger(__name__)

# Each delivered session goes to the task that closed it and awaits it.


class Arrivals:
    """Gives each delivered session to the task that awaits it.

    A session that nobody awaits is acknowledged and logged: its attempt failed, or it belongs to a
    trainer that died, whose successor rolls the sample out again.
    """

    def __init__(self, sessions: Subscription) -> None:
        """Takes a subscription with `unit="session"`. `serve` reads it."""
        self._sessions = sessions
        self._awaited: dict[str, asyncio.Future[Delivery]] = {}

    async def serve(self) -> None:
        """Reads deliveries until it is cancelled.

        Raises:
            RollmeshError: The collector refuses the subscription.
        """
        async for delivery in self._sessions:
            session_id = delivery.sessions[0].session_id
            future = self._awaited.get(session_id)
            if future is not None and not future.done():
                future.set_result(delivery)
                continue
            _log.info("unexpected session acknowledged", extra=fields(session_id=session_id))
            await self._sessions.acknowledge(delivery)

    @asynccontextmanager
    async def awaited(self, session_id: str) -> AsyncIterator[asyncio.Future[Delivery]]:
        """Awaits a session. Enter the block before the session is closed.

        Leaving the block acknowledges the session if it has arrived, also after an error. A
        cancellation does not acknowledge it: the trainer's successor gets it.
        """
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._awaited[session_id] = future
        try:
            yield future
        except Exception:
            await self._acknowledge(future)
            raise
        else:
            await self._acknowledge(future)
        finally:
            del self._awaited[session_id]

    async def _acknowledge(self, future: asyncio.Future[Delivery]) -> None:
        if future.done() and not future.cancelled():
            await self._sessions.acknowledge(future.result())


async def arrived(arrival: asyncio.Future[Delivery], timeout_s: float) -> SessionResult:
    """Returns a session that is awaited, once the collector has delivered it.

    Raises:
        DeadlineError: The collector did not deliver it within `timeout_s` seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return (await arrival).sessions[0]
    except TimeoutError as error:
        said = f"the collector did not deliver the session within {timeout_s:g} s"
        raise DeadlineError(said) from error


# Groups of a rollout: their settings, their outcomes, and whether they can still succeed.

Needed: TypeAlias = Literal["all", "any"] | int
"""How many sessions of a group must complete for the group to succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A sample with its own settings, which override those of the rollout."""

    sample: Any
    """The runner's first argument."""
    group_id: str = ""
    """Id of the group, unique in the run. If empty, the rollout chooses one."""
    n: int | None = None
    """Number of sessions in the group."""
    runner: str | AgentRunner | None = None
    """Runs the agent. Overrides the sample's `agent_name`."""
    sampling: Mapping[str, Any] | None = None
    """Sampling parameters of all turns, by the names of `SamplingParams`."""
    metadata: Mapping[str, str] | None = None
    """Carried to the trainer with the group's sessions."""
    start: Start | None = None
    """The context that the group's sessions start with. The runner finds it as `session.start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutcome:
    """The outcome of one seat of a group: that of its last attempt."""

    group_id: str
    sample_index: int
    outcome: Outcome
    """COMPLETED, FAILED (the agent), LOST (the infrastructure), or ABORTED (time limit exceeded, or
    the group had failed)."""
    session_id: str = ""
    """Empty if no session could be opened."""
    reward: float | None = None
    """Reward of the whole session."""
    result: Any = None
    """The runner's return value. None unless the session completed."""
    error: str = ""
    """Text of the error, up to 4,000 characters."""
    error_type: str = ""
    """Class of the error. Empty if there was none."""
    attempts: int = 1
    seconds: float = 0.0
    """Time from opening to closing the last session."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The outcome of one sample."""

    group_id: str
    sample: Any
    """The sample, as it was given to the rollout."""
    succeeded: bool
    """Whether at least `needed` sessions completed."""
    sessions: tuple[SampleOutcome, ...]
    """One for each seat, in order of sample_index."""
    run_id: str = ""
    """Id of the run, as in `Delivery.run_id`. Empty for a group whose id the rollout chose."""


def needed_of(needed: Needed, size: int) -> int:
    """Returns how many of `size` sessions must complete.

    Raises:
        InvalidFieldError: The number is not between 0 and `size`.
    """
    count = {"all": size, "any": 1}.get(needed, -1) if isinstance(needed, str) else needed
    if not 0 <= count <= size:
        raise InvalidFieldError(
            "needed", f'{needed!r} is invalid; give "all", "any" or 0 to {size}'
        )
    return count


@dataclass(slots=True)
class GroupState:
    """A running group."""

    group_id: str
    sample: Any
    size: int
    needed: int
    """Number of sessions that must complete."""
    runner: str | AgentRunner | None = None
    sampling: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    position: int = 0
    """Number of samples that the rollout took before it."""
    name: str = ""
    """Part of its sessions' seeds: the id that the caller chose, or the position."""
    start: Start | None = None
    _ended: dict[int, SampleOutcome] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether fewer than `needed` sessions can still complete."""
        lost = sum(outcome.outcome != "COMPLETED" for outcome in self._ended.values())
        return self.size - lost < self.needed

    def add(self, outcome: SampleOutcome) -> GroupOutcome | None:
        """Adds the outcome of a seat. Returns the outcome of the group with its last one.

        Raises:
            ValueError: The seat does not exist, or has ended already.
        """
        index = outcome.sample_index
        if index in self._ended or not 0 <= index < self.size:
            raise ValueError(f"group {self.group_id} has no open seat {index}")
        self._ended[index] = outcome
        if len(self._ended) < self.size:
            return None
        sessions = tuple(self._ended[index] for index in range(self.size))
        return GroupOutcome(self.group_id, self.sample, not self.failed, sessions, self.run_id)


# Calls the user's reward function: on the event loop if it is asynchronous, else in a thread.


@dataclass(frozen=True, slots=True)
class Episode:
    """The argument of a reward function: one agent's finished work."""

    sample: Any
    session: Session
    result: Any
    """The runner's return value."""
    transcript: Transcript
    """The conversation. `transcript.last` is its last turn."""


Score: TypeAlias = float | Rewards | None
RewardFunction: TypeAlias = Callable[[Episode], Score | Awaitable[Score]]
"""Scores an episode. A number is the session's reward, which applies to all its trajectories."""


class RewardTimeLimitError(Exception):
    """A reward function exceeded its time limit."""


class RewardCalls:
    """Calls a reward function under a time limit, in a bounded number of threads."""

    def __init__(self, function: RewardFunction, *, timeout_s: float, threads: int) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(threads)

    async def __call__(self, episode: Episode) -> Score:
        """Returns the score of an episode.

        Raises:
            RewardTimeLimitError: The function exceeded the limit. Its thread cannot be stopped. It
                keeps running, and counts towards the maximum, until the function returns.
            Exception: The function raised it.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self._function):
                    return cast("Score", await self._function(episode))
                value = await self._in_thread(episode)
                return cast("Score", await value if inspect.isawaitable(value) else value)
        except TimeoutError as error:
            if not limit.expired():
                raise  # raised by the function
            raise RewardTimeLimitError(
                f"the reward function exceeded its time limit of {self._timeout_s:g} s"
            ) from error

    async def _in_thread(self, episode: Episode) -> Any:
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[Any] = loop.create_future()

        def give(set_result: Callable[[Any], None], value: Any) -> None:
            self._slots.release()
            if not scored.done():
                set_result(value)

        def work() -> None:
            try:
                value, give_it = self._function(episode), scored.set_result
            except BaseException as error:  # the edge of the thread: the loop raises it
                # No future takes a StopIteration.
                is_raised = isinstance(error, Exception) and not isinstance(error, StopIteration)
                kept = error if is_raised else RuntimeError(repr(error))
                value, give_it = kept, scored.set_exception  # type: ignore[assignment]
            with contextlib.suppress(
                RuntimeError
            ):  # the loop has been closed. Nobody awaits the result
                loop.call_soon_threadsafe(give, give_it, value)

        # The interpreter joins the threads of a pool at exit. One that hangs would block it.
        try:
            threading.Thread(target=work, name="rollmesh-reward", daemon=True).start()
        except BaseException:  # the machine has no more threads
            self._slots.release()
            raise
        return await scored


# Runs an agent under a time limit.
#
# An agent is stopped by cancelling it, and once more after a grace period. Runners that own a
# process or a remote run end it gracefully at the first cancellation and immediately at the second.
# An agent that ignores both is abandoned and its session is closed. Its task belongs to no
# TaskGroup, because a TaskGroup would wait for it.

_Result = TypeVar("_Result")


class AgentTimeLimitError(Exception):
    """An agent exceeded its time limit."""


class AgentStoppedError(Exception):
    """An agent was stopped because its result is no longer needed."""


class AgentExitedError(Exception):
    """An agent raised SystemExit, or CancelledError without having been cancelled."""


async def supervised(
    agent: Coroutine[Any, Any, _Result],
    timeout_s: float,
    grace_s: float,
    stop: asyncio.Future[None],
) -> _Result:
    """Returns the result of an agent. Stops it at its time limit or when `stop` is done.

    Raises:
        AgentTimeLimitError: The agent exceeded the limit.
        AgentStoppedError: `stop` was done before the agent.
        AgentExitedError: The agent raised SystemExit, KeyboardInterrupt or CancelledError.
        Exception: The agent raised it.
    """

    async def contained() -> _Result:
        try:
            return await agent
        except (SystemExit, KeyboardInterrupt) as error:  # must not stop the event loop
            raise AgentExitedError(f"the agent raised {error!r}") from error

    task = asyncio.get_running_loop().create_task(contained())
    try:
        ends: set[asyncio.Future[Any]] = {task, stop}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _end(task, grace_s)
        raise
    if not task.done():
        await _end(task, grace_s)
        if stop.done():
            raise AgentStoppedError("the rollout stopped the agent")
        raise AgentTimeLimitError(f"the agent exceeded its time limit of {timeout_s:g} s")
    if task.cancelled():
        raise AgentExitedError("the agent raised CancelledError; nobody cancelled it")
    return task.result()


async def _end(task: asyncio.Task[Any], grace_s: float) -> None:
    """Cancels a task up to twice and abandons it if it is still running."""
    try:
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)
    finally:  # also if the wait itself is cancelled
        if not task.done():
            task.cancel()
    if not task.done():
        await asyncio.wait({task}, timeout=grace_s)
    if not task.done():
        _log.error("agent abandoned: it ignores cancellation")
    elif not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not report it


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Time limits of everything but the agents' own work, seconds."""

    grace_s: float = 30.0
    """From the first cancellation of an agent to the second, and from that to abandoning it."""
    close_s: float = 10.0
    """Opening or closing a session while the rollout is being cancelled."""
    reward_s: float = 60.0
    """One call of the reward function, including the wait for a thread, or of `closed`."""
    delivery_s: float = 600.0
    """Waiting until the collector delivers a closed session to `on_session`."""

    def __post_init__(self) -> None:
        """Checks the limits.

        Raises:
            InvalidFieldError: A limit is not positive.
        """
        for name, limit_s in vars(self).items():
            if not limit_s > 0:
                raise InvalidFieldError(f"limits.{name}", f"is {limit_s}; give more than 0")


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Which failed attempts are retried, each time in a new session.

    An attempt whose session could not be opened counts.

    An `InvalidFieldError` is never retried: it would occur again.
    """

    tries: int = 1
    """Maximum number of attempts, the first included. Refilled ones do not count."""
    delay_s: float = 2.0
    """Longest wait before the second attempt, seconds. Doubled before each further one."""
    time_limits: bool = False
    """Whether to retry agents that exceeded `timeout_s`. This favours short answers."""

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            InvalidFieldError: A number is too small.
        """
        if self.tries < 1:
            raise InvalidFieldError("retries.tries", f"is {self.tries}; give at least 1")
        if not self.delay_s >= 0:
            raise InvalidFieldError("retries.delay_s", f"is {self.delay_s}; give at least 0")

    def after(self, error: Exception, attempt: int) -> bool:
        """Returns whether to retry after an error of this attempt (1 for the first)."""
        if attempt >= self.tries or isinstance(error, (AgentStoppedError, InvalidFieldError)):
            return False
        return self.time_limits or not isinstance(error, AgentTimeLimitError)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The keyword arguments of `rollout` and `rollout_groups`."""

    runner: str | AgentRunner | None = None
    """Runs the samples without an `agent_name`: a function, or its registered name."""
    n: int = 8
    """Sessions per sample: the size of its group."""
    concurrency: int = 64
    """Maximum number of concurrent sessions."""
    timeout_s: float = 1800.0
    """Time limit of one agent, seconds."""
    limits: TimeLimits = field(default_factory=TimeLimits)
    retries: Retries = field(default_factory=Retries)
    refill: int = 0
    """How many further sessions a seat gets after failures of the infrastructure, beside `retries`.
    The lost sessions are superseded and carry the reason."""
    lost: Callable[[Exception], bool] = is_infrastructure
    """Whether an error of an agent or a reward function is one of the infrastructure. Its session
    is LOST, not FAILED."""
    needed: Needed = "any"
    """How many sessions of a group must complete for it to succeed: "all", "any", or a number.

    A group that can no longer succeed is stopped: running agents are cancelled, and sessions that
    have not started are opened and closed at once. All of them are ABORTED, so that the group is
    delivered with the outcome of each session.
    """
    reward: RewardFunction | None = None
    """Scores a finished agent. None: the runner returns the rewards."""
    reward_timeout_ms: int | None = None
    """Time for `Client.set_rewards` after the collector has stored a completed session,
    milliseconds. The session is held back until then. None: it is delivered with the rewards that
    it was closed with."""
    reward_threads: int = 8
    """Maximum number of concurrent calls of a reward function that is not asynchronous."""
    model: str = ""
    """Name of the model that answers. May be empty if the mesh has only one."""
    adapters: Sequence[AdapterChoice | str] = ()
    """The policies of the sessions, as of `Client.session`."""
    columns: Sequence[Column] = ()
    """Further values of each token to record, as of `Client.session`."""
    sampling: Mapping[str, Any] | None = None
    """Sampling parameters of all turns, by the names of `SamplingParams`."""
    sampling_policy: SamplingPolicy | None = None
    """Whether an agent may sample otherwise: "agent" (its parameters win), "enforce" (they are
    ignored and counted) or "refuse" (a 400). None: the gateway's setting."""
    metadata: Callable[[Any], Mapping[str, str]] | None = None
    """Returns the metadata of a sample's sessions, which the trainer receives."""
    group_id: Callable[[Any], str] | None = None
    """Returns the id of a sample's group, which must be unique in the run. None: random ids."""
    run_id: str | None = None
    """Id of the run: groups of two runs are two groups, also with one id. None: a random one for
    this rollout, if you chose the ids of its groups."""
    resume: Mapping[str, Any] | bool = False
    """Goes on with a rollout whose process died: with the state that `Rollout.state_dict` returned,
    or with the groups of `run_id`, if True. Give the same samples in the same order.

    Sessions that have ended keep their outcomes, and `on_session` gets them again. Others are
    superseded and run again, unless their runner has a method `resume`, which is called in its
    place. A state's `run_id` and `seed` win.
    Always give True where the process may be restarted: the first one finds nothing. If such a
    rollout is cancelled, running sessions are superseded too, and the other seats stay open.
    """
    seed: int | None = None
    """Gives each session a seed for its sampling, which depends on this, the group's id or its
    position, the seat, and the number of failed attempts of the agent. None: random samples."""
    export: ExportForm = "leaves"
    """The form in which sessions are delivered: one trajectory per leaf of the conversation tree,
    one per turn, or the tree itself as `SessionResult.tree`."""
    purpose: Purpose = "train"
    """The use of the sessions: "train", "eval" or "other". Consumers get those to train on by
    default."""
    budget: Budget | None = None
    """The calls, sampled tokens and seconds that the agent of each session may use."""
    record_messages: bool | None = None
    """Whether the records have the messages beside the tokens. None: the gateway's setting."""
    on_sample: Callable[[SampleOutcome], None] | None = None
    """Called with the outcome of each seat."""
    on_session: Callable[[SampleOutcome, SessionResult], Awaitable[None]] | None = None
    """Stores a completed session, as the collector delivers it, with the trainer.

    The session is acknowledged when the call returns, and counts towards `concurrency` until then.
    An error makes the outcome FAILED and is not retried. Other sessions of the consumer, such as
    those of failed attempts, are acknowledged at once. None: the trainer subscribes itself.
    """
    consumer: str = ""
    """Name at the collector for `on_session`. One for each trainer."""
    teacher: str = ""
    """Name of a model that scores the trajectories of `on_session`, as of `SubscribeOptions`."""
    teacher_top_k: int = 0
    """Number of most likely ids that the teacher names at each position."""
    progress: bool | None = None
    """Whether to show progress on standard error. None: if it is a terminal."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: A setting is invalid. The error names it.
        """
        for name in ("n", "concurrency", "reward_threads"):
            if getattr(self, name) < 1:
                raise InvalidFieldError(name, f"is {getattr(self, name)}; give at least 1")
        if self.refill < 0:
            raise InvalidFieldError("refill", f"is {self.refill}; give at least 0")
        if not self.timeout_s > 0:
            raise InvalidFieldError("timeout_s", f"is {self.timeout_s}; give more than 0")
        if self.reward_timeout_ms is not None and self.reward_timeout_ms < 1:
            raise InvalidFieldError(
                "reward_timeout_ms", f"is {self.reward_timeout_ms}; give at least 1, or None"
            )
        if self.resume and self.teacher:
            raise InvalidFieldError(
                "resume", "excludes teacher, whose scores come by delivery; subscribe instead"
            )
        if self.resume is True and not self.run_id:
            raise InvalidFieldError("run_id", "is not given; give that of the rollout to resume")
        if self.seed is not None and "seed" in (self.sampling or {}):
            raise InvalidFieldError("sampling", "has a seed beside that of the rollout; give one")
        RolloutState.of(self)
        if (self.on_session is None) != (self.consumer == ""):
            raise InvalidFieldError(
                "consumer", "needs on_session and on_session needs consumer; give both"
            )
        needed_of(self.needed, self.n)
        Client.session_request(**_of_sessions(self))
        if self.runner is not None:
            find_runner(self.runner)


def _of_sessions(settings: RolloutSettings) -> dict[str, Any]:
    """Returns the settings that are arguments of `Client.session_request`, too."""
    names = "model adapters columns sampling sampling_policy export purpose budget record_messages"
    return {name: getattr(settings, name) for name in names.split()}


# The state of a rollout, and the ids that its sessions are found by.

_STEPS_KEPT = 64
_STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The part of a rollout that its successor needs."""

    rollout_id: str
    run_id: str | None
    seed: int | None
    taken: int = 0
    """Number of samples whose groups have begun."""
    running: tuple[int, ...] = ()
    """Positions of those whose groups have not ended."""

    @classmethod
    def of(cls, settings: RolloutSettings) -> "RolloutState":
        """Returns the state with which a rollout begins.

        Raises:
            InvalidFieldError: `resume` is no state.
        """
        if not isinstance(settings.resume, Mapping):
            rollout_id = (settings.run_id if settings.resume else None) or uuid.uuid4().hex
            return cls(rollout_id, settings.run_id, settings.seed)
        values = dict(settings.resume)
        if values.pop("format", None) != _STATE_FORMAT:
            raise InvalidFieldError("resume.format", "is unknown; give what state_dict returned")
        try:
            values["running"] = tuple(values["running"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise InvalidFieldError("resume", f"{error}; give what state_dict returned") from error

    def seed_of(self, group: GroupState, index: int, failures: int) -> int:
        """Returns the seed of a session."""
        return int(_digest(self.seed, group.name, index, failures)[:8], 16) >> 1

    def request_id(self, group: GroupState, index: int, attempt: int) -> str:
        """Returns the request id of a session."""
        return _digest(self.rollout_id, group.run_id, group.group_id, index, attempt)[:32]


class GroupIds:
    """Ids of the groups of a trainer's steps, which follow from the samples.

    A restarted trainer that takes the same samples in a step gets the ids that they had before, by
    which a rollout with `resume` finds their sessions.
    """

    def __init__(self) -> None:
        self._steps: OrderedDict[tuple[object, ...], Counter[str]] = OrderedDict()

    def id(self, *step: object, sample: object) -> str:
        """Returns the id of the next group of a step with this sample, which has a stable `repr`.

        Equal samples of a step get different ids, in their order.
        """
        seen = self._steps.setdefault(step, Counter())
        self._steps.move_to_end(step)
        if len(self._steps) > _STEPS_KEPT:
            self._steps.popitem(last=False)
        name = _digest(*step, sample)[:16]
        seen[name] += 1
        return "-".join(map(str, (*step, name, seen[name])))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# Runs one seat of a group: attempts, each in its own session, until one counts.
#
# A failed attempt that is retried is closed as *superseded*: the collector keeps it, and its seat
# belongs to the next attempt. The next attempt starts only after that close is durable. If it is
# not confirmed, the seat is refilled all the same, or abandoned: the collector delivers one session
# a seat, and a LOST one, as the gateway closes it later, only without another. So no group waits.

_FRAMES = -4  # the last ones, which are the agent's
_WITH_DIGIT = re.compile(r"[\w-]*\d[\w-]*")
"""Ids, ports and the like, which differ between two occurrences of an error."""


@dataclass(eq=False, slots=True)
class Seat:
    """The seat of an attempt: a group and an index in it."""

    group: GroupState
    index: int
    stop: asyncio.Future[None]
    """Done when the group has failed and needs no more sessions."""
    taken: bool = False
    """Whether a session has it that is not superseded."""
    refilled: int = 0
    """Number of its attempts that began because the infrastructure failed one."""
    earlier: int = 0
    """Number of attempts that an earlier process began."""
    left: str = ""
    """Id of the session that the last of these left open."""
    kept: session_pb2.SessionRecord | None = None
    """The session that has it from an earlier process, or the record of its abandonment."""


class Attempts:
    """Runs the seats of one rollout."""

    def __init__(
        self,
        client: Client,
        settings: RolloutSettings,
        arrivals: Arrivals | None,
        state: RolloutState,
    ) -> None:
        """Takes the rollout's settings. `arrivals` is None without `on_session`."""
        self._client = client
        self._settings = settings
        self._state = state
        self._arrivals = arrivals
        self._limits = settings.limits
        self._retries = settings.retries
        self._errors: set[str] = set()
        self._score = settings.reward and RewardCalls(
            settings.reward, timeout_s=settings.limits.reward_s, threads=settings.reward_threads
        )

    async def run(self, seat: Seat) -> SampleOutcome:
        """Runs a seat to its end and returns the outcome. Errors of the agent are part of it."""
        if seat.kept is not None:
            kept = _kept(seat, seat.kept, is_stale=self._is_stale(seat.kept))
            if kept.session_id:
                await self._tell(seat, kept.session_id, kept.attempts)
            return await self._hand_over(seat, kept)
        backoff = Backoff(self._retries.delay_s, math.inf)
        going = await self._left(seat)
        attempt, is_new = seat.earlier + 1, True
        request = self._request(seat, attempt)
        while True:
            started_ms = clock.monotonic_ms()
            try:
                session = going or await self._open(seat, request, is_new=is_new)
            except Exception as error:  # a lost seat is an outcome
                if self._settings.resume and isinstance(error, SessionClosedError):
                    seat.earlier += 1  # its gateway was away when the seats were looked for
                    attempt += 1
                    request = self._request(seat, attempt)
                    continue
                is_new = False
                self._report("session could not be opened", error, seat, attempt)
                if not self._again(seat, error, attempt):
                    await self.abandon(seat, text_of(error))
                    return _outcome(seat, attempt, self._fate(error), error=error)
                # The same request: if the session was opened after all, the repeat returns it.
            else:
                try:
                    outcome = await self._attempt(seat, session, attempt, started_ms)
                except Exception as error:  # a lost session is an outcome
                    self._report("session lost", error, seat, attempt, session.session_id)
                    if not self._again(seat, error, attempt):
                        if not self._is_taken_over(error):
                            await self.abandon(seat, text_of(error))
                        return _outcome(seat, attempt, self._fate(error), error=error)
                    outcome, seat.taken = None, False
                if session.closed:
                    await self._tell(seat, session.session_id, attempt)
                if outcome is not None:
                    return outcome
                request, is_new, going, seat.left = self._request(seat, attempt + 1), True, None, ""
            await asyncio.wait({seat.stop}, timeout=backoff.next_s())
            attempt += 1

    async def find(self, group: GroupState, stop: asyncio.Future[None]) -> list[Seat]:
        """Returns a group's seats, with the sessions that an earlier process opened for them.

        A group of which the trainer's run would be delivered nothing is over. Its seats get new
        sessions, as a group of another run.
        """
        first, seats = group.run_id, [Seat(group, index, stop) for index in range(group.size)]
        records: list[session_pb2.SessionRecord] = []
        for generation in itertools.count(1):
            await asyncio.gather(*map(self._look_for, seats))
            records = await self._client.stored_group(group.group_id, group.run_id)
            sampled = [one for one in records if one.trajectories or one.HasField("tree")]
            is_over = bool(sampled) and all(map(self._is_stale, sampled))
            if not records and not any(seat.left for seat in seats):  # the collector removed it
                is_over = any(seat.earlier for seat in seats)
            if not is_over:
                break
            taken = {one.sample_index for one in records}
            for seat in seats:
                await self._end_left(seat)
                if taken and seat.index not in taken:
                    await self.abandon(seat, "an abandoned run sampled the other sessions")
            group.run_id = f"{first}~{generation}"
        lost = session_pb2.SESSION_OUTCOME_LOST
        for one in sorted(records, key=lambda one: one.outcome == lost):
            if one.sample_index < group.size:
                seats[one.sample_index].kept = seats[one.sample_index].kept or one
        is_whole = all(seat.kept is not None for seat in seats)
        for seat in seats:  # the seats of lost sessions are free as long as the group waits
            if seat.kept is not None and seat.kept.outcome == lost and not is_whole:
                seat.kept = None
            seat.taken = seat.kept is not None
        return seats

    async def _look_for(self, seat: Seat) -> None:
        """Counts the attempts of a seat, and waits until the collector has the closed sessions."""
        seat.earlier, seat.left = 0, ""
        wait, until_ms = Backoff(0.1, 1.0), clock.monotonic_ms() + self._limits.delivery_s * 1000
        while True:
            request_id = self._state.request_id(seat.group, seat.index, seat.earlier + 1)
            found = await self._client.find_session(request_id)
            if found is None:
                return
            if found.undelivered and clock.monotonic_ms() < until_ms:
                await asyncio.sleep(wait.next_s())
                continue
            seat.earlier += 1
            seat.left = "" if found.closed else found.session_id

    async def _left(self, seat: Seat) -> Session | None:
        """Returns the session that an earlier process left, if its runner goes on. Or ends it."""
        if not seat.left:
            return None
        if hasattr(find_runner(seat.group.runner), "resume"):
            try:
                session = await self._open(seat, self._request(seat, seat.earlier), is_new=False)
                spans = (await self._client.transcript(session)).version_spans
            except RollmeshError as error:  # closed meanwhile, or its gateway is away
                self._report("session could not be resumed", error, seat, seat.earlier, seat.left)
            else:
                if not self._client.is_abandoned(spans, session.model):
                    seat.earlier -= 1  # the attempt goes on
                    return session
        await self._end_left(seat)
        return None

    async def _end_left(self, seat: Seat) -> None:
        """Supersedes the session that an earlier process left. Its seat is free in any case."""
        if not seat.left:
            return
        try:
            session = await self._open(seat, self._request(seat, seat.earlier), is_new=False)
            session.metadata["error"] = "its runner died with the process of the rollout"
            await self._close(session, "LOST", superseded=True)
        except RollmeshError as error:
            self._report("session left open", error, seat, seat.earlier, seat.left)
        seat.left, seat.taken = "", False

    def _is_stale(self, record: session_pb2.SessionRecord) -> bool:
        """Returns whether abandoned runs sampled tokens of a session."""
        rows = [record.tree] if record.HasField("tree") else record.trajectories
        return self._client.is_abandoned(
            (span for row in rows for span in row.version_spans), record.model
        )

    def _again(self, seat: Seat, error: Exception, attempt: int) -> bool:
        """Returns whether the seat gets another session after an error. Counts refills."""
        if seat.stop.done() or self._is_taken_over(error):
            return False
        if seat.refilled < self._settings.refill and self._fate(error) == "LOST":
            seat.refilled += 1
            return True
        return self._retries.after(error, attempt - seat.refilled - seat.earlier)

    def _is_taken_over(self, error: Exception) -> bool:
        """Returns whether a successor of this process has closed a session, and has the seat."""
        return bool(self._settings.resume) and isinstance(error, RepeatConflictError)

    def _fate(self, error: Exception) -> Outcome:
        """Returns the outcome of a session that ended with an error."""
        if isinstance(error, (AgentStoppedError, AgentTimeLimitError)):
            return "ABORTED"
        return "LOST" if self._settings.lost(error) else "FAILED"

    async def abandon(self, seat: Seat, reason: str) -> None:
        """Tells the collector that no session takes a seat, so that its group does not wait."""
        settings, group = self._settings, seat.group
        try:
            await self._client.abandon_seat(
                group.group_id,
                seat.index,
                group.size,
                reason=reason,
                model=settings.model,
                purpose=settings.purpose,
                metadata=group.metadata,
                run_id=group.run_id,
            )
        except RollmeshError as error:
            _log.warning(
                "seat could not be abandoned, its group keeps waiting: %s",
                text_of(error),
                extra=fields(group=group.group_id, sample=seat.index),
            )

    async def _attempt(
        self, seat: Seat, session: Session, attempt: int, started_ms: int
    ) -> SampleOutcome | None:
        """Runs an agent in a session and closes it. Returns None if it must be retried.

        Raises:
            RollmeshError: The close was not confirmed.
        """
        ended = partial(_outcome, seat, attempt, session=session, started_ms=started_ms)
        try:
            result = await self._work(seat, session)
        except asyncio.CancelledError:
            session.rewards = Rewards()
            await self._abort(session)
            raise
        except Exception as error:  # a failed agent is an outcome
            return await self._failed(seat, session, attempt, error, ended)
        try:
            complete = partial(ended, "COMPLETED", result=result)
            return await self._completed(seat, session, complete)
        except InvalidFieldError as error:
            if session.closed:
                raise
            # A reward names a turn or trajectory that does not exist. The session is still open.
            return await self._failed(seat, session, attempt, error, ended)

    async def _completed(
        self, seat: Seat, session: Session, ended: Callable[[], SampleOutcome]
    ) -> SampleOutcome:
        """Closes a session and, with `on_session`, hands over its delivered result.

        Raises:
            InvalidFieldError: The rewards do not fit the session, which is still open.
            RollmeshError: The close was not confirmed.
        """
        arrivals = self._arrivals
        async with arrivals.awaited(session.session_id) if arrivals else nullcontext() as arrival:
            await self._close(session, "COMPLETED")
            outcome = ended()
            if arrival is None or self._settings.on_session is None:
                return outcome
            try:
                delivered = await arrived(arrival, self._limits.delivery_s)
                await self._settings.on_session(outcome, delivered)
            except Exception as error:  # the trainer's code failed
                return self._not_taken(seat, outcome, error)
            return outcome

    async def _hand_over(self, seat: Seat, outcome: SampleOutcome) -> SampleOutcome:
        """Gives `on_session` a session that completed in an earlier process, from the store.

        It may have been delivered and acknowledged before.
        """
        if self._settings.on_session is None or outcome.outcome != "COMPLETED":
            return outcome
        # Once it has a reward, or need not wait for one.
        wait, wait_ms = Backoff(0.1, 1.0), self._settings.reward_timeout_ms or 0
        until_ms = clock.monotonic_ms() + min(wait_ms, self._limits.delivery_s * 1000)
        try:
            stored = await self._client.stored_session(outcome.session_id)
            while stored.reward is None and clock.monotonic_ms() < until_ms:
                await asyncio.sleep(wait.next_s())
                stored = await self._client.stored_session(outcome.session_id)
            await self._settings.on_session(outcome, stored)
        except Exception as error:  # the trainer's code failed, or the session was removed
            return self._not_taken(seat, outcome, error)
        return outcome

    def _not_taken(self, seat: Seat, outcome: SampleOutcome, error: Exception) -> SampleOutcome:
        said, kind = text_of(error), type(error).__name__
        self._report("session not taken", error, seat, outcome.attempts, outcome.session_id)
        return replace(outcome, outcome="FAILED", result=None, error=said, error_type=kind)

    async def _work(self, seat: Seat, session: Session) -> Any:
        """Runs and scores the agent. Returns the runner's result."""
        sample = seat.group.sample
        if seat.stop.done():
            raise AgentStoppedError("stopped because its group failed")
        run = find_runner(seat.group.runner)
        if session.session_id == seat.left:
            run = run.resume  # type: ignore[attr-defined]

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

    async def _tell(self, seat: Seat, session_id: str, attempt: int) -> None:
        """Tells a runner with a method `closed` that a session of it is closed."""
        try:
            runner = find_runner(seat.group.runner)
            if (closed := getattr(runner, "closed", None)) is not None:
                async with asyncio.timeout(self._limits.reward_s):
                    await closed(self._client, session_id)
        except Exception as error:  # the session counts all the same
            self._report("runner failed after the close", error, seat, attempt, session_id)

    async def _failed(
        self,
        seat: Seat,
        session: Session,
        attempt: int,
        error: Exception,
        ended: Callable[..., SampleOutcome],
    ) -> SampleOutcome | None:
        """Closes the session of a failed attempt. Returns None if it must be retried."""
        again, outcome = self._again(seat, error, attempt), self._fate(error)
        session.rewards = Rewards()
        self._report("agent failed", error, seat, attempt, session.session_id)
        session.metadata.setdefault("error", text_of(error)[:_TEXT_CHARS])
        try:
            await self._close(session, outcome, superseded=again)
            seat.taken = not again
        except RollmeshError as refused:  # its seat may not be free for another attempt
            _log.warning("session left open", extra=fields(error=type(refused).__name__))
            if self._is_taken_over(refused):
                again = False
            elif not (again and outcome == "LOST"):  # it may be kept, and its answer lost
                await self.abandon(seat, f"the close of a failed attempt: {text_of(refused)}")
                again = False
            seat.taken = not again
        except asyncio.CancelledError:  # after the close, or before it could be kept
            seat.taken = not (again and session.closed)
            raise
        return None if again else ended(outcome, error=error)

    def _report(
        self, event: str, error: Exception, seat: Seat, attempt: int, session_id: str = ""
    ) -> None:
        """Logs an error: each distinct one once as a warning, with its traceback."""
        text = text_of(error)
        kind = _WITH_DIGIT.sub("#", text)
        is_new = kind not in self._errors and len(self._errors) < _MAX_TEXTS
        if is_new:
            self._errors.add(kind)
        frames = traceback.format_tb(error.__traceback__, limit=_FRAMES) if is_new else []
        _log.log(
            logging.WARNING if is_new else logging.INFO,
            "%s: %s",
            event,
            "\n".join((text, *(frame.rstrip() for frame in frames))),
            extra=fields(
                session_id=session_id,
                group=seat.group.group_id,
                sample=seat.index,
                attempt=attempt,
                error=text,
            ),
        )

    def _request(self, seat: Seat, attempt: int) -> gateway_pb2.CreateSessionRequest:
        metadata = dict(seat.group.metadata)
        if attempt > 1:
            metadata["attempt"] = str(attempt)
        sampling = seat.group.sampling
        if self._state.seed is not None:
            failures = attempt - seat.refilled - seat.earlier - 1
            seed = self._state.seed_of(seat.group, seat.index, max(failures, 0))
            sampling = {"seed": seed, **(sampling or {})}
        return self._client.session_request(
            **{**_of_sessions(self._settings), "sampling": sampling},
            run_id=seat.group.run_id,
            group_id=seat.group.group_id,
            sample_index=seat.index,
            group_size=seat.group.size,
            request_id=self._state.request_id(seat.group, seat.index, attempt),
            metadata=metadata,
            start=seat.group.start,
        )

    async def _open(
        self, seat: Seat, request: gateway_pb2.CreateSessionRequest, *, is_new: bool
    ) -> Session:
        """Opens a session. If the rollout is cancelled meanwhile, closes it again."""
        opened: list[Session] = []

        async def opening() -> None:
            session = await self._client.open_session(request, is_new=is_new)
            session.start = seat.group.start
            opened.append(session)
            seat.taken = True

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
        """Closes a session after a cancellation. On failure, the gateway's idle limit closes it."""
        frees = bool(self._settings.resume)  # the seat, for a successor

        async def closing() -> None:
            try:
                async with asyncio.timeout(self._limits.close_s):
                    await self._client.close_session(
                        session, outcome="LOST" if frees else "ABORTED", superseded=frees
                    )
            except (TimeoutError, RollmeshError) as error:
                _log.warning("session left open", extra=fields(error=type(error).__name__))

        await shielded(closing(), self._limits.close_s)


def _kept(seat: Seat, record: session_pb2.SessionRecord, *, is_stale: bool) -> SampleOutcome:
    """Returns the outcome of a seat that has its session from an earlier process."""
    outcome = cast("Outcome", name_of(session_pb2.SessionOutcome.DESCRIPTOR, record.outcome))
    error = record.abandoned or record.metadata.get("error", "")
    return SampleOutcome(
        group_id=record.group_id,
        sample_index=record.sample_index,
        outcome="LOST" if is_stale else outcome,
        session_id="" if record.abandoned else record.session_id,
        reward=record.reward if record.HasField("reward") else None,
        error="an abandoned run sampled it" if is_stale else error,
        attempts=max(seat.earlier, 1),
        seconds=(record.closed_unix_ms - record.opened_unix_ms) / 1000,
    )


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
    """Returns the outcome of a seat. It has no session if opening or closing it failed."""
    return SampleOutcome(
        group_id=seat.group.group_id,
        sample_index=seat.index,
        outcome=outcome,
        session_id=session.session_id if session else "",
        reward=session.reward if session else None,
        result=result,
        attempts=attempt,
        seconds=(clock.monotonic_ms() - started_ms) / 1000 if session else 0.0,
        error=text_of(error) if error else "",
        error_type=type(error).__name__ if error else "",
    )


# The summary of a rollout, in bounded memory.

_MAX_ERROR_TYPES = 64
_MAX_TEXTS = 16
_TEXT_CHARS = 500
_STEP = 1.05


@dataclass(slots=True)
class Durations:
    """A histogram of durations, in buckets of 5 %."""

    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        """Counts a duration."""
        self._buckets[round(math.log(max(seconds, 1e-3), _STEP))] += 1

    def quantile(self, share: float) -> float | None:
        """Returns a quantile, accurate to 5 %. None if the histogram is empty."""
        left = share * self._buckets.total()
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return float(_STEP**bucket)
        return None


@dataclass(slots=True)
class RolloutSummary:
    """The summary of a rollout."""

    counts: Counter[str] = field(default_factory=Counter)
    """Places by outcome: COMPLETED, FAILED, ABORTED, LOST."""
    groups: Counter[str] = field(default_factory=Counter)
    """Groups: succeeded, failed."""
    errors: Counter[str] = field(default_factory=Counter)
    """Places by class of the error. "other" beyond 64 classes."""
    texts: Counter[str] = field(default_factory=Counter)
    """Seats by the text of the error, for the first 16 distinct texts. A text is cut after 500
    characters."""
    lost: int = 0
    """Seats without a session that counts: none could be opened, or its close was not confirmed."""
    retries: int = 0
    """Attempts after the first, refilled ones too."""
    rewarded: int = 0
    """Sessions with a reward."""
    reward_sum: float = 0.0
    seconds: Durations = field(default_factory=Durations)
    """Time that sessions were open."""

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the sessions that have one."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    def add(self, outcome: SampleOutcome) -> None:
        """Counts a seat."""
        self.counts[outcome.outcome] += 1
        self.retries += outcome.attempts - 1
        if outcome.error_type:
            known = outcome.error_type in self.errors or len(self.errors) < _MAX_ERROR_TYPES
            name = outcome.error_type if known else "other"
            self.errors[name] += 1
            text = outcome.error[:_TEXT_CHARS]
            if text in self.texts or len(self.texts) < _MAX_TEXTS:
                self.texts[text] += 1
        if outcome.reward is not None:
            self.rewarded += 1
            self.reward_sum += outcome.reward
        if outcome.session_id:
            self.seconds.add(outcome.seconds)
        else:
            self.lost += 1

    def add_group(self, group: GroupOutcome) -> None:
        """Counts a group."""
        self.groups["succeeded" if group.succeeded else "failed"] += 1

    def __str__(self) -> str:
        """Returns the summary as one line, and a line for each of up to five distinct errors."""
        parts = [f"{outcome.lower()} {count}" for outcome, count in sorted(self.counts.items())]
        parts += [f"groups {name} {count}" for name, count in sorted(self.groups.items())]
        if self.lost:
            parts.append(f"seats lost {self.lost}")
        if self.retries:
            parts.append(f"retries {self.retries}")
        if self.mean_reward is not None:
            parts.append(f"reward {self.mean_reward:.3f}")
        for share in (0.5, 0.99):
            if (seconds := self.seconds.quantile(share)) is not None:
                parts.append(f"p{share * 100:.0f} {seconds:.2f} s")
        return "\n".join([", ".join(parts), *self.first_errors()])

    def first_errors(self, most: int = 5) -> list[str]:
        """Returns a line for each of the first distinct errors: the seats, and the text."""
        first = list(self.texts.items())[:most]
        return [f"  {count} failed: {' '.join(text.split())}" for text, count in first]


# Shows the progress of a rollout.

Show: TypeAlias = Callable[[RolloutSummary], None]
_LINE_MS = 5_000


@contextmanager
def showing(total: int | None, *, wanted: bool | None) -> Iterator[Show]:
    """Yields a function that shows a summary on standard error: a line every 5 s, and the last.

    Args:
        total: Number of seats. None if unknown.
        wanted: Whether to show anything. None: if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    written_ms, last = clock.monotonic_ms(), None
    of = "" if total is None else f"/{total}"

    def show(summary: RolloutSummary | None, after_ms: int = _LINE_MS) -> None:
        nonlocal written_ms, last
        last, now_ms = summary, clock.monotonic_ms()
        if summary is not None and now_ms - written_ms >= after_ms:
            sys.stderr.write(f"rollout {summary.counts.total()}{of}: {summary}\n")
            sys.stderr.flush()
            written_ms, last = now_ms, None

    try:
        yield show
    finally:
        show(last, after_ms=0)


Samples: TypeAlias = Iterable[Any] | AsyncIterable[Any]
"""Samples for the runners, or `Group`s. Each becomes one group."""
_Keywords = ParamSpec("_Keywords")
_Settings = TypeVar("_Settings", bound=RolloutSettings)


class Rollout(AsyncIterator[GroupOutcome]):
    """A running rollout: an iterator over its groups as they end. Made by `rollout_groups`."""

    def __init__(
        self,
        attempts: Attempts,
        samples: Samples,
        settings: RolloutSettings,
        show: Show,
        state: RolloutState,
    ) -> None:
        """Takes the samples. `feed` starts them."""
        self.summary = RolloutSummary()
        """Summary of the seats and groups that have ended."""
        self._samples = samples
        self._settings = settings
        self._show = show
        self._attempts = attempts
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._running: set[asyncio.Task[None]] = set()
        self._seats: set[Seat] = set()
        """The seats of groups that have begun, without those that have ended."""
        self._ended: asyncio.Queue[GroupOutcome | None] = asyncio.Queue(settings.concurrency)
        self._source_error: Exception | None = None
        self._begun = state
        self._taken = state.taken
        self._open = set(state.running)

    async def __anext__(self) -> GroupOutcome:
        """Waits for the next group to end.

        Raises:
            Exception: The iterable of samples raised it. Raised after the last group.
        """
        group = await self._ended.get()
        if group is not None:
            return group
        self._ended.put_nowait(None)  # for the next call
        if self._source_error is not None:
            raise self._source_error
        raise StopAsyncIteration

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which `resume` goes on, as a dictionary for JSON or `torch.save`.

        Make the state of the consumer before it, and save both in the trainer's checkpoint. Groups
        that have ended are not in it: the consumer gets them.
        """
        state = replace(self._begun, taken=self._taken, running=tuple(sorted(self._open)))
        return {"format": _STATE_FORMAT, **asdict(state)}

    async def feed(self, tasks: asyncio.TaskGroup) -> None:
        """Starts a session whenever there is room for one, until the samples end."""
        try:
            position = -1
            async for sample in each(self._samples):
                position += 1
                if position < self._begun.taken and position not in self._begun.running:
                    continue
                stop = asyncio.get_running_loop().create_future()
                group = self._begin(sample, position)
                if self._settings.resume:
                    seats = await self._attempts.find(group, stop)
                else:
                    seats = [Seat(group, index, stop) for index in range(group.size)]
                self._seats.update(seats)
                self._taken = max(self._taken, position + 1)
                self._open.add(position)
                for seat in seats:
                    await self._slots.acquire()
                    task = tasks.create_task(self._run(seat))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        except Exception as error:  # `__anext__` raises it
            self._source_error = error
        while self._running:
            await asyncio.wait(self._running)
        await self._ended.put(None)

    def cancel(self) -> None:
        """Cancels the running seats."""
        for task in self._running:
            task.cancel()

    async def abandon(self, timeout_s: float) -> None:
        """Abandons the seats that a cancellation left without a session, in at most `timeout_s`.

        A reader in another task, as of the client without async, gets no further group.
        """
        if self._ended.full():
            self._ended.get_nowait()
        self._ended.put_nowait(None)
        left = [] if self._settings.resume else [one for one in self._seats if not one.taken]
        self._seats.clear()
        reason = "the rollout was cancelled before a session took the seat"
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._attempts.abandon(seat, reason) for seat in left))

    def _begin(self, given: Any, position: int) -> GroupState:
        """Returns the group of a sample. Its own settings override those of the rollout."""
        settings = self._settings
        group = given if isinstance(given, Group) else Group(sample=given)
        sample, n = group.sample, settings.n if group.n is None else group.n
        if n < 1:
            raise InvalidFieldError("n", f"is {n}; give at least 1")
        metadata = group.metadata
        if metadata is None:
            metadata = settings.metadata(sample) if settings.metadata else {}
        if agent := agent_name(sample):
            metadata = {**metadata, "agent_name": agent}
        state, group_id = self._begun, group.group_id
        run_id = state.rollout_id if state.run_id is None else state.run_id
        if not group_id and settings.group_id:
            group_id = settings.group_id(sample)
            if not isinstance(group_id, str) or not group_id:
                raise InvalidFieldError("group_id", f"returned {group_id!r:.200}; return a string")
        name = group_id or str(position)
        if not group_id:  # the id of a rollout is that of one in all runs
            group_id, run_id = f"{state.rollout_id}-{position}", state.run_id or ""
        return GroupState(
            group_id,
            sample,
            n,
            needed_of(settings.needed, n),
            group.runner or agent or settings.runner,
            settings.sampling if group.sampling is None else group.sampling,
            dict(metadata),
            run_id,
            position,
            name,
            group.start,
        )

    async def _run(self, seat: Seat) -> None:
        try:
            outcome = await self._attempts.run(seat)
            self._seats.discard(seat)
            self.summary.add(outcome)
            group = seat.group.add(outcome)
            if seat.group.failed and not seat.stop.done():
                seat.stop.set_result(None)
            if group is not None:
                self.summary.add_group(group)
                self._open.discard(seat.group.position)
            self._show(self.summary)
            if self._settings.on_sample is not None:
                self._settings.on_sample(outcome)
            if group is not None:
                await self._ended.put(group)
        finally:
            self._slots.release()


def with_settings(
    make: Callable[_Keywords, _Settings],
) -> Callable[
    [Callable[[Client, Samples, _Settings], _Result]],
    Callable[Concatenate[Client, Samples, _Keywords], _Result],
]:
    """Turns a function of the settings into one of keyword arguments, with their types."""

    def wrap(
        call: Callable[[Client, Samples, _Settings], _Result],
    ) -> Callable[Concatenate[Client, Samples, _Keywords], _Result]:
        def called(
            client: Client, samples: Samples, /, *args: _Keywords.args, **settings: _Keywords.kwargs
        ) -> _Result:
            return call(client, samples, make(*args, **settings))

        functools.update_wrapper(called, call)
        return called

    return wrap


@with_settings(RolloutSettings)
def rollout_groups(
    client: Client, samples: Samples, settings: RolloutSettings
) -> AbstractAsyncContextManager[Rollout]:
    """Rolls samples out while the block runs: `async with ... as groups: async for g in groups`.

    Leaving the block early stops running agents and closes their sessions. The keyword arguments
    are those of `RolloutSettings`.

    Raises:
        InvalidFieldError: A setting is invalid.
        Exception: `on_sample` raised it.
    """
    return _rolling(client, samples, settings)


@with_settings(RolloutSettings)
async def rollout(client: Client, samples: Samples, settings: RolloutSettings) -> RolloutSummary:
    """Runs every sample `n` times, as one group, and waits for all groups.

    The keyword arguments are those of `RolloutSettings`.

    Returns:
        Counts, rewards and durations. A failed session does not affect its siblings.

    Raises:
        InvalidFieldError: A setting is invalid.
        Exception: The iterable of samples or `on_sample` raised it.
    """
    async with _rolling(client, samples, settings) as groups:
        async for _ in groups:
            pass
    return groups.summary


@asynccontextmanager
async def _rolling(
    client: Client, samples: Samples, settings: RolloutSettings
) -> AsyncIterator[Rollout]:
    error: Exception | None = None
    with showing(_total(samples, settings.n), wanted=settings.progress) as show:
        async with _deliveries(client, settings) as deliveries:
            arrivals = None if deliveries is None else Arrivals(deliveries)
            state = RolloutState.of(settings)
            attempts = Attempts(client, settings, arrivals, state)
            running = Rollout(attempts, samples, settings, show, state)
            try:
                async with asyncio.TaskGroup() as tasks:
                    working = [tasks.create_task(running.feed(tasks))]
                    if arrivals is not None:
                        working.append(tasks.create_task(arrivals.serve()))
                    try:
                        yield running
                    except Exception as raised:  # raised below, not in a group
                        error = raised
                    for task in working:
                        task.cancel()
                    running.cancel()
            except (
                ExceptionGroup
            ) as group:  # of `on_sample`. An error of the block takes precedence
                error = error or group.exceptions[0]
            finally:
                await shielded(running.abandon(settings.limits.close_s), settings.limits.close_s)
    if error is not None:
        raise error


def _deliveries(
    client: Client, settings: RolloutSettings
) -> AbstractAsyncContextManager[Subscription | None]:
    """Returns the subscription for `on_session`."""
    if settings.on_session is None:
        return nullcontext()
    return client.subscribe(
        settings.consumer,
        unit="session",
        credits=settings.concurrency,
        options=SubscribeOptions(
            filter=collector_pb2.DeliveryFilter(
                model=settings.model, purposes=[chosen("purpose", settings.purpose, PURPOSES)]
            ),
            teacher=settings.teacher,
            top_k=settings.teacher_top_k,
            messages=bool(settings.record_messages),
        ),
    )


def _total(samples: Samples, n: int) -> int | None:
    """Returns the number of seats, for the progress. None if it is not known."""
    if isinstance(samples, (list, tuple)):
        return sum((isinstance(one, Group) and one.n) or n for one in samples)
    return len(samples) * n if isinstance(samples, Sized) else None


async def each(samples: Samples) -> AsyncIterator[Any]:
    """Yields the samples of an iterable of either kind."""
    if isinstance(samples, AsyncIterable):
        async for sample in samples:
            yield sample
    else:
        for sample in samples:
            yield sample
