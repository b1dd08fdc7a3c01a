"""Trials of Harbor without a server."""

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollmesh.integrations.harbor import HarborTrialRunner, write_details
from tests.harbor.connecting import ASKED, RULES, trained
from tests.harbor.serving import PYTHON, make_task, server_side
from tests.harbor.test_runner import FOLDERS, rolled
from tests.meshes import scripted_mesh
from tests.processes import run_to_end
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def sandboxes(tmp_path: Path) -> Path:
    """The folder of the sandboxes."""
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    return folder


def settings_of(folder: Path, **kwargs: Any) -> dict[str, Any]:
    agent = {
        "import_path": "agents:Asking",
        "model_api_format": "openai_chat_completions",
        "kwargs": kwargs,
    }
    return {
        "python": str(PYTHON),
        "folder": str(folder / "trials"),
        "agent": agent,
        "environment": FOLDERS,
        "env": server_side(folder / "sandboxes"),
    }


async def test_trials_without_a_server_are_a_group_with_the_verifiers_rewards(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path
) -> None:
    runner = HarborTrialRunner(**settings_of(tmp_path, turns=2))
    task = make_task(tmp_path / "tasks" / "one", ASKED)
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            (group,) = await rolled(client, [task], runner=runner, n=2)
            sessions = await trained(client, 2)
    assert [(one.outcome, one.reward) for one in group.sessions] == [("COMPLETED", 0.75)] * 2
    for session in sessions:
        assert session.turns == 2
        assert session.metadata["harbor_reward.speed"] == "2"
        config = (tmp_path / "trials" / session.session_id / "config.json").read_text()
        assert session.session_id in config
    assert not list(sandboxes.glob("harbor-*"))


_READ = """
import json, sys
from pathlib import Path
from fastapi.testclient import TestClient
from harbor.models.trajectories.trajectory import Trajectory
from harbor.models.trial.result import TrialResult
from harbor.viewer import create_app

folder = Path(sys.argv[1])
result = TrialResult.model_validate_json((folder / "result.json").read_text())
document = Trajectory.model_validate_json((folder / "agent" / sys.argv[2]).read_text())
(detail,) = result.agent_result.rollout_details
viewer = TestClient(create_app(folder.parent.parent))
route = f"/api/jobs/{folder.parent.name}/trials/{folder.name}"
shown = [viewer.get(route + one).json() for one in ("", "/trajectory", "/files")]
print(json.dumps([detail, document.model_dump(mode="json"), shown]))
"""


@pytest.mark.parametrize("is_written_by_agent", [True, False])
async def test_harbor_and_its_viewer_read_back_the_sampled_tokens(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path, *, is_written_by_agent: bool
) -> None:
    runner = HarborTrialRunner(**settings_of(tmp_path, turns=2))
    task = make_task(tmp_path / "tasks" / "one", ASKED)
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            await rolled(client, [task], runner=runner, n=1)
            (session,) = await trained(client, 1)
    folder = tmp_path / "trials" / session.session_id
    name = "trajectory.json"
    if is_written_by_agent:
        (folder / "agent" / name).write_text("{}")
        name = "trajectory.sampled.json"
    write_details(
        session, folder, Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).decode
    )
    output, _ = await run_to_end(
        *(PYTHON, "-c", _READ, folder, name), cwd=tmp_path, env=None, limit_s=60
    )
    detail, document, (result, shown, files) = json.loads(output.splitlines()[-1])
    (trajectory,) = session.trajectories
    sampled = [one for one in trajectory.segments if one.sampled]
    ids = trajectory.token_ids.tolist()
    assert detail["prompt_token_ids"] == [ids[: one.start] for one in sampled]
    assert detail["completion_token_ids"] == [ids[one.start : one.end] for one in sampled]
    assert np.concatenate(detail["logprobs"]).tolist() == pytest.approx(
        trajectory.logprobs[trajectory.loss_mask].tolist()
    )
    assert detail["extra"]["trained"] == [True] * 2
    steps = [one for one in document["steps"] if one["metrics"]]
    assert [one["metrics"]["completion_token_ids"] for one in steps] == detail[
        "completion_token_ids"
    ]
    assert [one["llm_call_count"] for one in steps] == [1, 1]
    assert all("42" in one["message"] for one in steps)
    assert document["extra"]["rollmesh"]["reward"] == 0.75
    assert result["agent_result"]["rollout_details"] == [detail]
    written = json.loads((folder / "agent" / "trajectory.json").read_text())
    assert shown == written  # the agent's own, if there is one
    assert f"agent/{name}" in [one["path"] for one in files]
    assert not list(folder.rglob("*.part"))


async def test_a_trial_that_cannot_begin_fails_with_the_end_of_its_log(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path
) -> None:
    runner = HarborTrialRunner(**settings_of(tmp_path))
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            (group,) = await rolled(client, ["/there/is/none"], runner=runner, n=1)
    (seat,) = group.sessions
    assert (seat.outcome, seat.error_type) == ("LOST", "HarborRolloutError")
    assert "/there/is/none" in seat.error


_TRAINER = """
import asyncio, json, sys
from rollmesh.client import Client, MeshAddresses, rollout
from rollmesh.integrations.harbor import HarborTrialRunner

async def main(addresses, samples, runner):
    async with Client(MeshAddresses(**addresses)) as client:
        await rollout(client, samples, runner=HarborTrialRunner(**runner), n=2, timeout_s=LIMIT)

asyncio.run(main(*json.load(sys.stdin)))
"""


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_trial_whose_trainer_dies_or_whose_time_is_over_ends_its_sandbox(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path, *, is_killed: bool
) -> None:
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES, tokens_per_second=5) as mesh:
        program = _TRAINER.replace("LIMIT", "600" if is_killed else "20")
        trainer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdin=asyncio.subprocess.PIPE
        )
        assert trainer.stdin is not None
        task = make_task(tmp_path / "tasks" / "one", ASKED)
        given = [asdict(mesh.addresses), [task], settings_of(tmp_path, turns=1000)]
        trainer.stdin.write(json.dumps(given).encode())
        trainer.stdin.close()
        await until(lambda: len(list(sandboxes.glob("harbor-*"))) == 2)
        if is_killed:
            trainer.kill()
        await trainer.wait()
        await until(lambda: not list(sandboxes.glob("harbor-*")))
        results = await until(lambda: _results(tmp_path / "trials", 2))
    assert [one["exception_info"]["exception_type"] for one in results] == ["CancelledError"] * 2


def _results(trials: Path, count: int) -> list[dict[str, Any]]:
    """Returns the results that are whole: Harbor writes them in place."""
    found = []
    for one in trials.glob("*/result.json"):
        with suppress(ValueError):
            found.append(json.loads(one.read_text()))
    return found if len(found) == count else []
