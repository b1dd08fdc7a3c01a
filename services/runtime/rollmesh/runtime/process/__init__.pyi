"""The door of `rollmesh.runtime.process`: its names for other rooms and tests."""

from rollmesh.runtime.process.children import (
    Child as Child,
    end_with_parent as end_with_parent,
    start_child as start_child,
)
from rollmesh.runtime.process.host import (
    FreedMemory as FreedMemory,
    keep_freed_memory as keep_freed_memory,
    print_ready as print_ready,
    raise_descriptor_limit as raise_descriptor_limit,
    stop_signals as stop_signals,
)
from rollmesh.runtime.process.main import run_service as run_service
from rollmesh.runtime.process.scratch import Scratch as Scratch
