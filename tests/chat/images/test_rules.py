"""The rules of images, against the processors of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import ImageRefusedError, ImageRule, ModelFilesError, load_rule

QWEN: dict[str, Any] = {"image_token_id": 7, "video_token_id": 8, "model_type": "qwen2_5_vl"}
LLAVA: dict[str, Any] = {"image_token_index": 7, "model_type": "llava"}
SIZES = st.integers(1, 4000)


def rule_of(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> ImageRule | None:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_rule(folder)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"patch_size": 14, "merge_size": 1, "size": {"shortest_edge": 56, "longest_edge": 50000}},
    ],
    ids=["defaults", "qwen3-vl", "older-names", "no-merge"],
)
def grids(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ImageRule, Any]:
    """A rule and the processor that it must equal."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # large
        Qwen2VLImageProcessorPil,
    )

    folder = tmp_path_factory.mktemp("model")
    rule = rule_of(folder, QWEN, preprocessor_config={"do_resize": True, **request.param})
    assert rule is not None
    return rule, Qwen2VLImageProcessorPil(**request.param)


@given(width=SIZES, height=SIZES)
def test_a_grid_has_as_many_ids_as_the_processor_has_merged_patches(
    width: int, height: int, grids: tuple[ImageRule, Any]
) -> None:
    rule, processor = grids
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(ValueError, match="aspect ratio"):
            processor.get_number_of_image_patches(height, width)
        with pytest.raises(ImageRefusedError, match=f"{width} x {height} pixels"):
            rule.run(width, height)
        return
    patches = processor.get_number_of_image_patches(height, width)
    run = rule.run(width, height)
    assert (len(run), set(run.tolist())) == (patches // processor.merge_size**2, {7})


def test_the_ids_of_a_grid_are_those_of_a_processed_picture(grids: tuple[ImageRule, Any]) -> None:
    from PIL import Image  # as above

    rule, processor = grids
    for width, height in ((140, 100), (3, 90), (333, 77), (28, 28)):
        made = processor(Image.new("RGB", (width, height)), return_tensors="np")
        patches = int(made["image_grid_thw"][0].prod())
        assert len(rule.run(width, height)) == patches // processor.merge_size**2


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_constant_is_that_of_the_processor(tmp_path: Path, strategy: str, extra: int) -> None:
    settings = {
        "patch_size": 14,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": extra,
    }
    crop = {"crop_size": {"height": 336, "width": 322}}
    rule = rule_of(tmp_path, LLAVA, processor_config=settings, preprocessor_config=crop)
    assert rule is not None
    # `LlavaProcessor.replace_image_token`: one id per patch of the cut picture.
    wanted = (336 // 14) * (322 // 14) + extra - (strategy == "default")
    assert [len(rule.run(*size)) for size in ((1, 1), (500, 20))] == [wanted] * 2


def test_the_processor_of_a_combined_file_goes_before_that_of_its_own_file(tmp_path: Path) -> None:
    rule = rule_of(
        tmp_path,
        QWEN,
        processor_config={"image_processor": {"patch_size": 16}},
        preprocessor_config={"patch_size": 14},
    )
    assert rule is not None
    assert len(rule.run(320, 320)) == 100


def test_ids_of_video_and_sound_are_reserved_too(tmp_path: Path) -> None:
    config = QWEN | {"audio_token_id": 3}
    rule = rule_of(tmp_path, config, preprocessor_config={"patch_size": 14})
    assert rule is not None
    assert rule.reserved_ids == (3, 7, 8)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        pytest.param({"model_type": "qwen3"}, {}, id="text-model"),
        pytest.param(QWEN, {}, id="no-processor"),
        pytest.param(
            {"model_type": "new_vl", "image_token_id": 7},
            {"preprocessor_config": {"patch_size": 14}},
            id="unknown-family",
        ),
    ],
)
def test_a_model_without_a_rule_takes_no_images(
    config: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    assert rule_of(tmp_path, config, **files) is None


def test_a_processor_without_a_number_that_is_needed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="not that of llava"):
        rule_of(tmp_path, LLAVA, preprocessor_config={"crop_size": 336})
