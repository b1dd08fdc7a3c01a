"""Groups of a rollout: what is asked for, what has ended, and whether one can still succeed."""

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
    """A sample with settings of its own, which win over those of the rollout."""

    sample: Any
    """What the runner gets."""
    group_id: str = ""
    """Id of the group; empty leaves it to the rollout."""
    n: int | None = None
    """Sessions in the group."""
    runner: str | AgentRunner | None = None
    """Runs the agent, whatever the sample's `agent_name` says."""
    sampling: Mapping[str, Any] | None = None
    """Defaults of all turns, by the names of `SamplingParams`."""
    metadata: Mapping[str, str] | None = None
    """Carried to the trainer with the group's sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutcome:
    """What came of one place of a group: of its last attempt, which alone is in the group."""

    group_id: str
    sample_index: int
    outcome: Outcome
    """COMPLETED; FAILED; ABORTED (past its time, or its group had failed)."""
    session_id: str = ""
    """Empty where no session could be opened."""
    reward: float | None = None
    """Reward of the whole session."""
    result: Any = None
    """What the runner returned; None unless it completed."""
    error: str = ""
    """What went wrong, cut to a page."""
    error_type: str = ""
    """Class of the error; empty where there was none."""
    attempts: int = 1
    seconds: float = 0.0
    """Time from the opening of its last session to the close of it."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What came of one sample."""

    group_id: str
    sample: Any
    """As it was given to the rollout."""
    succeeded: bool
    """Whether as many sessions completed as the rollout needs."""
    sessions: tuple[SampleOutcome, ...]
    """One for each place, in order of sample_index."""


def needed_of(needed: Needed, size: int) -> int:
    """Returns how many of `size` sessions must complete.

    Raises:
        InvalidFieldError: More than there are, or less than none.
    """
    count = {"all": size, "any": 1}.get(needed, -1) if isinstance(needed, str) else needed
    if not 0 <= count <= size:
        raise InvalidFieldError("needed", f'{needed!r} is none of "all", "any", 0 to {size}')
    return count


@dataclass(slots=True)
class GroupState:
    """One group while it runs."""

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
        """Whether too few can complete, whatever the rest does."""
        lost = sum(outcome.outcome != "COMPLETED" for outcome in self._ended.values())
        return self.size - lost < self.needed

    def add(self, outcome: SampleOutcome) -> GroupOutcome | None:
        """Takes the end of a place; returns the group with the last of them.

        Raises:
            ValueError: The place has ended before, or there is none.
        """
        index = outcome.sample_index
        if index in self._ended or not 0 <= index < self.size:
            raise ValueError(f"group {self.group_id} has no open place {index}")
        self._ended[index] = outcome
        if len(self._ended) < self.size:
            return None
        sessions = tuple(self._ended[index] for index in range(self.size))
        return GroupOutcome(self.group_id, self.sample, not self.failed, sessions)
