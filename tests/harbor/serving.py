"""The real Harbor server, with its inference relay, in the environment that `make` sets up."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.paths import ROOT
from tests.processes import reserved_port
from tests.waiting import until

KEY = "a-key-of-the-tests"
PYTHON = ROOT / ".venv-harbor" / "bin" / "python"
_HARBOR = PYTHON.with_name("harbor")
_TEST = """\
#!/bin/bash
[ -s "$ROOT/app/done.txt" ] && reward=0.75 || reward=0
echo "{\\"reward\\": $reward, \\"speed\\": 2}" > "$ROOT/logs/verifier/reward.json"
"""


def server_side(sandboxes: Path) -> dict[str, str]:
    """Returns the environment in which Harbor has the agents and the sandboxes of the tests.

    Skips the test where Harbor is not set up: it needs Python 3.12.
    """
    if not _HARBOR.exists():
        pytest.skip("Harbor is not set up: it needs Python 3.12 or newer (HARBOR_PYTHON)")
    return {
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TMPDIR": str(sandboxes),
        "PYTHONPATH": str(Path(__file__).parent / "server_side"),
    }


def make_task(folder: Path, instruction: str) -> dict[str, str]:
    """Makes a task of which an agent is asked the instruction."""
    for part in ("environment", "tests"):
        (folder / part).mkdir(parents=True)
    limits = "[agent]\ntimeout_sec = 300\n[verifier]\ntimeout_sec = 60\n"
    (folder / "task.toml").write_text(f'schema_version = "1.0"\n{limits}')
    (folder / "instruction.md").write_text(instruction)
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text(_TEST)
    (folder / "tests" / "test.sh").chmod(0o755)
    return {"path": str(folder)}


@dataclass
class Harbor:
    """A running server."""

    url: str
    folder: Path
    http: aiohttp.ClientSession

    def task(self, name: str, instruction: str) -> dict[str, str]:
        """Makes a task of which an agent is asked the instruction."""
        return make_task(self.folder / "tasks" / name, instruction)

    async def submit(
        self, name: str, tasks: list[dict[str, str]], attempts: int = 1, **agent: Any
    ) -> str:
        """Submits a job whose agents use the relay's session of this name. Returns its id."""
        config = {
            "n_attempts": attempts,
            "n_concurrent_trials": 16,
            "quiet": True,
            "environment": {"import_path": "folders:FolderEnvironment", "delete": True},
            "agents": [
                {
                    "import_path": "agents:Asking",
                    "model_name": "openai/policy",
                    "model_api_format": "openai_chat_completions",
                    "kwargs": agent,
                }
            ],
            "tasks": tasks,
        }
        body = {"config": config, "relay_inference": True, "session_id": name}
        async with self.http.post(f"{self.url}/jobs/submit", json=body) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["job_id"])

    async def ended(self, job_id: str) -> list[dict[str, Any]]:
        """Waits until a job has ended. Returns its rollouts."""

        async def look() -> list[dict[str, Any]]:
            sql = "SELECT id, state, error_type, name FROM rollout WHERE job_id = ?"
            async with self.http.post(f"{self.url}/query", json=[[sql, job_id]]) as response:
                (found,) = (await response.json())["results"]
            rows: list[dict[str, Any]] = found["rows"]
            ended = all(one["state"] in {"finished", "cancelled"} for one in rows)
            return rows if rows and ended else []

        return await until(look)

    async def rows(self, sql: str, *values: str) -> list[dict[str, Any]]:
        """Asks the server's database."""
        async with self.http.post(f"{self.url}/query", json=[[sql, *values]]) as response:
            found: list[dict[str, Any]] = (await response.json())["results"][0]["rows"]
            return found

    async def post(self, path: str) -> None:
        """Tells the server to do something."""
        async with self.http.post(f"{self.url}{path}", json={}) as response:
            assert response.status == 200, await response.text()

    def sandboxes(self) -> list[Path]:
        """Returns the sandboxes that exist."""
        return list((self.folder / "sandboxes").glob("harbor-*"))


@asynccontextmanager
async def harbor_server(folder: Path, *flags: str, relay: str = "") -> AsyncIterator[Harbor]:
    """Runs a server."""
    (folder / "sandboxes").mkdir(parents=True, exist_ok=True)
    environ = os.environ | server_side(folder / "sandboxes") | {"HARBOR_API_KEY": KEY}
    with reserved_port() as holder, (folder / "harbor.log").open("wb") as log:
        port = holder.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        process = await asyncio.create_subprocess_exec(
            *(str(_HARBOR), "serve", "--port", str(port), "--data-dir", str(folder / "data")),
            *("--relay-url", relay or url, *flags),
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as http:
                await until(lambda: _answers(http, url, process))
                yield Harbor(url, folder, http)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


async def _answers(
    http: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process
) -> bool:
    assert process.returncode is None
    try:
        async with http.get(f"{url}/jobs") as response:
            return bool(response.status == 200)
    except aiohttp.ClientError:
        return False


def answers_of(folder: Path) -> list[list[str]]:
    """Returns the ids of the answers that each agent got."""
    return [json.loads(one.read_text()) for one in folder.glob("data/**/answers.json")]
