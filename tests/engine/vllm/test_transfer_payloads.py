"""Bytes of a weight transfer that vLLM would unpickle. They are refused whatever it allows."""

import base64
import ctypes
import inspect
import json
import os
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rollmesh.engine import read_init, read_transfer
from rollmesh.engine.vllm import WeightReceiver, with_handles
from rollmesh.runtime.codec import CLASSES, FIELDS, json_handles
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import engine_pb2

pytestmark = pytest.mark.vllm
NAMED = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(autouse=True)
def _insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def test_pickled_handles_are_refused_where_vllm_reads_them(tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    text = base64.b64encode(pickle.dumps(Payload(tmp_path / "made"))).decode()
    update = {**NAMED, "ipc_handles_pickled": text}
    for given in (update, [update], [NAMED, update]):
        transfer = engine_pb2.WeightTransfer(backend="ipc", update_json=[json.dumps(given)])
        with pytest.raises(InvalidFieldError) as caught:
            read_transfer(transfer, "ipc")
        assert caught.value.field == "header.transfer.update_json.ipc_handles_pickled"
    init = engine_pb2.ControlEnginesRequest.InitWeightTransfer(
        backend="ipc", init_json=json.dumps({"ipc_handles_pickled": text})
    )
    with pytest.raises(InvalidFieldError):
        read_init(init, "e", "ipc")
    worker = WeightReceiver()
    worker.weight_transfer_engine = _Ipc()
    assert "is not read" in worker.check_transfer([update])
    with pytest.raises(ValueError, match="is not read"):
        worker.load_transfer([update])
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match="ipc_handles"):
        IPCWeightTransferUpdateInfo(**update)
    assert (tmp_path / "made").exists()  # vLLM's own reader runs it


class _Ipc:
    def parse_update_info(self, update: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

        return IPCWeightTransferUpdateInfo(**update)


@pytest.fixture
def master() -> Any:
    """What a trainer serves: the store of a group, where `received` sends bytes to rank 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)


class _Joining:
    """As vLLM's NCCL backends join: a group over the store, and its unique id."""

    received: Any = None

    def __init__(self, master: Any) -> None:
        self.port = master.port

    def parse_init_info(self, info: Any) -> Any:
        return info

    def shutdown(self) -> None:
        return

    def init_transfer_engine(self, _: Any) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create("127.0.0.1", self.port, 1, 2, store_timeout=30)
        self.received = group.broadcast_obj(None, src=0)


def test_foreign_entries_of_the_store_are_not_unpickled(tmp_path: Path, master: Any) -> None:
    from vllm.distributed import utils

    worker = WeightReceiver()
    worker.weight_transfer_engine = _Joining(master)
    master.set("broadcast_from/0/0", pickle.dumps(Payload(tmp_path / "made")))
    assert "is not part of a unique id" in worker.init_transfer({})
    assert not (tmp_path / "made").exists()
    assert utils.pickle is pickle  # vLLM's own groups go on


def test_a_unique_id_is_received(master: Any) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    sent = ncclUniqueId()
    ctypes.memmove(ctypes.addressof(sent), bytes(range(128)), 128)
    worker, joining = WeightReceiver(), _Joining(master)
    worker.weight_transfer_engine = joining
    master.set("broadcast_from/0/0", pickle.dumps(sent))
    assert worker.init_transfer({}) == ""
    assert bytes(joining.received) == bytes(range(128))


def test_another_thread_unpickles_as_before() -> None:
    from vllm.distributed import utils

    from rollmesh.engine.vllm import only_unique_ids

    read: list[Any] = []
    data = pickle.dumps(Path("x"))
    with only_unique_ids():
        thread = threading.Thread(target=lambda: read.append(utils.pickle.loads(data)))
        thread.start()
        thread.join()
        with pytest.raises(pickle.UnpicklingError):
            utils.pickle.loads(data)
    assert read == [Path("x")]


def arguments() -> tuple[Any, ...]:
    """As `reduce_tensor` returns them for a tensor on a GPU."""
    size, stride = torch.Size([4, 2]), (2, 1)
    storage = (0, b"\1" * 64, 4096, 512, False, b"ref", 8, b"event", True)
    kinds = torch.Tensor, size, stride, 0, torch.storage.TypedStorage, torch.bfloat16
    return *kinds, *storage


def test_handles_arrive_as_they_were_sent() -> None:
    unpacked = {**NAMED, "ipc_handles": [{"GPU-1": arguments()}], "ipc_handles_pickled": None}
    packed = {**NAMED, "ipc_handles": {"GPU-1": arguments(), "GPU-2": arguments()}}
    for update in (unpacked, packed, [unpacked, unpacked]):
        parts: Any = update if isinstance(update, list) else [update]
        sent = [json.loads(json.dumps(json_handles(one))) for one in parts]
        received = with_handles(sent if isinstance(update, list) else sent[0])
        got = received if isinstance(received, list) else [received]
        assert [one["ipc_handles"] for one in got] == [one["ipc_handles"] for one in parts]


def test_the_fields_are_those_of_torch() -> None:
    parameters = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert [parameters.index(name) for name in CLASSES] == list(CLASSES.values())
    assert [name for name in parameters if name not in CLASSES] == list(FIELDS)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": "os.system"},
        {"dtype": 7},
        {"storage_handle": "?"},
        {"storage_handle": 7},
        {"tensor_size": [4, "2"]},
        {"tensor_size": [-1]},
        {"tensor_offset": -1},
        {"requires_grad": 1},
        {"storage_size_bytes": True},
        {"other": 1},
    ],
    ids=str,
)
def test_a_malformed_handle_is_refused(change: dict[str, Any]) -> None:
    sent = json_handles({**NAMED, "ipc_handles": [{"GPU-1": arguments()}]})
    sent["ipc_handles"][0]["GPU-1"] |= change
    with pytest.raises(ValueError):  # noqa: PT011 - of base64 too
        with_handles(sent)


@pytest.mark.parametrize("handles", [7, "x", [7], [{"GPU-1": []}], {"GPU-1": None}], ids=str)
def test_bytes_that_are_no_handle_are_refused(handles: Any) -> None:
    with pytest.raises(ValueError, match="ipc_handles"):
        with_handles({**NAMED, "ipc_handles": handles})
