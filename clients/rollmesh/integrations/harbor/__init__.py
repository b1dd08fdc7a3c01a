"""Agents of [Harbor](https://www.harborframework.com) as agents of a mesh.

`Connector` answers the agents of jobs that somebody submits. `HarborRunner` submits a job for each
session of a rollout, and `HarborTrialRunner` runs them without a server. See `docs/harbor.md`.
"""

from rollmesh.integrations.harbor.connector import (
    Connector,
    HarborError,
    Lost,
    RelayClient,
    Rollout,
    ending_of,
    path_of,
)
from rollmesh.integrations.harbor.details import (
    ServedTrials,
    atif_of,
    decode_of,
    rollout_details_of,
    write_details,
)
from rollmesh.integrations.harbor.local import HarborTrialRunner
from rollmesh.integrations.harbor.runner import (
    HarborRolloutError,
    HarborRunner,
    settle,
    task_of,
)

__all__ = [
    "Connector",
    "HarborError",
    "HarborRolloutError",
    "HarborRunner",
    "HarborTrialRunner",
    "Lost",
    "RelayClient",
    "Rollout",
    "ServedTrials",
    "atif_of",
    "decode_of",
    "ending_of",
    "path_of",
    "rollout_details_of",
    "settle",
    "task_of",
    "write_details",
]
