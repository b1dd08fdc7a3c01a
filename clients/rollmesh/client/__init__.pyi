"""The door of `rollmesh.client`: its names for other rooms and tests."""

from rollmesh.client.arguments import (
    Budget as Budget,
    Column as Column,
    ExportForm as ExportForm,
    chosen as chosen,
)
from rollmesh.client.client import Client as Client
from rollmesh.client.connections import MeshAddresses as MeshAddresses
from rollmesh.client.conversations import (
    Start as Start,
    Transcript as Transcript,
    TranscriptTurn as TranscriptTurn,
    message_of as message_of,
    recorded_node as recorded_node,
    start_of_atif as start_of_atif,
)
from rollmesh.client.deliveries import (
    SubscribeOptions as SubscribeOptions,
    Subscription as Subscription,
)
from rollmesh.client.evaluations import (
    Estimate as Estimate,
    EvaluatedAttempt as EvaluatedAttempt,
    EvaluatedPolicy as EvaluatedPolicy,
    Evaluation as Evaluation,
    PolicyVersionChangedError as PolicyVersionChangedError,
    evaluate as evaluate,
    pass_at as pass_at,
)
from rollmesh.client.failures import (
    InfrastructureError as InfrastructureError,
    is_infrastructure as is_infrastructure,
    shielded as shielded,
)
from rollmesh.client.observer import Observer as Observer, states_of as states_of
from rollmesh.client.reaper import Reaper as Reaper
from rollmesh.client.rollouts import (
    AgentExitedError as AgentExitedError,
    AgentStoppedError as AgentStoppedError,
    AgentTimeLimitError as AgentTimeLimitError,
    Durations as Durations,
    Episode as Episode,
    Group as Group,
    GroupIds as GroupIds,
    GroupOutcome as GroupOutcome,
    GroupState as GroupState,
    Needed as Needed,
    Retries as Retries,
    RewardCalls as RewardCalls,
    RewardFunction as RewardFunction,
    Rollout as Rollout,
    RolloutSettings as RolloutSettings,
    RolloutSummary as RolloutSummary,
    SampleOutcome as SampleOutcome,
    TimeLimits as TimeLimits,
    needed_of as needed_of,
    rollout as rollout,
    rollout_groups as rollout_groups,
    showing as showing,
    supervised as supervised,
)
from rollmesh.client.runners import (
    AgentRunner as AgentRunner,
    CommandError as CommandError,
    CommandLostError as CommandLostError,
    CommandRunner as CommandRunner,
    inherited as inherited,
    register_runner as register_runner,
)
from rollmesh.client.runs import (
    numbered as numbered,
    of_spans as of_spans,
    run_of_state as run_of_state,
    state_of_run as state_of_run,
)
from rollmesh.client.scores import ScoreOptions as ScoreOptions, Scores as Scores
from rollmesh.client.sessions import (
    REWARD_NAMES as REWARD_NAMES,
    Delivery as Delivery,
    Outcome as Outcome,
    Rewards as Rewards,
    Session as Session,
    SessionResult as SessionResult,
    Trajectory as Trajectory,
    TrajectoryTree as TrajectoryTree,
    read_rewards as read_rewards,
    reason_names as reason_names,
)
from rollmesh.client.weights import (
    CHUNK_BYTES as CHUNK_BYTES,
    EngineControlError as EngineControlError,
    Transfer as Transfer,
    WeightDeltas as WeightDeltas,
    WeightsPushError as WeightsPushError,
    file_of as file_of,
)
from rollmesh.v1.sampling_pb2 import AdapterChoice as AdapterChoice, PolicyRun as PolicyRun
