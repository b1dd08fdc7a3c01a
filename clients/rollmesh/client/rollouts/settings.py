"""How a rollout is run: what its keyword arguments mean."""

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
class Limits:
    """How long things beside the agents' own work may take, seconds."""

    grace_s: float = 30.0
    """From asking an agent to end to forcing it, and again from that to leaving it behind."""
    close_s: float = 10.0
    """Opening or closing a session while the rollout is being cancelled."""
    reward_s: float = 60.0
    """One call of the reward function, its wait for a thread included."""
    delivery_s: float = 600.0
    """Waiting until the collector delivers a closed session to `on_session`."""

    def __post_init__(self) -> None:
        """Checks the limits.

        Raises:
            InvalidFieldError: One is not above zero.
        """
        for name, limit_s in vars(self).items():
            if not limit_s > 0:
                raise InvalidFieldError(f"limits.{name}", f"is {limit_s}; give more than 0")


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Which failures are tried again, each time in a new session.

    Errors that name a field are not: they would come again.
    """

    tries: int = 1
    """Most attempts at one place."""
    delay_s: float = 2.0
    """Longest wait before the second attempt, seconds; doubled before each further one."""
    time_limits: bool = False
    """Whether agents that ran too long are; that favours short answers."""

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            InvalidFieldError: Names the one that is wrong.
        """
        if self.tries < 1:
            raise InvalidFieldError("retries.tries", f"is {self.tries}; give at least 1")
        if not self.delay_s >= 0:
            raise InvalidFieldError("retries.delay_s", f"is {self.delay_s}; give at least 0")

    def after(self, error: Exception, attempt: int) -> bool:
        """Returns whether there is another attempt after an error of this one."""
        if attempt >= self.tries or isinstance(error, (AgentStoppedError, InvalidFieldError)):
            return False
        return self.time_limits or not isinstance(error, AgentTimeLimitError)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How samples are rolled out: the keyword arguments of `rollout` and `rollout_groups`."""

    runner: str | AgentRunner | None = None
    """For samples that name none in their `agent_name`: a function, or its registered name."""
    n: int = 8
    """Sessions per sample: the size of its group."""
    concurrency: int = 64
    """Most sessions at once."""
    timeout_s: float = 1800.0
    """Longest run of one agent, seconds."""
    limits: Limits = field(default_factory=Limits)
    retries: Retries = field(default_factory=Retries)
    needed: Needed = "any"
    """How many sessions of a group must complete for it to succeed: "all", "any", or a number.

    A group that cannot succeed any more is ended: what runs is stopped, what has not begun is
    opened and closed at once, all ABORTED, so that the group is delivered whole, with its outcomes.
    """
    reward: RewardFunction | None = None
    """Scores a finished agent; None: what the runner returns is the reward."""
    reward_timeout_ms: int | None = None
    """Time for `Client.set_rewards` to score a completed session, milliseconds from when the
    collector has it, which holds it back until then; None: what it has at its close is all."""
    reward_threads: int = 8
    """Most calls at once of a reward function that is not asynchronous."""
    sampling: Mapping[str, Any] | None = None
    """Defaults of all turns, by the names of `SamplingParams`."""
    metadata: Callable[[Any], Mapping[str, str]] | None = None
    """Gives what is carried to the trainer with a sample's sessions."""
    group_id: Callable[[Any], str] | None = None
    """Gives the id of a sample's group, each one once; None: a random one."""
    export: ExportForm = "leaves"
    """In which form the sessions are delivered: one trajectory for each leaf of the conversation
    tree, or for each turn; or the tree itself, as `SessionResult.tree`."""
    on_sample: Callable[[SampleOutcome], None] | None = None
    """Called with each outcome as it comes."""
    on_session: Callable[[SampleOutcome, SessionResult], Awaitable[None]] | None = None
    """Puts a completed session, as the collector delivers it, where the trainer has it.

    The session is acknowledged when the call returns; its place is taken until then. An error makes
    the outcome FAILED and is not retried. Other sessions of the consumer, such as those of failed
    attempts, are acknowledged at once. None: the trainer subscribes itself.
    """
    consumer: str = ""
    """Name at the collector for `on_session`; one for each trainer."""
    progress: bool | None = None
    """Whether to show progress on standard error; None: where that is a terminal."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            InvalidFieldError: Names the one that is wrong.
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
            raise InvalidFieldError("consumer", "and on_session belong together; give both")
        needed_of(self.needed, self.n)
        export_mode(self.export)
        read_sampling(self.sampling)
        if self.runner is not None:
            find_runner(self.runner)
