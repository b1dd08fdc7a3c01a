"""The examples as programs, for fewer steps than they are made for: the reward rises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.processes import run_to_end

_STEPS = 10  # of 30
_RISE = 0.1
PROGRAM_S = 1500.0
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
"""Torch's threads sleep while they wait, and leave the cores to the tests beside."""
pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(PROGRAM_S + 60)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that both begin with. It takes minutes."""
    path = tmp_path_factory.mktemp("first") / "policy"
    program = (
        "import sys, pathlib; from examples.demo.policy import make_policy; "
        "make_policy(pathlib.Path(sys.argv[1]), seed=0)"
    )
    subprocess.run(
        [sys.executable, "-c", program, path],
        cwd=ROOT,
        env=ENVIRONMENT,
        check=True,
        timeout=PROGRAM_S,
    )
    return path


async def _run(example: str, folder: Path, policy: Path) -> tuple[dict[str, float], str]:
    """Runs an example. Returns its result and its output."""
    command: list[str | Path] = ["-m", f"examples.{example}", "--steps", str(_STEPS)]
    command += ["--folder", folder, "--policy", policy]
    output, said = await run_to_end(
        sys.executable, *command, cwd=ROOT, env=ENVIRONMENT, limit_s=PROGRAM_S
    )
    return json.loads(output.splitlines()[-1]), said


def _learned(result: dict[str, float]) -> bool:
    return result["reward_last"] > result["reward_first"] + _RISE


async def test_grpo_without_waiting_learns_and_shows_how_old_its_tokens_were(
    tmp_path: Path, policy: Path
) -> None:
    result, said = await _run("grpo_async", tmp_path / "run", policy)
    assert _learned(result), said
    assert (result["drift_tokens"], result["lost"], result["duplicated"]) == (0, 0, 0)
    assert 1 <= result["lag_max"] <= 3
    assert "lag 1 " in said


async def test_trl_learns_through_the_mesh(tmp_path: Path, policy: Path) -> None:
    result, said = await _run("trl_grpo", tmp_path / "run", policy)
    assert _learned(result), said
    assert result["drift_tokens"] == 0
    assert result["logprob_mean_abs_diff"] < 1e-4


async def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    """Both models are made for it, by fewer supervised steps than the example takes."""
    command = ["-m", "examples.distill", "--steps", "5", "--supervised", "150"]
    output, said = await run_to_end(
        sys.executable,
        *command,
        "--folder",
        tmp_path / "run",
        cwd=ROOT,
        env=ENVIRONMENT,
        limit_s=PROGRAM_S,
    )
    result = json.loads(output.splitlines()[-1])
    assert result["loss_last"] < 0.9 * result["loss_first"], said
    assert (result["drift_tokens"], result["lost"], result["duplicated"]) == (0, 0, 0)
