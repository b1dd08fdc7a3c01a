"""Mesh files that are nested too deeply to be read."""

from pathlib import Path

import pytest

from rollmesh.runtime.config import ConfigError, read_mesh


def test_a_file_that_is_nested_too_deeply_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f"[engine.vllm]\nx = {'[' * 5_000}{']' * 5_000}\n")
    with pytest.raises(ConfigError, match=r"mesh.toml: is nested too deeply"):
        read_mesh(path)
