"""Rows with images have the columns that verl 0.9.1's own agent loop makes of them."""

from pathlib import Path

import pytest

from tests.trainers.processes import run_script
from tests.vision.environment import python_path
from tests.vision.models import make_vision_dir


@pytest.mark.long
async def test_the_columns_of_images_and_positions_are_those_of_verl(tmp_path: Path) -> None:
    model = make_vision_dir("qwen2_5_vl", tmp_path / "model")
    three, one, none = await run_script(
        "verl_images_run", tmp_path, model=str(model), path=python_path()
    )
    for row in (three, one):
        assert row["names"][0] == row["names"][1]
        assert row["names"][0] == ["image_grid_thw", "images_seqlens", "pixel_values"]
        assert set(row["equal"].values()) == {True}
    assert none["names"] == [[], []]
    for row in (three, one, none):
        assert row["positions"][0] == row["positions"][1]
        assert row["positions"][0][0] == 4
        assert row["positions_equal"]
        assert row["layouts_equal"] == [True, True]
