"""Agents of [Harbor](https://www.harborframework.com) as agents of a mesh.

`Connector` answers the agents of jobs that somebody submits. `HarborRunner` submits a job for each
session of a rollout, and `HarborTrialRunner` runs them without a server. See `docs/harbor.md`.
"""

from rollmesh.integrations.harbor.connector import (
    Connector as Connector,
    HarborError as HarborError,
    Lost as Lost,
    RelayClient as RelayClient,
    Rollout as Rollout,
    ending_of as ending_of,
    path_of as path_of,
)
from rollmesh.integrations.harbor.details import (
    ServedTrials as ServedTrials,
    atif_of as atif_of,
    decode_of as decode_of,
    rollout_details_of as rollout_details_of,
    write_details as write_details,
)
from rollmesh.integrations.harbor.runner import (
    HarborRolloutError as HarborRolloutError,
    HarborRunner as HarborRunner,
    HarborTrialRunner as HarborTrialRunner,
    settle as settle,
    task_of as task_of,
)
