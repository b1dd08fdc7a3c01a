"""`rollmesh status` against a mesh of real processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from rollmesh.runtime import number_of
from tests.locks import Locks
from tests.meshes import Mesh, scripted_mesh

MESH = {"first": {"router": {"pin_ms": 3_600_000}}}  # no pin lapses, however slow the machine is


def status(*flags: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "rollmesh.cli.status", *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


async def test_it_shows_members_sessions_and_consumers(mesh: Mesh) -> None:
    async with mesh.client() as client:
        await client.open_run(6)
        await client.push_weights({"w": np.zeros(1, np.float32)}, 6)
        await client.pin_weights("math evaluation", number_of(1, 6), 3_600)
        async with client.session(group_id="g", group_size=1) as session:
            session.reward = 1.0
        async with client.subscribe("trainer") as groups:
            await anext(groups)
            await client.report_step("trainer", 4, {"loss": float("inf")})
            flags = ("--router", mesh.address("router"), "--collector", mesh.address("collector"))
            done = status(*flags, "--json")
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            held = {"run": 1, "policy_version": 6}
            (model,) = found["models"].values()
            (engine,) = [one for one in found["members"] if one["kind"] == "engine"]
            assert held.items() <= model.items()
            assert held.items() <= engine.items()
            assert [one["holder"] for one in model["pins"]] == ["math evaluation"]
            assert {one["kind"] for one in found["members"]} == {"engine", "gateway"}
            assert (found["store"]["sessions"], found["store"]["complete_groups"]) == (1, 1)
            assert found["store"]["consumers"][0]["name"] == "trainer"
            lines = status(*flags).stdout.splitlines()
    assert "model policy  run 1, version 6" in lines
    pinned = "  pinned by math evaluation: run 1, version 6, for up to "
    assert any(line.startswith(pinned) for line in lines)
    assert any(line.startswith("engine ") and "leases 0" in line for line in lines)
    assert any(line.startswith("consumer trainer") and "step 4" in line for line in lines)
    assert any(line.startswith("  alarm not_finite: step 4 has values") for line in lines)


async def test_a_locked_mesh_answers_the_token_of_the_flag(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    locks = Locks(tmp_path / "locks")
    async with scripted_mesh(tmp_path, tokenizer_dir, locks=locks) as mesh:
        flags = ("--router", mesh.address("router"), "--collector", mesh.address("collector"))
        assert status(*flags).returncode == 1
        done = status(*flags, f"--token-file={locks.token_file('operator')}")
    assert (done.returncode, "engine" in done.stdout) == (0, True), done.stderr


def test_a_router_that_does_not_answer_is_named() -> None:
    done = status("--router", "127.0.0.1:9")
    assert (done.returncode, "127.0.0.1:9" in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
