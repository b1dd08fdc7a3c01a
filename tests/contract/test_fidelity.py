import pytest

from rollmesh.gateway.conversation.reasons import ExportMode, Fidelity, Finish, Lineage
from rollmesh.v1 import gateway_pb2, types_pb2


@pytest.mark.parametrize(
    ("plain", "proto", "prefix"),
    [
        (Fidelity, types_pb2.FidelityReason, "FIDELITY_REASON_"),
        (Lineage, types_pb2.Lineage, "LINEAGE_"),
        (Finish, types_pb2.FinishReason, "FINISH_REASON_"),
        (ExportMode, gateway_pb2.ExportMode, "EXPORT_MODE_"),
    ],
)
def test_the_gateways_words_are_the_protos(plain: type, proto: object, prefix: str) -> None:
    numbers = {f"{prefix}{value.name}": value.value for value in plain}  # type: ignore[attr-defined]
    numbers[f"{prefix}UNSPECIFIED"] = 0
    assert numbers == dict(proto.items())  # type: ignore[attr-defined]
