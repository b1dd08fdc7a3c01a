"""Type aliases for the enums of the contract, under the names that this package uses.

The values are plain integers, those of `rollmesh.v1.types_pb2`.
"""

from typing import TypeAlias

from rollmesh.v1 import types_pb2

Fidelity: TypeAlias = types_pb2.FidelityReason.ValueType
Lineage: TypeAlias = types_pb2.Lineage.ValueType
Finish: TypeAlias = types_pb2.FinishReason.ValueType
