"""Runs the demo's sessions as jobs of a Harbor server, and cuts the connections to it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from examples.demo.audit import Audit
from examples.demo.run import Plan
from examples.demo.tasks import Task
from rollmesh.client import AgentRunner, Session
from rollmesh.integrations.harbor import HarborRunner
from tests.faults.proxy import Proxy, proxy_to
from tests.processes import reserved_port

ROOT = Path(__file__).parents[3]
HARBOR = ROOT / ".venv-harbor" / "bin" / "harbor"
CUTS = 10
_KEY = "a-key-of-the-demo"
_START_S = 120.0
_TASK = "[agent]\ntimeout_sec = 900\n[verifier]\ntimeout_sec = 300\n"
_TEST = """\
#!/bin/bash
cd "{root}"
"{python}" -S -m examples.demo.harbor.verifier {question} \\
  < "$ROOT/app/attempt.json" > "$ROOT/logs/verifier/reward.json"
"""


class OnHarbor:
    """Has a Harbor server run the agents of a training loop."""

    def __init__(self, folder: Path) -> None:
        """Starts nothing yet. The folder is for the server's data, the tasks and the sandboxes."""
        self._folder = folder
        self.cuts = 0
        """Number of times that all connections to the server were cut under running sessions."""
        self.repeated = 0
        """Requests that agents sent again."""

    @asynccontextmanager
    async def __call__(self, plan: Plan, audit: Audit) -> AsyncIterator[AgentRunner]:
        """Runs the server and a proxy in front of it. The audit gets the answers in the end."""
        async with (
            _server(self._folder) as address,
            proxy_to(address) as proxy,
        ):
            runner = HarborRunner(
                f"http://{proxy.address}",
                _KEY,
                agent={
                    "import_path": "examples.demo.harbor.agents:Calculating",
                    "model_api_format": "openai_chat_completions",
                },
                environment={
                    "import_path": "examples.demo.harbor.folders:FolderEnvironment",
                    "delete": True,
                },
            )
            yield self._cutting(runner, plan, proxy)
        for left in (self._folder / "data").glob("**/attempt.json"):
            attempt = json.loads(left.read_text())
            audit.answered.update(attempt["answer_ids"])
            self.repeated += attempt["repeated"]

    def _cutting(self, runner: HarborRunner, plan: Plan, proxy: Proxy) -> AgentRunner:
        """Returns a runner that cuts the connections whenever so many more sessions have ended."""
        every = plan.steps * plan.groups * plan.samples // (CUTS + 1)
        running = ended = 0

        async def run(task: Task, session: Session) -> dict[str, float]:
            nonlocal running, ended
            running += 1
            try:
                return await runner(str(self._task(task)), session)
            finally:
                running -= 1
                ended += 1
                if running and self.cuts < min(CUTS, ended // every):
                    self.cuts += 1
                    with proxy.cut():
                        pass

        return run

    def _task(self, task: Task) -> Path:
        """Returns the folder of a task of Harbor, which is made at its first use."""
        question = f"{task.a} {task.operation} {task.b}"
        folder = self._folder / "tasks" / question.replace(" ", "-")
        if not folder.exists():
            for part in ("environment", "tests"):
                (folder / part).mkdir(parents=True)
            (folder / "task.toml").write_text(f'schema_version = "1.0"\n{_TASK}')
            (folder / "instruction.md").write_text(task.question)
            (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
            test = folder / "tests" / "test.sh"
            test.write_text(_TEST.format(root=ROOT, python=sys.executable, question=question))
            test.chmod(0o755)
        return folder


@asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[str]:
    """Runs `harbor serve` with its relay. Yields its host:port."""
    (folder / "sandboxes").mkdir(parents=True)
    environ = {
        "HARBOR_API_KEY": _KEY,
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TMPDIR": str(folder / "sandboxes"),
        "PYTHONPATH": str(ROOT),
    }
    with reserved_port() as holder, (folder / "harbor.log").open("wb") as log:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(str(HARBOR), "serve", "--port", address.rpartition(":")[2]),
            *("--relay-url", f"http://{address}", "--data-dir", str(folder / "data")),
            env=os.environ | environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_S):
                await _answers(address, process)
            yield address
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _answers(address: str, process: asyncio.subprocess.Process) -> None:
    """Waits until the server answers."""
    headers = {"Authorization": f"Bearer {_KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        while process.returncode is None:
            with suppress(aiohttp.ClientError):
                async with http.get(f"http://{address}/jobs") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError("harbor serve has ended; see its harbor.log")
