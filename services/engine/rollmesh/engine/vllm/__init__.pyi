"""The door of `rollmesh.engine.vllm`: its names for other rooms and tests."""

from rollmesh.engine.vllm.backend import (
    engine_arguments as engine_arguments,
    read_options as read_options,
    score_params as score_params,
)
from rollmesh.engine.vllm.chunks import (
    Heartbeat as Heartbeat,
    Row as Row,
    VersionStart as VersionStart,
    keep_rows as keep_rows,
    keep_tensors as keep_tensors,
    messages as messages,
    scores_of as scores_of,
)
from rollmesh.engine.vllm.grammars import Grammars as Grammars, length_pattern as length_pattern
from rollmesh.engine.vllm.prepared import PreparedWeights as PreparedWeights
from rollmesh.engine.vllm.worker_extension import (
    WeightReceiver as WeightReceiver,
    only_unique_ids as only_unique_ids,
    with_handles as with_handles,
)
