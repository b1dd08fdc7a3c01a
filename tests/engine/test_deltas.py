"""Weights that come as a difference: the file that an engine keeps, and what it refuses."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from rollmesh.client import WeightDeltas, file_of
from rollmesh.engine import apply
from rollmesh.runtime.codec import Difference
from rollmesh.runtime.errors import InvalidFieldError, InvalidWeightsError, WeightsBaseError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc
from tests.processes import ServiceProcess, running

Tensors = dict[str, np.ndarray[Any, Any]]
DTYPES = ("float16", "float32", "float64", "uint8", "bool", "int64")


def weights(seed: int = 0, *, changed: float = 1.0, of: Tensors | None = None) -> Tensors:
    """Returns weights, or others of which a part has changed."""
    dice = np.random.default_rng(seed)
    new: Tensors = {
        "wide": dice.normal(size=(700, 3)).astype(np.float16),
        "deep.narrow": dice.normal(size=50).astype(np.float32),
    }
    if of is None:
        return new
    return {
        name: np.where(dice.random(one.shape) < changed, new[name], one) for name, one in of.items()
    }


def file(tensors: Any, metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(file_of(tensors, metadata)[1])


def difference(old: Tensors, new: Tensors) -> Difference:
    deltas = WeightDeltas()
    deltas.pushed(old, None, "base")
    found = deltas.difference(new)
    assert found is not None
    return found


def data_of(found: Difference) -> bytes:
    return file(found.tensors, found.checksums)


@st.composite
def states(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Two states of which at most a part differs, in runs and at single places."""
    old, new = {}, {}
    for name in ("a", "b.c"):
        shape = draw(st.sampled_from([(), (0, 3), (7,), (300, 5), (70_000,)]))
        dice = np.random.default_rng(draw(st.integers(0, 2**16)))
        data = dice.integers(0, 2, shape).astype(draw(st.sampled_from(DTYPES)))
        old[name], flat = data, data.copy().reshape(-1)
        most = max(len(flat) - 1, 0)
        for at in draw(st.lists(st.integers(0, most), max_size=4)) if len(flat) else ():
            run = slice(at, at + draw(st.integers(1, 3)))
            flat[run] = 1 - flat[run].astype(int)
        new[name] = flat.reshape(shape)
    return old, new


@given(states())
@settings(deadline=None)
def test_a_difference_makes_the_old_file_the_new_one(pair: tuple[Tensors, Tensors]) -> None:
    old, new = pair
    deltas = WeightDeltas()
    deltas.pushed(old, None, "base")
    found = deltas.difference(new)
    if found is None:  # most of it has changed
        return
    with tempfile.TemporaryDirectory() as folder:
        path, change = Path(folder, "weights"), Path(folder, "difference")
        path.write_bytes(file(old))
        change.write_bytes(data_of(found))
        apply(change, path)
        assert path.read_bytes() == file(new)
    deltas.pushed(new, found, "next")
    again = deltas.difference(new)
    assert again is not None
    assert not again.tensors
    assert again.checksums == found.checksums


def test_wide_gaps_are_filled_where_that_takes_fewer_bytes() -> None:
    old = {"w": np.zeros(100_000, np.uint16)}
    widest = range(7, 100_000, 255)  # the widest gaps that fit into a byte
    cases = (([5, 80_000], 4), (range(0, 100_000, 40), 1), ([3, 300, 301], 1), (widest, 1))
    for places, width in cases:
        new = {"w": old["w"].copy()}
        new["w"][list(places)] = 7
        found = difference(old, new)
        assert found.tensors["gaps:w"].dtype.itemsize <= width
        assert found.size <= len(list(places)) * 6 + 12
        assert set(places) <= set(np.cumsum(found.tensors["gaps:w"], dtype=int).tolist())
        assert (found.tensors["gaps:w"][1:] > 0).all()


def test_a_bit_pattern_that_compares_equal_is_sent() -> None:
    """Minus zero equals zero, and NaN equals nothing."""
    old = {"w": np.array([0.0, np.nan, 1.0, 2.0] * 10, np.float32)}
    new = {"w": old["w"].copy()}
    new["w"][0] = -0.0
    found = difference(old, new)
    assert found.tensors["gaps:w"].tolist() == [0]
    assert found.tensors["values:w"].tolist() == [0x80000000]


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceProcess]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    async with running("engine", tmp_path, backend="scripted", model="policy") as process:
        yield process


