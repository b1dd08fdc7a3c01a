"""Trainers' code in processes of its own, with the environment that its packages are locked in."""

import json
import os
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.processes import run_to_end
from tests.ray_on_busy_machines import PATIENT

ENVIRONMENT = ROOT / ".venv-trainers"
_SCRIPTS = Path(__file__).parent / "scripts"
_SERVICES = ("services/engine", "services/router", "services/gateway", "services/collector")
_FOLDERS = ("protos/gen", "services/runtime", "clients", ".", *_SERVICES)
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in _FOLDERS)
_SCRIPT_S = 1500.0


async def run_script(script: str, folder: Path, /, **arguments: Any) -> Any:
    """Runs a script with one JSON argument. Returns its last line of output.

    Raises:
        AssertionError: Its packages are not installed, or it failed.
    """
    ready = (ENVIRONMENT / ".ready").exists()
    assert ready, "the trainers' packages are missing: run `make .venv-trainers/.ready`"
    return await run_with(ENVIRONMENT / "bin" / "python", script, folder, **arguments)


async def run_with(python: str | Path, script: str, folder: Path, /, **arguments: Any) -> Any:
    """Runs a script with an interpreter. See `run_script`."""
    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": SOURCES,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **PATIENT,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_USE_EXTERNAL_MODULES": "rollmesh.integrations.verl.weights",
    }
    command = (python, _SCRIPTS / f"{script}.py", json.dumps(arguments))
    output, _ = await run_to_end(*command, cwd=folder, env=settings, limit_s=_SCRIPT_S)
    return json.loads(output.splitlines()[-1])
