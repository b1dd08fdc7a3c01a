"""What Harbor and its viewer read of a trial into which sampled tokens were written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import SessionResult
from tests.harbor.serving import PYTHON
from tests.processes import run_to_end

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


async def check_written(
    session: SessionResult, folder: Path, name: str
) -> tuple[list[Any], dict[str, Any]]:
    """Asserts that Harbor reads the tokens of a session of one trajectory in its trial.

    Returns what its viewer shows (the result, the trajectory, the files), and our document.
    """
    output, _ = await run_to_end(
        *(PYTHON, "-c", _READ, folder, name), cwd=folder, env=None, limit_s=60
    )
    detail, document, shown = json.loads(output.splitlines()[-1])
    (trajectory,) = session.trajectories
    sampled = [one for one in trajectory.segments if one.sampled]
    ids = trajectory.token_ids.tolist()
    assert detail["prompt_token_ids"] == [ids[: one.start] for one in sampled]
    assert detail["completion_token_ids"] == [ids[one.start : one.end] for one in sampled]
    assert np.concatenate(detail["logprobs"]).tolist() == pytest.approx(
        trajectory.logprobs[trajectory.loss_mask].tolist()
    )
    assert detail["extra"]["trained"] == [True] * session.turns
    steps = [one for one in document["steps"] if one["metrics"]]
    assert [one["metrics"]["completion_token_ids"] for one in steps] == detail[
        "completion_token_ids"
    ]
    assert [one["llm_call_count"] for one in steps] == [1] * session.turns
    assert all("42" in one["message"] for one in steps)
    assert shown[0]["agent_result"]["rollout_details"] == [detail]
    return shown, document
