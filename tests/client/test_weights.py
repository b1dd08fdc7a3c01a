import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from safetensors import numpy as safetensors_numpy

from rollmesh.client import (
    CHUNK_BYTES,
    Client,
    Transfer,
    WeightDeltas,
    WeightsPushError,
    file_of,
)
from rollmesh.runtime.codec import Difference
from rollmesh.runtime.errors import (
    InvalidFieldError,
    InvalidWeightsError,
    RemoteError,
    RollmeshError,
    StaleVersionError,
)
from rollmesh.runtime.rpc import Context, RpcInterceptor, to_status
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc
from tests.client.conftest import addresses_of
from tests.router.engines import reason_of


class PushRouter(router_pb2_grpc.RouterServiceServicer):
    """Takes pushes and answers as a test says."""

    def __init__(self) -> None:
        self.header = router_pb2.PushWeightsHeader()
        self.adapter = engine_pb2.AdapterHeader()
        self.unloaded = engine_pb2.ControlEnginesRequest.UnloadAdapter()
        self.chunks: list[bytes] = []
        self.init = engine_pb2.ControlEnginesRequest.InitWeightTransfer()
        self.results = [engine_pb2.EngineResult(engine_id="e1")]
        self.failure: Exception | None = None
        """Raised at once."""
        self.refusal: Exception | None = None
        """Raised once all was read."""

    async def ControlEngines(
        self, request: engine_pb2.ControlEnginesRequest, context: Context
    ) -> engine_pb2.ControlEnginesResponse:
        self.init, self.unloaded = request.init_weight_transfer, request.unload_adapter
        return engine_pb2.ControlEnginesResponse(results=self.results)

    async def PushWeights(
        self,
        request_iterator: AsyncIterator[router_pb2.PushWeightsRequest],
        context: Context,
    ) -> router_pb2.PushWeightsResponse:
        if self.failure:
            raise self.failure
        async for request in request_iterator:
            if request.HasField("header"):
                self.header = request.header
            else:
                self.chunks.append(request.safetensors_chunk)
        if self.refusal:
            raise self.refusal
        return router_pb2.PushWeightsResponse(
            policy_version=self.header.policy_version, results=self.results
        )

    async def PushAdapter(
        self,
        request_iterator: AsyncIterator[router_pb2.PushAdapterRequest],
        context: Context,
    ) -> router_pb2.PushAdapterResponse:
        async for request in request_iterator:
            if request.HasField("header"):
                self.adapter = request.header
            else:
                self.chunks.append(request.safetensors_chunk)
        return router_pb2.PushAdapterResponse(results=self.results)


def push_router() -> PushRouter:
    return PushRouter()  # type: ignore[abstract]  # the other methods are not called


@asynccontextmanager
async def pushing(router: PushRouter) -> AsyncIterator[Client]:
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(addresses_of(router=f"127.0.0.1:{port}")) as client:
            yield client
    finally:
        await server.stop(0)


