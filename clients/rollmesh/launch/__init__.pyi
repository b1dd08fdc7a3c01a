"""The door of `rollmesh.launch`: its names for other rooms and tests."""

from rollmesh.launch.child import (
    Child as Child,
    EndedEarlyError as EndedEarlyError,
    Restarts as Restarts,
)
from rollmesh.launch.plan import (
    VIEW_PORT as VIEW_PORT,
    Process as Process,
    ProcessSpec as ProcessSpec,
    mesh_tokens as mesh_tokens,
    plan_mesh as plan_mesh,
    processes as processes,
    spec_of as spec_of,
    trainer_files as trainer_files,
    view_spec as view_spec,
    visible_gpus as visible_gpus,
)
