"""The real Harbor server, with its inference relay, in the environment that `make` sets up."""

import asyncio
import atexit
import json
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
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
_START_S = 240.0
_ROLLOUTS_S = 420.0  # Harbor ends agents and verifiers before
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
        "PYTHONPATH": f"{Path(__file__).parent / 'server_side'}:{ROOT}",
    }


@cache
def _forking() -> str:
    """Starts the process that servers are forked from. Returns its address."""
    script, name = Path(__file__).parent / "server_side" / "forking.py", f"harbor-{uuid.uuid4()}"
    process = subprocess.Popen(
        [PYTHON, script, name],
        env=os.environ | server_side(ROOT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def end(ends: subprocess.Popen[bytes] = process) -> None:
        ends.communicate()  # its standard input ends

    atexit.register(end)
    assert process.stdout.readline() == b"READY\n"
    return f"\0{name}"


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
    command: list[str]
    programs: str = ""
    """Folders of programs for sandboxes, in front of those of PATH."""
    pid: int = 0
    life: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    """It ends with the server's process."""

    async def start(self) -> None:
        """Starts the server, and waits until it answers."""
        environ = os.environ | server_side(self.folder / "sandboxes")
        environ |= {
            "HARBOR_API_KEY": KEY,
            "PATH": f"{self.programs}:{os.environ['PATH']}".removeprefix(":"),
        }
        asked = {"command": self.command, "environ": environ}
        asked["log"] = str(self.folder / "harbor.log")
        async with asyncio.timeout(_START_S):
            self.life = await asyncio.open_unix_connection(await asyncio.to_thread(_forking))
            reader, writer = self.life
            writer.write(f"{json.dumps(asked)}\n".encode())
            self.pid = int(await reader.readline())
        await until(self._answers)

    async def _answers(self) -> bool:
        assert self.life is not None
        assert not self.life[0].at_eof(), (self.folder / "harbor.log").read_text()
        with suppress(aiohttp.ClientError):
            async with self.http.get(f"{self.url}/jobs") as response:
                return bool(response.status == 200)
        return False

    async def kill(self) -> None:
        """Sends SIGKILL to the server and its sandboxes."""
        if self.life is None:
            return
        (reader, writer), self.life = self.life, None
        if not reader.at_eof():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await reader.read()
        writer.close()

    async def post(self, path: str, body: object = None) -> None:
        """Tells the server something."""
        async with self.http.post(f"{self.url}{path}", json=body or {}) as response:
            assert response.status == 200, await response.text()

    def task(self, name: str, instruction: str) -> dict[str, str]:
        """Makes a task of which an agent is asked the instruction."""
        return make_task(self.folder / "tasks" / name, instruction)

    async def submit(
        self, name: str, tasks: list[dict[str, str]], attempts: int = 1, **agent: Any
    ) -> str:
        """Submits a job whose agents use the relay's session of this name. Returns its id."""
        return await self.submit_agents(name, tasks, [_asking(agent)], attempts)

    async def submit_agents(
        self,
        name: str,
        tasks: list[dict[str, str]],
        agents: list[dict[str, Any]],
        attempts: int = 1,
    ) -> str:
        """Submits a job of these agents."""
        config = {
            "n_attempts": attempts,
            "n_concurrent_trials": 16,
            "quiet": True,
            "environment": {
                "import_path": "examples.demo.harbor.folders:FolderEnvironment",
                "delete": True,
            },
            "agents": agents,
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

        return await until(look, _ROLLOUTS_S)

    async def rows(self, sql: str, *values: str) -> list[dict[str, Any]]:
        """Asks the server's database."""
        async with self.http.post(f"{self.url}/query", json=[[sql, *values]]) as response:
            found: list[dict[str, Any]] = (await response.json())["results"][0]["rows"]
            return found

    @property
    def data(self) -> Path:
        """The server's --data-dir."""
        return self.folder / "data"

    def sandboxes(self) -> list[Path]:
        """Returns the sandboxes that exist."""
        return list((self.folder / "sandboxes").glob("harbor-*"))


def _asking(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "import_path": "agents:Asking",
        "model_name": "openai/policy",
        "model_api_format": "openai_chat_completions",
        "kwargs": arguments,
    }


@asynccontextmanager
async def harbor_server(
    folder: Path, *flags: str, relay: str = "", programs: str = "", host: str = "127.0.0.1"
) -> AsyncIterator[Harbor]:
    """Runs a server, with folders of programs for its sandboxes in front of those of PATH."""
    (folder / "sandboxes").mkdir(parents=True, exist_ok=True)
    headers = {"Authorization": f"Bearer {KEY}"}
    with reserved_port() as holder:
        port = holder.getsockname()[1]
        url = f"http://{host}:{port}"
        command = [str(_HARBOR), "serve", "--host", host, "--port", str(port)]
        command += ["--relay-url", relay or url]
        command += ["--data-dir", str(folder / "data"), *flags]
        async with aiohttp.ClientSession(headers=headers) as http:
            harbor = Harbor(url, folder, http, command, programs)
            try:
                await harbor.start()
                yield harbor
            finally:
                await harbor.kill()


def answers_of(folder: Path) -> list[list[str]]:
    """Returns the ids of the answers that each agent got."""
    return [json.loads(one.read_text()) for one in folder.glob("data/**/answers.json")]


def statuses_of(folder: Path) -> list[dict[str, int]]:
    """Returns the number of responses that each agent got, by status. Also of broken streams."""
    return [json.loads(one.read_text()) for one in folder.glob("data/**/statuses.json")]
