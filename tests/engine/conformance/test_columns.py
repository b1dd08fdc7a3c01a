"""Columns beside sampled tokens: the support of the truncation, and the experts of each layer."""

from typing import Any

import numpy as np
import pytest

from rollmesh.engine import scripted_experts
from rollmesh.runtime.codec import EXPERTS, SUPPORT, experts_of, joined, support_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import server_pb2, server_pb2_grpc
from tests.engine.engines import PROMPT, Engine

# The first vLLM test waits for the model to start.
pytestmark = pytest.mark.asyncio(loop_scope="session")
KINDS = {
    EXPERTS: (server_pb2.CAPABILITY_ROUTED_EXPERTS, "ROUTED_EXPERTS"),
    SUPPORT: (server_pb2.CAPABILITY_SAMPLING_SUPPORT, "SAMPLING_SUPPORT"),
}


async def offered(engine: Engine) -> list[Any]:
    """The kinds that an engine says it returns."""
    async with open_channel(engine.process.address) as channel:
        stub: Any = server_pb2_grpc.ServerServiceStub(channel)
        info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest())
    return [kind for kind, (capability, _) in KINDS.items() if capability in info.capabilities]


async def test_a_column_that_an_engine_lacks_is_refused_by_its_name(engine: Engine) -> None:
    has = await offered(engine)
    assert has == (list(KINDS) if (await engine.info()).backend == "scripted" else [])
    for kind, (_, name) in KINDS.items():
        request = engine.request(2, 1, columns=[kind])
        if kind in has:
            assert (await engine.generate(request)).columns
            continue
        with pytest.raises(InvalidFieldError, match=rf"columns\[0\]: .* does not return {name};"):
            await engine.generate(request)


@pytest.mark.parametrize("chunk", [0, 5], ids=["whole", "streamed"])
async def test_rows_come_once_and_in_order(engine: Engine, chunk: int) -> None:
    if not await offered(engine):
        pytest.skip("it refuses them")
    cut = {"top_k": 4, "temperature": 0.7}
    asked = {"columns": [EXPERTS, SUPPORT], "routed_experts_start": 6, "sampling": cut}
    result = await engine.generate(engine.request(12, chunk, **asked))
    ids, end = np.array([*PROMPT, *result.ids]), len(PROMPT) + 12
    experts, support = joined(result.columns)[::-1]
    assert (experts.start, experts.rows) == (6, end - 1 - 6)  # none of the last token
    found = experts_of([experts], end)
    assert found is not None
    assert (found.rows.dtype.name, found.rows.shape) == ("uint8", (end, 3, 2))
    assert np.array_equal(found.rows[6:-1], scripted_experts(ids[6:-1], 6))
    assert np.flatnonzero(found.has_row).tolist() == list(range(6, end - 1))
    assert (support.start, support.rows) == (len(PROMPT), 12)
    ragged = support_of([support], end)
    assert ragged is not None
    for at, token in enumerate(result.ids, len(PROMPT)):
        row = ragged.values[ragged.offsets[at] : ragged.offsets[at + 1]]
        assert (row[0], len(row)) == (token, 4)
    plain = await engine.generate(engine.request(3, chunk, columns=[SUPPORT]))
    assert [one.data_bytes for one in joined(plain.columns)] == [3 * 4]  # nothing was cut off


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"columns": [EXPERTS, EXPERTS]}, r"columns\[1\]: is ROUTED_EXPERTS again"),
        ({"columns": [99]}, "columns: 99 is not a ColumnKind"),
        ({"routed_experts_start": 16}, "routed_experts_start: is 16; give one below the 16 ids"),
    ],
)
async def test_a_wish_that_cannot_be_met_names_its_field(
    engine: Engine, asked: dict[str, Any], said: str
) -> None:
    if not await offered(engine):
        said = "columns" if "columns" in asked else said  # refused before
    with pytest.raises(InvalidFieldError, match=said):
        await engine.generate(engine.request(2, 1, **asked))
