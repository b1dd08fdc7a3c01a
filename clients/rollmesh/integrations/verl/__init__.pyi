"""The door of `rollmesh.integrations.verl`: its names for other rooms and tests."""

from rollmesh.integrations.verl.manager import load_runner as load_runner
from rollmesh.integrations.verl.queue import (
    PromptStatus as PromptStatus,
    TransferQueueWriter as TransferQueueWriter,
    queue_rows as queue_rows,
    stacked as stacked,
    token_columns as token_columns,
)
from rollmesh.integrations.verl.settings import (
    Settings as Settings,
    sampling_of as sampling_of,
    served as served,
)
