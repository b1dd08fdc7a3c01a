import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.batches import (
    PackageMissingError,
    pack,
    pad,
    ragged,
    rows_of,
    to_torch,
)
from tests.batches.records import linear, session

_ROWS = rows_of(
    [session("a", [linear("t", 2, 3)], group="g"), session("b", [linear("u", 1, 6)], group="g")]
)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(pad(_ROWS), id="padded"),
        pytest.param(pack(_ROWS, 20), id="packed"),
    ],
)
def test_tensors_are_the_arrays_without_a_copy(batch: Any) -> None:
    tensors = to_torch(batch)
    for name, tensor in tensors.items():
        array = getattr(batch, name, None)
        if array is None:
            array = getattr(batch.trajectories, name)
        assert np.shares_memory(tensor.numpy(), array)
        assert tensor.shape == array.shape
    assert tensors["logprobs"].dtype == torch.float32
    assert tensors["num_turns"].dtype == torch.int64


def test_a_ragged_batch_becomes_nested_jagged_tensors() -> None:
    tensors = to_torch(ragged(_ROWS))
    assert tensors["token_ids"].is_nested
    assert tensors["token_ids"].layout == torch.jagged
    rows = [row.trajectory.token_ids.tolist() for row in _ROWS]
    assert [row.tolist() for row in tensors["token_ids"].unbind()] == rows
    assert tensors["reward"].tolist() == [1.0, 1.0]
    assert "offsets" not in tensors


def test_one_offset_tensor_serves_all_columns_so_they_can_be_combined() -> None:
    tensors = to_torch(ragged(_ROWS))
    weighted = tensors["logprobs"] * tensors["loss_mask"]
    assert [len(row) for row in weighted.unbind()] == [5, 7]


def test_without_torch_the_arrays_are_there_and_tensors_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    batch = pad(_ROWS)
    assert batch.token_ids.shape == (2, 7)
    with pytest.raises(PackageMissingError, match="needs the package torch; install it"):
        to_torch(batch)


def test_the_arrays_alone_import_neither_torch_nor_tensordict() -> None:
    program = (
        "import sys, rollmesh.batches as batches; batches.pad(batches.rows_of([]));"
        "print({'torch', 'tensordict'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)  # noqa: PLW1510
    assert run.stdout.strip() == "set()", run.stderr
