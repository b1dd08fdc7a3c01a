"""How transfers are described: what fits is read, all else is refused before vLLM sees it."""

import json
from typing import Any

import pytest

from rollmesh.engine import read_init, read_transfer
from rollmesh.runtime.errors import InvalidFieldError, WeightTransferError
from rollmesh.v1 import engine_pb2
from tests.controls import Control


def init(text: str, **own: str) -> Control.InitWeightTransfer:
    return Control.InitWeightTransfer(backend="nccl", init_json=text, init_json_by_engine=own)


def updates(*texts: str, backend: str = "nccl") -> engine_pb2.WeightTransfer:
    return engine_pb2.WeightTransfer(backend=backend, update_json=texts)


def test_what_fits_is_read_as_it_was_written() -> None:
    text = '{"rank_offset": 1, "master_port": 7}'
    assert read_init(init(text, other="{}"), "e", "nccl") == {"rank_offset": 1, "master_port": 7}
    assert read_init(init("{}", e=text), "e", "nccl") == {"rank_offset": 1, "master_port": 7}
    given: tuple[Any, ...] = ({"names": ["a"]}, [{"names": ["b"]}, {}])
    assert read_transfer(updates(*map(json.dumps, given)), "nccl").updates == given


@pytest.mark.parametrize(
    ("own", "says"),
    [
        pytest.param("", "is 'nccl', and the engine has no transfer backend; start it", id="none"),
        pytest.param("ipc", "is 'nccl', and the engine uses 'ipc'", id="another"),
    ],
)
def test_a_backend_that_the_engine_lacks_is_named(own: str, says: str) -> None:
    with pytest.raises(WeightTransferError, match=says):
        read_init(init("{}"), "e", own)
    with pytest.raises(WeightTransferError, match=says):
        read_transfer(updates("{}"), own)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[1]", id="a list"),
        pytest.param('"x"', id="a text"),
        pytest.param("{", id="cut"),
        pytest.param("[" * 100_000, id="too deep"),
    ],
)
def test_an_init_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_init(init(text), "e", "nccl")
    assert caught.value.field == "init_json"


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param([], id="nothing"),
        pytest.param(["{}", "7"], id="a number"),
        pytest.param(["{"], id="cut"),
    ],
)
def test_an_update_that_describes_nothing_is_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_transfer(updates(*texts), "nccl")
    assert caught.value.field == "header.transfer.update_json"
