"""The Python SDK: sessions, rollouts, trajectories and weights.

`Client` is async; `rollmesh.client.sync.Client` is the same without async.
"""

from rollmesh.client.client import Client
from rollmesh.client.rollout import Progress, RolloutSummary, Sample, SampleResult
from rollmesh.client.runners import Runner, RunResult, find_runner, register_runner
from rollmesh.client.sessions import Outcome, Session
from rollmesh.client.weights import EnginePush, PushResult, WeightPushError
from rollmesh.runtime.errors import RollmeshError

__all__ = [
    "Client",
    "EnginePush",
    "Outcome",
    "Progress",
    "PushResult",
    "RollmeshError",
    "RolloutSummary",
    "RunResult",
    "Runner",
    "Sample",
    "SampleResult",
    "Session",
    "WeightPushError",
    "find_runner",
    "register_runner",
]
