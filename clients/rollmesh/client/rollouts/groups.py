"""Groups of a rollout: their settings, their outcomes, and whether they can still succeed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rollmesh.client.runners import AgentRunner
from rollmesh.client.sessions.session import Outcome
from rollmesh.runtime.errors import InvalidFieldError

Needed: TypeAlias = Literal["all", "any"] | int
"""How many sessions of a group must complete for the group to succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A sample with its own settings, which override those of the rollout."""

    sample: Any
    """The runner's first argument."""
    group_id: str = ""
    """Id of the group; if empty, the rollout chooses one."""
    n: int | None = None
    """Number of sessions in the group."""
    runner: str | AgentRunner | None = None
    """Runs the agent; overrides the sample's `agent_name`."""
    sampling: Mapping[str, Any] | None = None
    """Defaults of all turns, by the names of `SamplingParams`."""
    metadata: Mapping[str, str] | None = None
    """Carried to the trainer with the group's sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutcome:
    """The outcome of one seat of a group: that of its last attempt."""

    group_id: str
    sample_index: int
    outcome: Outcome
    """COMPLETED, FAILED, or ABORTED (time limit exceeded, or the group had failed)."""
    session_id: str = ""
    """Empty if no session could be opened."""
    reward: float | None = None
    """Reward of the whole session."""
    result: Any = None
    """The runner's return value; None unless the session completed."""
    error: str = ""
    """Text of the error, up to 4,000 characters."""
    error_type: str = ""
    """Class of the error; empty if there was none."""
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
    _ended: dict[int, SampleOutcome] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether fewer than `needed` sessions can still complete."""
        lost = sum(outcome.outcome != "COMPLETED" for outcome in self._ended.values())
        return self.size - lost < self.needed

    def add(self, outcome: SampleOutcome) -> GroupOutcome | None:
        """Adds the outcome of a seat; returns the outcome of the group with its last one.

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
        return GroupOutcome(self.group_id, self.sample, not self.failed, sessions)
