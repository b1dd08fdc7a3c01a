"""`rollmesh config show`: every setting with its source, and no secret."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from rollmesh.cli import installed
from rollmesh.runtime.config import describe

MESH = """
[mesh]
data_dir = "data"
[collector]
store = "postgresql://user:hunter2@host/mesh"
[engine.vllm]
hf_token = "hunter2"
tensor_parallel_size = 2
[[model]]
name = "policy"
[[model]]
name = "judge"
"""


def show(folder: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "mesh.toml").write_text(MESH)
    return subprocess.run(
        (sys.executable, "-m", "rollmesh.cli", "config", "show", *argv),
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_every_setting_of_every_service_is_shown_with_its_source(tmp_path: Path) -> None:
    done = show(tmp_path, "--config=mesh.toml", "--format=json", ROLLMESH_ROUTER_PORT="7150")
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    named = {heading.partition(" ")[0] for heading in shown}
    assert named == set(installed())
    assert {"engine of policy", "engine of judge"} <= shown.keys()
    for heading, settings in shown.items():
        service = heading.partition(" ")[0]
        assert list(settings) == [one.name for one in describe(installed()[service], service)]
    assert shown["router"]["port"] == {"value": 7150, "source": "ROLLMESH_ROUTER_PORT"}
    assert shown["router"]["data_dir"] == {"value": "data/router", "source": "mesh.toml [mesh]"}
    assert shown["router"]["queue_limit"]["source"] == "default"
    assert shown["engine of judge"]["model"]["value"] == "judge"


def test_a_service_is_shown_as_it_would_start_and_no_secret_is(tmp_path: Path) -> None:
    done = show(tmp_path, "collector", "--config=mesh.toml", "--tick-ms=5")
    assert done.returncode == 0
    lines = dict(line.split("  # ") for line in done.stdout.splitlines() if "  # " in line)
    assert lines["tick_ms = 5".ljust(48)] == "--tick-ms"
    assert 'store = "postgresql://user:***@host/mesh"' in done.stdout
    engine = show(tmp_path, "engine", "--config=mesh.toml", "--model=judge")
    assert 'vllm = {"hf_token" = "***", "tensor_parallel_size" = 2}' in engine.stdout
    table = tomllib.loads(engine.stdout)["engine"]  # it is a table of a mesh file again
    assert (table["model"], table["vllm"]["tensor_parallel_size"]) == ("judge", 2)
    for text in (done.stdout, done.stderr, engine.stdout, engine.stderr):
        assert "hunter2" not in text


def test_refused_values_are_reported_without_secrets(tmp_path: Path) -> None:
    done = show(tmp_path, "collector", "--store=postgresql://user:hunter2@host/mesh", "--tick-ms=0")
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["store", "tick_ms"]
    done = show(tmp_path, "--tick-ms=5")
    assert done.returncode == 2
    assert "give the service whose flag it is" in done.stderr
