"""Compares the answers agents received with what the trainer received."""

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rollmesh.client import SessionResult, Trajectory

_ANSWER = "chatcmpl-"


@dataclass(slots=True)
class Audit:
    """Counts over a complete run. Drift, lost and duplicated must all be 0."""

    answered: set[str] = field(default_factory=set)
    """Id of each answer an agent received."""
    trained: Counter[str] = field(default_factory=Counter)
    """Number of times each answer's tokens were to be trained."""
    kept_back: set[str] = field(default_factory=set)
    """Ids of sessions that the subscription filtered, for a stated reason."""
    sessions: int = 0
    trajectories: int = 0
    drift_tokens: int = 0
    """Prompt ids in the engine that differ from those in the trajectory."""

    @property
    def lost(self) -> int:
        """Answers whose tokens never reached the trainer, without a stated reason."""
        missing = self.answered - self.trained.keys()
        return sum(_session_of(answer) not in self.kept_back for answer in missing)

    @property
    def duplicated(self) -> int:
        """Answers whose tokens were to be trained more than once."""
        return sum(count - 1 for count in self.trained.values() if count > 1)

    def received(self, sessions: Iterable[SessionResult]) -> None:
        """Adds delivered sessions."""
        for session in sessions:
            self.sessions += 1
            for trajectory in session.trajectories:
                self.trajectories += 1
                self._check(session.session_id, trajectory)

    def _check(self, session_id: str, trajectory: Trajectory) -> None:
        ids = np.ascontiguousarray(trajectory.token_ids, "<u4")
        for segment in trajectory.segments:
            if not segment.sampled:
                continue
            if segment.trained:
                self.trained[f"{_ANSWER}{session_id}-{segment.node_id}"] += 1
            if zlib.crc32(ids[: segment.start].tobytes()) != segment.prompt_crc32:
                self.drift_tokens += segment.start


def _session_of(answer_id: str) -> str:
    return answer_id.removeprefix(_ANSWER).rpartition("-")[0]
