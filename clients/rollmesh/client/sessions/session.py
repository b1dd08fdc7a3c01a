"""An open session."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rollmesh.client.sessions.rewards import Rewards

Outcome: TypeAlias = Literal["COMPLETED", "FAILED", "ABORTED"]
"""How a session ended."""


@dataclass(slots=True)
class Session:
    """An open session: one attempt of an agent at one task."""

    session_id: str
    """Grants no access, so it may be logged and shown."""
    api_key: str = field(repr=False)
    """Bearer token of this session only."""
    base_url: str = field(repr=False)
    """The agent's base URL. It contains the key, so it works with any API key or none; keep it as
    secret as the key."""
    model: str = ""
    """Name of the model that answers, which agents send in their requests."""
    rewards: Rewards = field(default_factory=Rewards)
    """Set before the session is closed."""
    closed: bool = False
    request_id: str = field(default="", repr=False)
    """Request id under which it was opened; a trainer's token and this return its key."""

    @property
    def keyless_url(self) -> str:
        """The base URL with the id instead of the key; the agent must send `api_key`."""
        return self.base_url.replace(self.api_key, self.session_id)

    @property
    def reward(self) -> float | None:
        """Reward of the whole session."""
        return self.rewards.session

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self.rewards.session = reward
