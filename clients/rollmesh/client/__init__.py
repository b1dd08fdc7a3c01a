"""The SDK for trainers and agent runners."""

from rollmesh.client.client import Client, MeshAddresses, Session
from rollmesh.client.delivery import SubscribeOptions, Subscription
from rollmesh.client.rollout import (
    AgentRunner,
    RolloutSummary,
    SampleOutcome,
    register_runner,
    rollout,
)
from rollmesh.client.trajectories import Delivery, SessionResult, Trajectory
from rollmesh.client.weights import WeightsPushError

__all__ = [
    "AgentRunner",
    "Client",
    "Delivery",
    "MeshAddresses",
    "RolloutSummary",
    "SampleOutcome",
    "Session",
    "SessionResult",
    "SubscribeOptions",
    "Subscription",
    "Trajectory",
    "WeightsPushError",
    "register_runner",
    "rollout",
]
