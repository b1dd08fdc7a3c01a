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
    """Opens nothing: it may be logged and shown."""
    api_key: str = field(repr=False)
    """Bearer token that opens this session and nothing else."""
    base_url: str = field(repr=False)
    """What an agent sets as its base URL. It holds the key: it works with any API key or none, and
    is to be kept as a key is."""
    rewards: Rewards = field(default_factory=Rewards)
    """Set by whoever scores the session, before it is closed."""
    closed: bool = False

    @property
    def keyless_url(self) -> str:
        """The base URL with the id in place of the key: an agent has to send `api_key` to it."""
        return self.base_url.replace(self.api_key, self.session_id)

    @property
    def reward(self) -> float | None:
        """Reward of the whole session."""
        return self.rewards.session

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self.rewards.session = reward
