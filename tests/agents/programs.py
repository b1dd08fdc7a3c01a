"""Agents that are programs: installed from npm's registry by a lock, and run on a mesh."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.agents.processes import Outside
from tests.meshes import Mesh, scripted_mesh
from tests.models import make_thinking_dir
from tests.paths import ROOT
from tests.processes import run_to_end

CONTEXT = 262_144  # their own prompts have 60,000 of this model's tokens
_LOCKS = ROOT / "tests" / "agents"


async def installed(name: str, program: str, folder: Path) -> Path:
    """Installs a program from its lock. Returns its path."""
    for file in ("package.json", "package-lock.json"):
        shutil.copy(_LOCKS / name / file, folder / file)
    command = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    try:
        await run_to_end(*command, cwd=folder, env=None, limit_s=600)
    except (AssertionError, TimeoutError) as error:
        pytest.skip(f"npm's registry does not serve it: {str(error)[:200]}")
    return folder / "node_modules" / program


async def run_program(
    command: Sequence[str | Path],
    home: Path,
    outside: Outside,
    settings: Mapping[str, str],
    limit_s: float = 300,
) -> str:
    """Runs a program in an empty home. Returns what it printed."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HTTP_PROXY": outside.address,
        "HTTPS_PROXY": outside.address,
        "NO_PROXY": "127.0.0.1",
        **settings,
    }
    output, _ = await run_to_end(*command, cwd=home, env=env, limit_s=limit_s)
    return output.strip()


def mesh_that_thinks(
    folder: Path, rules: Sequence[tuple[str, str]], context: int = CONTEXT
) -> AbstractAsyncContextManager[Mesh]:
    """A mesh whose model thinks, and whose template drops the reasoning of earlier turns."""
    return scripted_mesh(folder / "mesh", make_thinking_dir(folder / "model", context), rules)
