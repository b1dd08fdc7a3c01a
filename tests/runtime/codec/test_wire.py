"""Messages inside messages as bytes, against protobuf itself."""

from hypothesis import given, strategies as st

from rollmesh.runtime.codec.wire import nested, values
from rollmesh.v1 import collector_pb2, types_pb2


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_protobuf_reads_what_was_put_together_from_pieces(first: bytes, second: bytes) -> None:
    inner = [
        *nested(types_pb2.Trajectory.TOKEN_IDS_U32LE_FIELD_NUMBER, [first]),
        *nested(types_pb2.Trajectory.LOSS_MASK_U8_FIELD_NUMBER, [second]),
    ]
    outer = nested(types_pb2.SessionRecord.TRAJECTORIES_FIELD_NUMBER, inner)
    request = b"".join(nested(collector_pb2.IngestRequest.SESSIONS_FIELD_NUMBER, outer))
    (found,) = collector_pb2.IngestRequest.FromString(request).sessions[0].trajectories
    assert (found.token_ids_u32le, found.loss_mask_u8) == (first, second)


@given(st.lists(st.binary(max_size=300)))
def test_values_are_those_that_protobuf_wrote(ids: list[bytes]) -> None:
    texts = [value.hex() for value in ids]
    data = collector_pb2.AcknowledgeDeliveries(delivery_ids=texts).SerializeToString()
    assert [bytes(value).decode() for value in values(data)] == texts
