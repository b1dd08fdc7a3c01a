"""Images of rows: what the model's processor makes of them, and positions."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoImageProcessor, Qwen2_5_VLModel

from rollmesh.batches import ImageProcessor, grid_positions, rows_of
from rollmesh.client import Trajectory
from rollmesh.runtime.codec import decode_image
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2
from tests.batches.pictured import FILES, NAMES, pictured
from tests.batches.records import linear, session
from tests.vision.models import KINDS, make_vision_dir


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_dir(request.param, tmp_path_factory.mktemp("model"))


def test_a_row_has_its_images_in_order_as_the_processor_makes_them(model: Path) -> None:
    (row,) = rows_of([pictured(model, [0, 1, 0])])
    inputs = ImageProcessor(model).inputs(row)
    pixels = [decode_image(FILES[at]) for at in (0, 1, 0)]
    wanted = dict(AutoImageProcessor.from_pretrained(model)(pixels, return_tensors="pt"))
    assert inputs.tensors.keys() == wanted.keys()
    assert all(torch.equal(inputs.tensors[name], value) for name, value in wanted.items())
    marked = np.concatenate(
        [np.arange(one.start, one.start + one.tokens) for one in row.trajectory.images]
    )
    assert np.flatnonzero(inputs.token_types).tolist() == marked.tolist()


def test_a_row_without_images_has_no_tensors(model: Path) -> None:
    (row,) = rows_of([session("s", [linear("t", 4, 3)])])
    inputs = ImageProcessor(model).inputs(row)
    assert inputs.tensors == {}
    assert not inputs.token_types.any()
    assert (inputs.position_ids == np.arange(7)).all()


def test_an_image_whose_file_is_missing_is_named(model: Path) -> None:
    given = replace(pictured(model, [0, 1]), images={})
    (row,) = rows_of([given])
    with pytest.raises(InvalidFieldError, match=NAMES[0]):
        ImageProcessor(model).inputs(row)


def test_an_image_of_another_size_is_another_models(tmp_path: Path) -> None:
    model = make_vision_dir("qwen2_5_vl", tmp_path)
    given = pictured(model, [0])
    given.trajectories[0].images[0].tokens -= 1
    (row,) = rows_of([given])
    with pytest.raises(InvalidFieldError, match="processor makes"):
        ImageProcessor(model).inputs(row)


def test_a_folder_without_a_processor_is_named(tokenizer_dir: Path) -> None:
    with pytest.raises(InvalidFieldError, match="has no image processor"):
        ImageProcessor(tokenizer_dir)


GRIDS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)), max_size=4)


@given(grids=GRIDS, last=st.integers(0, 5))
def test_positions_are_those_of_transformers(grids: list[tuple[int, int, int]], last: int) -> None:
    images: list[trajectory_pb2.TrajectoryImage] = []
    at = 0
    types: list[int] = []
    for height, width, text in grids:
        at += text
        types += [0] * text + [1] * height * width
        images.append(trajectory_pb2.TrajectoryImage(start=at, tokens=height * width))
        at += height * width
    types += [0] * (last + 1)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(
        model, *a, **k
    )
    thw = torch.tensor([[1, 2 * height, 2 * width] for height, width, _ in grids])
    wanted, _ = Qwen2_5_VLModel.get_rope_index(
        model,
        input_ids=torch.zeros((1, len(types)), dtype=torch.long),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=thw if grids else None,
    )
    found = grid_positions(len(types), images, [one[:2] for one in grids])
    assert (found == wanted[:, 0].numpy()).all()


def test_images_side_by_side_have_positions_of_their_own() -> None:
    images = [
        trajectory_pb2.TrajectoryImage(start=1, tokens=4),
        trajectory_pb2.TrajectoryImage(start=5, tokens=2),
    ]
    found = grid_positions(8, images, [(2, 2), (1, 2)])
    assert found[0].tolist() == [0, 1, 1, 1, 1, 3, 3, 5]
    assert found[1].tolist() == [0, 1, 1, 2, 2, 3, 3, 5]
    assert found[2].tolist() == [0, 1, 2, 1, 2, 3, 4, 5]


def test_a_damaged_answer_is_refused() -> None:
    tokens = trajectory_pb2.TokenArrays(
        token_ids_u32le=bytes(16), logprobs_f32le=bytes(16), loss_mask_u8=bytes(4)
    )
    for places in ([(0, 2), (1, 1)], [(3, 2)], [(1, 0)]):
        proto = trajectory_pb2.Trajectory(
            tokens=tokens,
            images=[trajectory_pb2.TrajectoryImage(start=at, tokens=n) for at, n in places],
        )
        with pytest.raises(InvalidFieldError, match="images"):
            Trajectory.from_proto(proto)
