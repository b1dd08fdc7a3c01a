"""`make demo RESUME=1`: the demo and its mesh are killed in mid-run, and its successor ends it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.test_learning import ENVIRONMENT, PROGRAM_S
from tests.paths import ROOT
from tests.processes import run_to_end
from tests.waiting import until

_KILLED_AFTER = 12
"""Steps of 30."""
pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(2 * PROGRAM_S + 60)]


async def test_a_demo_that_was_killed_in_mid_run_ends_with_the_same_curve(tmp_path: Path) -> None:
    command = ["-m", "examples.demo", "--folder", str(tmp_path / "demo")]
    said = tmp_path / "said"
    with said.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command), cwd=ROOT, env=ENVIRONMENT,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        await until(lambda: f"step {_KILLED_AFTER}  reward" in said.read_text(), PROGRAM_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with the mesh and its engine
    await process.wait()
    saved = torch.load(tmp_path / "demo" / "checkpoint.pt", weights_only=True)["run"]
    assert len(saved["rewards"]) in {_KILLED_AFTER, _KILLED_AFTER + 1}

    told, _ = await run_to_end(
        *(sys.executable, *command, "--resume"), cwd=ROOT, env=ENVIRONMENT, limit_s=PROGRAM_S
    )
    result = json.loads(told.splitlines()[-1])
    assert (result["drift_tokens"], result["lost"], result["duplicated"]) == (0, 0, 0)
    assert result["steps"] == 30
    ended = torch.load(tmp_path / "demo" / "checkpoint.pt", weights_only=True)["run"]["rewards"]
    assert ended[: len(saved["rewards"])] == saved["rewards"]
