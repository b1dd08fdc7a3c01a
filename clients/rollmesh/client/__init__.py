"""The SDK for trainers and agent runners.

May import `mesh`, `runtime` and `v1`.
"""

from rollmesh.client.client import Client
from rollmesh.client.connections import MeshAddresses
from rollmesh.client.deliveries.subscription import SubscribeOptions, Subscription
from rollmesh.client.engines import EngineControlError
from rollmesh.client.rollouts.groups import Group, GroupOutcome, SampleOutcome
from rollmesh.client.rollouts.rollout import Rollout, rollout, rollout_groups
from rollmesh.client.rollouts.scoring import Episode, RewardFunction
from rollmesh.client.rollouts.settings import Retries, RolloutSettings, TimeLimits
from rollmesh.client.rollouts.summary import RolloutSummary
from rollmesh.client.runners import AgentRunner, register_runner
from rollmesh.client.sessions.rewards import Rewards
from rollmesh.client.sessions.session import Session
from rollmesh.client.sessions.trajectories import Delivery, SessionResult, Trajectory
from rollmesh.client.sessions.transcripts import Transcript, TranscriptTurn
from rollmesh.client.sessions.trees import TrajectoryTree
from rollmesh.client.weights.push import Transfer, WeightsPushError

__all__ = [
    "AgentRunner",
    "Client",
    "Delivery",
    "EngineControlError",
    "Episode",
    "Group",
    "GroupOutcome",
    "MeshAddresses",
    "Retries",
    "RewardFunction",
    "Rewards",
    "Rollout",
    "RolloutSettings",
    "RolloutSummary",
    "SampleOutcome",
    "Session",
    "SessionResult",
    "SubscribeOptions",
    "Subscription",
    "TimeLimits",
    "Trajectory",
    "TrajectoryTree",
    "Transcript",
    "TranscriptTurn",
    "Transfer",
    "WeightsPushError",
    "register_runner",
    "rollout",
    "rollout_groups",
]
