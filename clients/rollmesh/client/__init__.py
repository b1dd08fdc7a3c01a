"""The SDK for trainers and agent runners."""

from rollmesh.client.client import Client
from rollmesh.client.delivery import SubscribeOptions, Subscription
from rollmesh.client.groups import GroupOutcome, SampleOutcome
from rollmesh.client.rewards import Rewards
from rollmesh.client.rollout import Rollout, rollout, rollout_groups
from rollmesh.client.runners import AgentRunner, register_runner
from rollmesh.client.scoring import Episode, RewardFunction
from rollmesh.client.sessions import MeshAddresses, Session
from rollmesh.client.settings import Limits, Retries, RolloutSettings
from rollmesh.client.summary import RolloutSummary
from rollmesh.client.trajectories import Delivery, SessionResult, Trajectory
from rollmesh.client.transcripts import Transcript, TranscriptTurn
from rollmesh.client.trees import TrajectoryTree
from rollmesh.client.weights import Transfer, WeightsPushError

__all__ = [
    "AgentRunner",
    "Client",
    "Delivery",
    "Episode",
    "GroupOutcome",
    "Limits",
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
