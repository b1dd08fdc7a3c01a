"""The SDK for trainers and agent runners.

Read first: `sessions`, `deliveries`.

May import `mesh`, `runtime` and `v1`.
"""

from rollmesh.client.arguments import Budget
from rollmesh.client.client import Client
from rollmesh.client.connections import MeshAddresses
from rollmesh.client.deliveries import SubscribeOptions, Subscription
from rollmesh.client.engines import EngineControlError
from rollmesh.client.evaluations import (
    Estimate,
    EvaluatedAttempt,
    EvaluatedPolicy,
    Evaluation,
    PolicyVersionChangedError,
    evaluate,
    pass_at,
)
from rollmesh.client.failures import InfrastructureError, is_infrastructure
from rollmesh.client.observer import Observer, states_of
from rollmesh.client.rollouts import (
    Episode,
    Group,
    GroupOutcome,
    Retries,
    RewardFunction,
    Rollout,
    RolloutSettings,
    RolloutSummary,
    SampleOutcome,
    TimeLimits,
    rollout,
    rollout_groups,
)
from rollmesh.client.runners import AgentRunner, register_runner
from rollmesh.client.scores import ScoreOptions, Scores
from rollmesh.client.sessions import (
    Delivery,
    Rewards,
    Session,
    SessionResult,
    Trajectory,
    TrajectoryTree,
)
from rollmesh.client.starts import Start, recorded_node, start_of_atif
from rollmesh.client.transcripts import Transcript, TranscriptTurn
from rollmesh.client.weights import Transfer, WeightDeltas, WeightsPushError
from rollmesh.v1.sampling_pb2 import AdapterChoice, PolicyRun

__all__ = [
    "AdapterChoice",
    "AgentRunner",
    "Budget",
    "Client",
    "Delivery",
    "EngineControlError",
    "Episode",
    "Estimate",
    "EvaluatedAttempt",
    "EvaluatedPolicy",
    "Evaluation",
    "Group",
    "GroupOutcome",
    "InfrastructureError",
    "MeshAddresses",
    "Observer",
    "PolicyRun",
    "PolicyVersionChangedError",
    "Retries",
    "RewardFunction",
    "Rewards",
    "Rollout",
    "RolloutSettings",
    "RolloutSummary",
    "SampleOutcome",
    "ScoreOptions",
    "Scores",
    "Session",
    "SessionResult",
    "Start",
    "SubscribeOptions",
    "Subscription",
    "TimeLimits",
    "Trajectory",
    "TrajectoryTree",
    "Transcript",
    "TranscriptTurn",
    "Transfer",
    "WeightDeltas",
    "WeightsPushError",
    "evaluate",
    "is_infrastructure",
    "pass_at",
    "recorded_node",
    "register_runner",
    "rollout",
    "rollout_groups",
    "start_of_atif",
    "states_of",
]
