"""Type aliases for the enums of the contract, under the names that this package uses.

The values are plain integers, those of `rollmesh.v1`.
"""

from typing import TypeAlias

from rollmesh.v1 import sampling_pb2, trajectory_pb2

Fidelity: TypeAlias = trajectory_pb2.FidelityReason.ValueType
Lineage: TypeAlias = trajectory_pb2.Lineage.ValueType
Finish: TypeAlias = sampling_pb2.FinishReason.ValueType
