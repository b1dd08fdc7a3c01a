"""What of a checkpoint is compared before it touches a running model."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.engine import Header, find_misfit, read_headers

MODEL = {
    "model.embed_tokens.weight": Header("BF16", (8, 4)),
    "model.norm.weight": Header("BF16", (4,)),
}
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"model.norm.weight": Header("F32", (4,))}, ""),
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        (
            {"model.norm.weight": Header("BF16", (5,))},
            "model.norm.weight has shape [5], the model has [4]",
        ),
        (
            {"model.norm.weight": Header("I64", (4,))},
            "model.norm.weight has dtype I64, the model has BF16",
        ),
        ({"extra": Header("BF16", (4,))}, "extra is not a tensor of the model"),
        ({HEAD: Header("BF16", (8, 4))}, ""),
        (
            {HEAD: Header("BF16", (9, 4))},
            "lm_head.weight has shape [9, 4], the model has [8, 4]",
        ),
    ],
)
def test_a_misfit_is_named(changes: dict[str, Header | None], problem: str) -> None:
    offered = {name: header for name, header in {**MODEL, **changes}.items() if header}
    assert find_misfit(offered, MODEL) == problem


def test_experts_that_transformers_fuses_are_refused_with_the_remedy() -> None:
    head = "model.layers.0.mlp.experts"
    model = {**MODEL, f"{head}.0.up_proj.weight": Header("BF16", (8, 4))}
    offered = {**MODEL, f"{head}.gate_up_proj": Header("BF16", (2, 8, 4))}
    assert find_misfit(offered, model) == (
        f"{head}.0.up_proj.weight is missing, and {head}.gate_up_proj is no tensor of the "
        "checkpoint; push revert_weight_conversion(model, model.state_dict()) of "
        "transformers.core_model_loading"
    )


def test_headers_come_from_all_files_of_a_folder(tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(4, np.int64)}, tmp_path / "model-2.safetensors")
    assert read_headers(tmp_path) == {"a": Header("F32", (2, 3)), "b": Header("I64", (4,))}


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        read_headers(tmp_path)
