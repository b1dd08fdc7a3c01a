"""Rewards of a session, of its trajectories and of its turns."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import session_pb2

REWARD_NAMES = frozenset({"reward", "trajectory_rewards", "turn_rewards"})
"""What `read_rewards` reads from a mapping."""
_ANSWER = "chatcmpl-"


@dataclass(slots=True)
class Rewards:
    """The rewards of one session; omitted ones are not set.

    The session's reward applies to all its trajectories without one of their own.
    """

    session: float | None = None
    """Reward of the whole session."""
    trajectories: dict[str, float] = field(default_factory=dict)
    """By trajectory id, or by the id of the last answer of the trajectory."""
    turns: dict[str | int, float] = field(default_factory=dict)
    """By the id of the answer (`chatcmpl-...`), or by node id."""

    def to_proto(self, session_id: str) -> session_pb2.SessionRewards:
        """Returns the rewards as a message.

        Raises:
            InvalidFieldError: A reward is not a finite number, or an id belongs to another session.
        """
        values = (*self.trajectories.values(), *self.turns.values())
        _check_finite(values if self.session is None else (self.session, *values))
        return session_pb2.SessionRewards(
            reward=self.session,
            trajectory_rewards={
                trajectory_id.removeprefix(_ANSWER): reward
                for trajectory_id, reward in self.trajectories.items()
            },
            turn_rewards={
                _node_id(turn, session_id): reward for turn, reward in self.turns.items()
            },
        )


def read_rewards(value: object) -> Rewards:
    """Reads the result of a runner or a reward function.

    Args:
        value: A number, `Rewards`, None, or (the JSON result of a remote runner) a mapping with
            `reward`, `trajectory_rewards` and `turn_rewards`, all optional.

    Raises:
        InvalidFieldError: It is none of these.
    """
    if value is None:
        return Rewards()
    if isinstance(value, Rewards):
        return value
    if isinstance(value, Mapping):
        return _of_mapping(value)
    try:
        return Rewards(session=float(value))  # type: ignore[arg-type]  # NumPy's and torch's too
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(
            "reward",
            f"is a {type(value).__name__}; return a number, Rewards or None, "
            "or give the rollout a reward function that reads it",
        ) from error


def _of_mapping(value: Mapping[str, Any]) -> Rewards:
    reward = value.get("reward")
    parts = [value.get(name) or {} for name in ("trajectory_rewards", "turn_rewards")]
    try:
        trajectories, turns = ({key: float(part[key]) for key in part} for part in parts)
        return Rewards(None if reward is None else float(reward), trajectories, turns)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(
            "reward", f"{value!r:.200} has a value that is not a number"
        ) from error


def _node_id(turn: str | int, session_id: str) -> int:
    if isinstance(turn, int) or turn.isdecimal():  # a JSON object's keys are text
        return int(turn)
    of, _, node_id = turn.removeprefix(_ANSWER).rpartition("-")
    if of != session_id or not node_id.isdecimal():
        raise InvalidFieldError(
            "rewards.turns",
            f"{turn!r} is not an answer of session {session_id}; give the id of one",
            turn=turn,
        )
    return int(node_id)


def _check_finite(rewards: Iterable[float]) -> None:
    for reward in rewards:
        try:
            finite = math.isfinite(reward)
        except TypeError:  # no number at all
            finite = False
        if not finite:
            raise InvalidFieldError("rewards", f"{reward!r} is not a finite number")
