"""Agents of [Harbor](https://www.harborframework.com) as agents of a mesh.

`Connector` answers the agents of jobs that somebody submits. `HarborRunner` submits a job for each
session of a rollout. `docs/harbor.md` describes both.
"""

from rollmesh.integrations.harbor.connector import (
    Connector,
    HarborError,
    Relay,
    ending_of,
    path_of,
)
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
    "Relay",
    "ending_of",
    "path_of",
    "settle",
    "task_of",
]
