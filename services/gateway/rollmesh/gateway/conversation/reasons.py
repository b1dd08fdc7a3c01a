"""Types of the contract's enums, under the names that this package has for them.

The values are those of `rollmesh.v1.types_pb2`: plain integers.
"""

from typing import TypeAlias

from rollmesh.v1 import types_pb2

Fidelity: TypeAlias = types_pb2.FidelityReason.ValueType
Lineage: TypeAlias = types_pb2.Lineage.ValueType
Finish: TypeAlias = types_pb2.FinishReason.ValueType
