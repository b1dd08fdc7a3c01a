"""Harbor's Docker environment: agents in containers train through the relay."""

from pathlib import Path

import pytest

from rollmesh.integrations.harbor import HarborRunner
from tests.harbor.connecting import ASKED, RULES, trained
from tests.harbor.serving import KEY, harbor_server, make_task
from tests.harbor.test_runner import rolled
from tests.meshes import scripted_mesh
from tests.processes import run_to_end

IMAGE = "python:3.11-slim-bookworm"
BRIDGE = "172.17.0.1"
"""The address that containers have for the host."""
pytestmark = [
    pytest.mark.docker,
    pytest.mark.usefixtures("docker_is_there"),
]
_PROGRAM = """\
import json, os, urllib.request
messages = []
for _ in range(3):
    messages.append({"role": "user", "content": "ASKED"})
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
"""


async def test_an_agent_in_a_container_trains_through_the_relay_and_leaves_none(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    task = tmp_path / "task"
    make_task(task, ASKED)
    (task / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /app\n")
    test = task / "tests" / "test.sh"
    test.write_text(test.read_text().replace("$ROOT", ""))
    program = _PROGRAM.replace("ASKED", ASKED)
    async with (
        scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh,
        harbor_server(tmp_path / "harbor", host=BRIDGE) as harbor,
        mesh.client() as client,
    ):
        runner = HarborRunner(
            harbor.url,
            KEY,
            agent={
                "import_path": "agents:Program",
                "model_api_format": "openai_chat_completions",
                "kwargs": {"command": ["python3", "-c", program], "env": {}},
            },
            environment={"type": "docker", "delete": True},
        )
        await rolled(client, [str(task)], runner=runner, n=2)
        sessions = await trained(client, 2)
    assert [(one.outcome, one.reward, one.turns) for one in sessions] == [
        ("COMPLETED", 0.75, 3)
    ] * 2
    assert [one.reasons for session in sessions for one in session.trajectories] == [("EXACT",)] * 2
    left, _ = await run_to_end(
        *("docker", "ps", "-aq", "--filter", "name=task__"), cwd=tmp_path, env=None, limit_s=60
    )
    assert not left
