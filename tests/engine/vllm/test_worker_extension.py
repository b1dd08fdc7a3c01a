"""What of a checkpoint is compared before it touches a running model."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.engine import Header, find_fault, find_misfit, read_headers

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
        (
            {"embed_tokens.weight": Header("BF16", (8, 4))},
            "embed_tokens.weight is not a tensor of the model",
        ),
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


EMBEDDING = "model.embed_tokens.weight"
ROWS = np.arange(32, dtype=np.float16).reshape(8, 4)
OTHER_ROWS = np.where(ROWS == 31, np.float16(30), ROWS)


@pytest.mark.parametrize("pair", [(EMBEDDING, HEAD), ("a.model.embed_tokens.weight", f"a.{HEAD}")])
@pytest.mark.parametrize("has_head", [False, True], ids=["without a head", "with a head"])
def test_a_tied_output_layer_is_pushed_with_the_values_of_the_embedding_or_refused(
    tmp_path: Path, pair: tuple[str, str], has_head: bool
) -> None:
    embedding, head = pair
    model = {one: Header("BF16", (8, 4)) for one in pair[: 1 + has_head]}
    file = tmp_path / "model.safetensors"
    for rows in (OTHER_ROWS, OTHER_ROWS.astype(np.float32), ROWS.astype(np.float32), -ROWS):
        save_file({embedding: ROWS, head: rows}, file)
        for source in (file, tmp_path):
            found = find_fault(source, model, tied=True)
            assert found.startswith(f"{head} differs from {embedding}, to which the model ties it;")
        assert (find_fault(file, model, tied=False) == "") is has_head
    save_file({embedding: ROWS, head: ROWS}, file)
    assert find_fault(file, model, tied=True) == ""
    save_file({embedding: ROWS}, file)
    save_file({head: OTHER_ROWS}, tmp_path / "more.safetensors")
    assert find_fault(tmp_path, model, tied=True).startswith(f"{head} differs from {embedding}")
    save_file({head: ROWS}, tmp_path / "more.safetensors")
    assert find_fault(tmp_path, model, tied=True) == ""


def test_a_tensor_in_two_files_of_a_folder_is_refused(tmp_path: Path) -> None:
    save_file({EMBEDDING: ROWS}, tmp_path / "a.safetensors")
    save_file({EMBEDDING: ROWS}, tmp_path / "b.safetensors")
    found = find_fault(tmp_path, {EMBEDDING: Header("F16", (8, 4))}, tied=False)
    assert found == f"{EMBEDDING} is in a.safetensors and in b.safetensors; push it once"
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        find_fault(Path(tempfile.mkdtemp(dir=tmp_path)), {}, tied=False)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        read_headers(tmp_path)