class Push:
    """Sends updates to an engine as a router does."""

    def __init__(self, engine: ServiceProcess) -> None:
        self.engine = engine

    async def __call__(
        self, version: int, data: bytes, *, base_push_id: str = "", **header: Any
    ) -> engine_pb2.UpdateWeightsResponse:
        given = {"keep_file": True, "push_id": f"push-{version}", **header}
        made = engine_pb2.UpdateWeightsHeader(
            policy_version=version,
            pause_mode=engine_pb2.PAUSE_MODE_KEEP,
            safetensors_bytes=len(data),
            base_push_id=base_push_id,
            **given,
        )
        requests = [
            engine_pb2.UpdateWeightsRequest(header=made),
            engine_pb2.UpdateWeightsRequest(safetensors_chunk=data),
        ]
        async with open_channel(self.engine.address) as channel:
            with typed_errors():
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                return await stub.UpdateWeights(iter(requests), timeout=60)

    async def version(self) -> int:
        async with open_channel(self.engine.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            return (await stub.GetInfo(engine_pb2.GetInfoRequest(), timeout=60)).policy_version


def kept(folder: Path) -> list[Path]:
    return list((folder / "scratch").rglob("weights.safetensors"))


async def test_an_engine_changes_the_file_that_it_keeps(
    engine: ServiceProcess, tmp_path: Path
) -> None:
    push, first = Push(engine), weights()
    second = weights(1, changed=0.05, of=first)
    third = weights(2, changed=0.05, of=second)
    await push(1, file(first))
    await push(2, data_of(difference(first, second)), base_push_id="push-1")
    assert await push.version() == 2
    await push(3, data_of(difference(second, third)), base_push_id="push-2")
    (path,) = kept(tmp_path)
    found = load_file(path)
    assert all(np.array_equal(found[name], third[name]) for name in third)
    with pytest.raises(WeightsBaseError, match="base_push_id"):
        await push(4, data_of(difference(first, second)), base_push_id="push-1")
    await push(4, file(first), keep_file=False)
    assert not kept(tmp_path)
    with pytest.raises(WeightsBaseError, match="but none"):
        await push(5, data_of(difference(first, second)), base_push_id="push-4")
    assert await push.version() == 4


async def test_a_wrong_checksum_changes_neither_the_weights_nor_the_file(
    engine: ServiceProcess, tmp_path: Path
) -> None:
    push, first = Push(engine), weights()
    second = weights(1, changed=0.05, of=first)
    found = difference(first, second)
    await push(1, file(first))
    wrong = {**found.checksums, "wide": "00000000"}
    with pytest.raises(WeightsBaseError, match="wide has another checksum"):
        await push(2, file(found.tensors, wrong), base_push_id="push-1")
    less = {name: one for name, one in found.checksums.items() if name != "wide"}
    with pytest.raises(WeightsBaseError, match="wide is a tensor of"):
        await push(2, file(found.tensors, less), base_push_id="push-1")
    (path,) = kept(tmp_path)
    assert path.read_bytes() == file(first)
    assert await push.version() == 1
    with pytest.raises(WeightsBaseError, match="base_push_id"):
        await push(2, data_of(found), base_push_id="push-0", push_id="")
    await push(2, data_of(found), base_push_id="push-1")
    assert path.read_bytes() == file(second)


@pytest.mark.parametrize(
    ("name", "gaps", "values", "why"),
    [
        ("wide", np.array([2_100], "u2"), np.array([1], "u2"), "is not inside of 2100"),
        ("wide", np.array([2**63, 2**63], "u8"), np.array([1, 1], "u2"), "is not inside"),
        ("wide", np.array([1, 0], "u1"), np.array([1, 1], "u2"), "is not inside"),
        ("wide", np.array([1], "u1"), np.array([1], "u4"), "values as uint16"),
        ("wide", np.array([1], "i1"), np.array([1], "u2"), "values as uint16"),
        ("wide", np.array([1, 1], "u1"), np.array([1], "u2"), "as many gaps as values"),
        ("wide", np.array([[1]], "u1"), np.array([[1]], "u2"), "as many gaps as values"),
        ("wide", np.array([1], "u1"), None, "has no gaps or no values"),
        ("narrow", np.array([1], "u1"), np.array([1], "u2"), "no array of a tensor"),
    ],
)
async def test_a_malformed_difference_is_refused_by_its_tensor(
    tmp_path: Path, name: str, gaps: Any, values: Any, why: str
) -> None:
    first = weights()
    sums = difference(first, first).checksums
    path, change = tmp_path / "weights", tmp_path / "difference"
    path.write_bytes(file(first))
    arrays = {f"gaps:{name}": gaps, f"values:{name}": values}
    change.write_bytes(file({key: one for key, one in arrays.items() if one is not None}, sums))
    with pytest.raises(InvalidWeightsError, match=why):
        apply(change, path)
    change.write_bytes(b"garbage" * 10)
    with pytest.raises(InvalidWeightsError, match="cannot be read"):
        apply(change, path)
    assert path.read_bytes() == file(first)


async def test_the_kept_file_runs_ahead_and_is_loaded_later(
    engine: ServiceProcess, tmp_path: Path
) -> None:
    """A router brings a late engine the base and the differences, of which the last is loaded."""
    push, first = Push(engine), weights()
    second = weights(1, changed=0.05, of=first)
    await push(1, file(first), file_only=True)
    assert await push.version() == 0
    await push(2, data_of(difference(first, second)), base_push_id="push-1")
    assert await push.version() == 2
    (path,) = kept(tmp_path)
    assert path.read_bytes() == file(second)


async def test_contradicting_fields_are_named(engine: ServiceProcess) -> None:
    push, data = Push(engine), file(weights())
    for name, value in (("base_push_id", "push-0"), ("file_only", True)):
        fields: dict[str, Any] = {"keep_file": False, name: value}
        with pytest.raises(InvalidFieldError, match="needs keep_file") as caught:
            await push(1, data, **fields)
        assert caught.value.field == f"header.{name}"


async def test_an_engine_that_ends_leaves_no_file(tmp_path: Path, engine: ServiceProcess) -> None:
    await Push(engine)(1, file(weights()))
    assert kept(tmp_path)
    await engine.terminate()
    assert not kept(tmp_path)
