"""Agents in processes of their own, with the environment that their packages are locked in."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from rollmesh.client import Session
from tests.paths import ROOT
from tests.processes import run_to_end

ENVIRONMENT = ROOT / ".venv-agents"
_SCRIPTS = Path(__file__).parent / "scripts"
_AGENT_S = 240.0


class Outside:
    """A proxy that answers no request and records each one: agents must stay on loopback."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[str] = []

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator[Self]:
        trap = cls()
        async with await asyncio.start_server(trap._refuse, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            trap.address = f"http://{host}:{port}"
            yield trap

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append((await reader.readline()).decode(errors="replace").strip())
        writer.close()


async def run_agent(
    script: str, session: Session, outside: Outside, folder: Path, *arguments: str
) -> Any:
    """Runs a script as an agent, with a base URL and a key. Returns its last line of output.

    Raises:
        AssertionError: Its packages are not installed, it failed, or it tried to leave the machine.
    """
    ready = (ENVIRONMENT / ".ready").exists()
    assert ready, "the agents' packages are missing: run `make .venv-agents/.ready`"
    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "HTTP_PROXY": outside.address,
        "HTTPS_PROXY": outside.address,
        "NO_PROXY": "127.0.0.1",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
    }
    python: str | Path = ENVIRONMENT / "bin" / "python"
    command = (python, "-P", _SCRIPTS / f"{script}.py", *arguments)
    output, _ = await run_to_end(*command, cwd=folder, env=settings, limit_s=_AGENT_S)
    assert outside.asked == [], f"{script} tried to leave the machine: {outside.asked}"
    return json.loads(output.splitlines()[-1])
