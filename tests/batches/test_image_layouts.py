"""Layouts of rows with images: positions of three dimensions, and what the model needs.

The proof is the model's own forward pass over a batch, which equals that over each row alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.batches import (
    Batch,
    ImageProcessor,
    Row,
    Rows,
    image_tensors,
    pack,
    pad,
    ragged,
    rows_of,
    to_torch,
)
from rollmesh.client import SessionResult
from rollmesh.runtime.errors import InvalidFieldError
from tests.batches.pictured import pictured
from tests.vision.models import make_vision_model

ORDERS: tuple[list[int], ...] = ([0, 1, 0], [1], [])
LAYOUTS: list[Any] = [
    pytest.param(pad, id="right"),
    pytest.param(lambda rows, **more: pad(rows, side="left", **more), id="left"),
    pytest.param(lambda rows, **more: pack(rows, 80, **more), id="packed"),
    pytest.param(ragged, id="ragged"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def network(model: Path) -> Any:
    from transformers import AutoModelForImageTextToText  # slow, and each worker collects this

    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows(model: Path) -> Rows:
    return rows_of([pictured(model, order) for order in ORDERS])


@pytest.fixture(scope="module")
def processor(model: Path) -> ImageProcessor:
    return ImageProcessor(model)


def positions_of(batch: Any, row: int, tokens: int) -> Any:
    """Returns int64 [3, N]: those of a trajectory, wherever the layout has them."""
    if hasattr(batch, "offsets"):
        return batch.position_ids[:, batch.offsets[row] : batch.offsets[row + 1]]
    at, start = batch.row_index[row], batch.start[row]
    return batch.position_ids[at, :, start : start + tokens]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_positions_of_its_rows(
    layout: Callable[..., Any], rows: Rows, processor: ImageProcessor
) -> None:
    batch = layout(rows, processor=processor)
    for at, row in enumerate(rows):
        wanted = processor.inputs(row).position_ids
        assert np.array_equal(positions_of(batch, at, len(row)), wanted)
        assert np.array_equal(batch.images[at].position_ids, wanted)
    tensor = to_torch(batch)["position_ids"]
    assert tensor.shape[tensor.ndim - 2] == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_without_a_processor_are_refused(layout: Callable[..., Any], rows: Rows) -> None:
    with pytest.raises(InvalidFieldError, match="trajectory t has images; give ImageProcessor"):
        layout(rows)


def test_a_model_with_plain_positions_keeps_them(tmp_path: Path) -> None:
    llava = make_vision_model("llava", tmp_path)
    rows = rows_of([pictured(llava, [0])])
    batch = pad(rows, processor=ImageProcessor(llava))
    assert np.array_equal(batch.position_ids[0], np.arange(batch.token_ids.shape[1]))
    assert image_tensors(batch).keys() == {"pixel_values"}


def alone(network: Any, processor: ImageProcessor, row: Row) -> torch.Tensor:
    """Returns the logits of one row, [N, vocabulary]."""
    inputs = processor.inputs(row)
    ids = torch.from_numpy(row.trajectory.token_ids.astype("int64"))[None]
    positions = torch.from_numpy(inputs.position_ids)[:, None]
    with torch.no_grad():
        answer = network(input_ids=ids, position_ids=positions, **inputs.tensors)
    logits: torch.Tensor = answer.logits[0]
    return logits


def together(network: Any, batch: Any, allowed: np.ndarray, ids: np.ndarray) -> torch.Tensor:
    """Returns the logits of a batch. A token attends where `allowed`, [R, L, L], says so."""
    mask = torch.where(torch.from_numpy(allowed), 0.0, torch.finfo(torch.float32).min)
    positions = torch.from_numpy(batch.position_ids)
    positions = positions[:, None] if positions.ndim == 2 else positions.transpose(0, 1)
    given = {"input_ids": torch.from_numpy(ids), "position_ids": positions}
    with torch.no_grad():
        answer = network(**given, attention_mask=mask[:, None], **image_tensors(batch))
    logits: torch.Tensor = answer.logits
    return logits


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_forward_pass_over_a_batch_is_that_over_each_row(
    layout: Callable[..., Batch], rows: Rows, processor: ImageProcessor, network: Any
) -> None:
    batch = layout(rows, processor=processor)
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    found = together(network, batch, np.tril(same), batch.token_ids)
    for row, one in zip(rows, batch.unpack(found.numpy()), strict=True):
        assert np.allclose(one, alone(network, processor, row), atol=1e-4)


def test_a_packed_batch_has_its_images_in_the_order_of_their_tokens(
    model: Path, processor: ImageProcessor
) -> None:
    given: list[SessionResult] = [pictured(model, [1]), pictured(model, [0, 1, 0])]
    batch = pack(rows_of(given), 80, processor=processor)
    assert batch.row_index.tolist() == [0, 0]
    assert batch.start[0] > batch.start[1]
    grids = image_tensors(batch)["image_grid_thw"].tolist()
    first, second = (processor.inputs(row).tensors["image_grid_thw"] for row in rows_of(given))
    assert grids == [*second.tolist(), *first.tolist()]
