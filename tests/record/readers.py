"""Programs of an environment with readers of open formats, where nothing of ours is installed."""

import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

PYTHON = ROOT / ".venv-readers" / "bin" / "python"


def read_by(program: str, folder: Path) -> str:
    """Runs a program in a folder and returns what it prints. Skips where there are no readers."""
    if not PYTHON.exists():
        pytest.skip("there are no readers: make .venv-readers/.ready")
    done = subprocess.run(
        [PYTHON, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