async def test_tensors_arrive_as_a_safetensors_file_in_chunks() -> None:
    tensors: dict[str, NDArray[Any]] = {
        "b.bias": np.arange(7, dtype=np.float16),
        "a.weight": np.arange(600_000, dtype=np.float32).reshape(600, 1000),
        "scalar": np.array(5, dtype=np.int64),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    router = push_router()
    async with pushing(router) as client:
        results = await client.push_weights(tensors, 3)
    data = b"".join(router.chunks)
    assert (router.header.policy_version, router.header.pause_mode) == (
        3,
        engine_pb2.PAUSE_MODE_KEEP,
    )
    assert router.header.safetensors_bytes == len(data)
    assert max(map(len, router.chunks)) <= CHUNK_BYTES
    loaded = safetensors_numpy.load(data)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype
    assert [result.engine_id for result in results] == ["e1"]


class _Slow(WeightDeltas):
    """Notes a push only once a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def pushed(self, weights: Mapping[str, Any], found: Difference | None, push_id: str) -> None:
        self.begun.set()
        assert self.goes_on.wait(60)
        super().pushed(weights, found, push_id)


async def test_a_push_by_difference_that_is_cancelled_ends_once_its_weights_are_noted() -> None:
    deltas = _Slow()
    async with pushing(push_router()) as client:
        push = asyncio.create_task(client.push_weights({"a": np.ones(3)}, 1, delta=deltas))
        await asyncio.to_thread(deltas.begun.wait, 60)
        push.cancel()
        await asyncio.wait([push], timeout=0.1)
        assert deltas.lock.locked()
        deltas.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert not deltas.lock.locked()


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(
            st.sampled_from(["u1", "<i2", "<f4", "<f8", "?"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_file_is_read_back_by_the_formats_own_reader(
    shapes: dict[str, tuple[str, list[int]]],
) -> None:
    tensors = {name: np.ones(shape, dtype) for name, (dtype, shape) in shapes.items()}
    size, pieces = file_of(tensors)
    data = b"".join(pieces)
    assert len(data) == size
    loaded = safetensors_numpy.load(data)
    assert {name: value.shape for name, value in loaded.items()} == {
        name: value.shape for name, value in tensors.items()
    }


async def test_torch_tensors_keep_their_type() -> None:
    torch = pytest.importorskip("torch")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    tensors = {
        "half": torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True),
        "turned": torch.randn(4, 2).T,
        "scalar": torch.tensor(2.5),
    }
    tensors["tied"] = tensors["half"]
    _, pieces = file_of(tensors)
    loaded = safetensors_torch.load(b"".join(pieces))
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


async def test_an_engine_that_failed_raises_unless_partial_is_allowed() -> None:
    router = push_router()
    router.results.append(
        engine_pb2.EngineResult(engine_id="e2", status=to_status(InvalidWeightsError("w", "no")))
    )
    tensors = {"w": np.zeros(1, np.float32)}
    async with pushing(router) as client:
        with pytest.raises(WeightsPushError, match="e2: w: no") as caught:
            await client.push_weights(tensors, 1)
        assert [result.engine_id for result in caught.value.results] == ["e1", "e2"]
        results = await client.push_weights(tensors, 1, allow_partial=True)
        assert [reason_of(result) for result in results] == ["", "INVALID_WEIGHTS"]


async def test_a_checkpoint_is_named_and_not_sent() -> None:
    router = push_router()
    async with pushing(router) as client:
        await client.push_weights(Path("/models/step-5"), 5, mode="wait")
    router.header.request_id = ""
    assert router.header == router_pb2.PushWeightsHeader(
        policy_version=5, pause_mode=engine_pb2.PAUSE_MODE_WAIT, checkpoint_dir="/models/step-5"
    )
    assert router.chunks == []


async def test_a_transfer_is_described_and_not_sent() -> None:
    router = push_router()
    async with pushing(router) as client:
        await client.push_weights(Transfer("nccl", [{"names": ["a"]}, [{}, {}]]), 6, mode="abort")
    router.header.request_id = ""
    assert router.header == router_pb2.PushWeightsHeader(
        policy_version=6,
        pause_mode=engine_pb2.PAUSE_MODE_ABORT,
        transfer=engine_pb2.WeightTransfer(
            backend="nccl", update_json=['{"names": ["a"]}', "[{}, {}]"]
        ),
    )
    assert router.chunks == []


async def test_an_engine_gets_the_whole_init_with_its_own_fields_replaced() -> None:
    router, info = push_router(), {"master_port": 7, "rank_offset": 1}
    async with pushing(router) as client:
        await client.init_weight_transfer("nccl", info, {"e2": {"rank_offset": 5}})
    assert router.init.backend == "nccl"
    assert json.loads(router.init.init_json) == info
    own = {name: json.loads(text) for name, text in router.init.init_json_by_engine.items()}
    assert own == {"e2": {"master_port": 7, "rank_offset": 5}}


async def test_a_refused_push_is_typed() -> None:
    router = push_router()
    router.refusal = StaleVersionError("policy_version: 1 is not above 4")
    async with pushing(router) as client:
        with pytest.raises(StaleVersionError):
            await client.push_weights({"w": np.zeros(4_000_000, np.float32)}, 1)


async def test_a_push_refused_while_much_is_being_sent_is_one_of_our_errors() -> None:
    """Its reason may be lost: grpc.aio may report the broken write instead of the status."""
    router = push_router()
    router.failure = StaleVersionError("policy_version: 1 is not above 4")
    async with pushing(router) as client:
        with pytest.raises(RollmeshError) as caught:
            await client.push_weights({"w": np.zeros(4_000_000, np.float32)}, 1)
    assert isinstance(caught.value, StaleVersionError | RemoteError)


def test_the_sdk_does_not_import_torch() -> None:
    code = "import sys, rollmesh.client, rollmesh.client.sync; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Kind(StrEnum):
    """As PEFT's own types are."""

    LORA = "LORA"


async def test_an_adapter_arrives_from_tensors_and_from_a_folder(tmp_path: Path) -> None:
    tensors = {"base_model.model.q_proj.lora_A.weight": np.ones((2, 300_000), np.float32)}
    config = {"peft_type": Kind.LORA, "r": 2, "target_modules": {"v_proj", "q_proj"}}
    plain = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    router = push_router()
    async with pushing(router) as client:
        await client.push_adapter(tensors, "math", 3, config, model="m")
        sent = b"".join(router.chunks)
        assert max(map(len, router.chunks)) <= CHUNK_BYTES
        header = router.adapter
        assert (header.adapter.name, header.adapter.version, header.model) == ("math", 3, "m")
        assert json.loads(header.config_json) == plain
        assert header.safetensors_bytes == len(sent)
        (tmp_path / "adapter_model.safetensors").write_bytes(sent)
        (tmp_path / "adapter_config.json").write_text(json.dumps(plain))
        router.chunks.clear()
        results = await client.push_adapter(tmp_path, "math", 4)
        assert b"".join(router.chunks) == sent
        assert json.loads(router.adapter.config_json) == plain
        assert [one.engine_id for one in results] == ["e1"]
        await client.unload_adapter("math", 3)
        assert router.unloaded.adapter == header.adapter


async def test_an_adapter_that_cannot_be_sent_is_refused_by_its_argument(tmp_path: Path) -> None:
    router = push_router()
    failed = to_status(InvalidWeightsError("q_proj", "does not fit"))
    async with pushing(router) as client:
        for wrong, field in ((tmp_path, "adapter"), ("folder", "adapter"), ({}, "weights")):
            with pytest.raises(InvalidFieldError) as caught:
                await client.push_adapter(wrong, "math", 1)  # type: ignore[arg-type]
            assert caught.value.field == field
        with pytest.raises(InvalidFieldError, match="version"):
            await client.push_adapter({"w": np.ones(1)}, "math", "1")  # type: ignore[arg-type]
        router.results = [engine_pb2.EngineResult(engine_id="e1", status=failed)]
        with pytest.raises(WeightsPushError):
            await client.push_adapter({"w": np.ones(1)}, "math", 1, {})
        results = await client.push_adapter({"w": np.ones(1)}, "math", 1, {}, allow_partial=True)
        assert [reason_of(one) for one in results] == ["INVALID_WEIGHTS"]
