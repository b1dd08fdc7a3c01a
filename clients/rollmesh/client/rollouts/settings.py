"""The settings of a rollout."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.client.arguments import ExportForm, export_mode, read_sampling
from rollmesh.client.rollouts.groups import Needed, SampleOutcome, needed_of
from rollmesh.client.rollouts.scoring import RewardFunction
from rollmesh.client.rollouts.supervision import AgentStoppedError, AgentTimeLimitError
from rollmesh.client.runners import AgentRunner, find_runner
from rollmesh.client.sessions.trajectories import SessionResult
from rollmesh.runtime.errors import InvalidFieldError


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Time limits of everything but the agents' own work, seconds."""

    grace_s: float = 30.0
    """From the first cancellation of an agent to the second, and from that to abandoning it."""
    close_s: float = 10.0
    """Opening or closing a session while the rollout is being cancelled."""
    reward_s: float = 60.0
    """One call of the reward function, including the wait for a thread."""
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

    An `InvalidFieldError` is never retried: it would occur again.
    """

    tries: int = 1
    """Maximum number of attempts, the first included."""
    delay_s: float = 2.0
    """Longest wait before the second attempt, seconds; doubled before each further one."""
    time_limits: bool = False
    """Whether to retry agents that exceeded `timeout_s`; this favours short answers."""

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
    needed: Needed = "any"
    """How many sessions of a group must complete for it to succeed: "all", "any", or a number.

    A group that can no longer succeed is stopped: running agents are cancelled, and sessions that
    have not started are opened and closed at once. All of them are ABORTED, so that the group is
    delivered with the outcome of each session.
    """
    reward: RewardFunction | None = None
    """Scores a finished agent; None: the runner returns the rewards."""
    reward_timeout_ms: int | None = None
    """Time for `Client.set_rewards` after the collector has stored a completed session,
    milliseconds; the session is held back until then. None: it is delivered with the rewards that
    it was closed with."""
    reward_threads: int = 8
    """Maximum number of concurrent calls of a reward function that is not asynchronous."""
    model: str = ""
    """Name of the model that answers; may be empty if the mesh has only one."""
    sampling: Mapping[str, Any] | None = None
    """Defaults of all turns, by the names of `SamplingParams`."""
    metadata: Callable[[Any], Mapping[str, str]] | None = None
    """Returns the metadata of a sample's sessions, which the trainer receives."""
    group_id: Callable[[Any], str] | None = None
    """Returns the id of a sample's group, which must be unique; None: random ids."""
    export: ExportForm = "leaves"
    """The form in which sessions are delivered: one trajectory per leaf of the conversation tree,
    one per turn, or the tree itself as `SessionResult.tree`."""
    on_sample: Callable[[SampleOutcome], None] | None = None
    """Called with the outcome of each seat."""
    on_session: Callable[[SampleOutcome, SessionResult], Awaitable[None]] | None = None
    """Stores a completed session, as the collector delivers it, with the trainer.

    The session is acknowledged when the call returns, and counts towards `concurrency` until then.
    An error makes the outcome FAILED and is not retried. Other sessions of the consumer, such as
    those of failed attempts, are acknowledged at once. None: the trainer subscribes itself.
    """
    consumer: str = ""
    """Name at the collector for `on_session`; one for each trainer."""
    progress: bool | None = None
    """Whether to show progress on standard error; None: if it is a terminal."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: A setting is invalid; the error names it.
        """
        for name in ("n", "concurrency", "reward_threads"):
            if getattr(self, name) < 1:
                raise InvalidFieldError(name, f"is {getattr(self, name)}; give at least 1")
        if not self.timeout_s > 0:
            raise InvalidFieldError("timeout_s", f"is {self.timeout_s}; give more than 0")
        if self.reward_timeout_ms is not None and self.reward_timeout_ms < 1:
            raise InvalidFieldError(
                "reward_timeout_ms", f"is {self.reward_timeout_ms}; give at least 1, or None"
            )
        if (self.on_session is None) != (self.consumer == ""):
            raise InvalidFieldError(
                "consumer", "needs on_session and on_session needs consumer; give both"
            )
        needed_of(self.needed, self.n)
        export_mode(self.export)
        read_sampling(self.sampling)
        if self.runner is not None:
            find_runner(self.runner)
