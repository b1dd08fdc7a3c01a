"""Where the processors of vision models run: torchvision's transforms beside a torch for CPUs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.paths import ROOT

FOLDER = ROOT / ".venv" / "vision"
_LOADER = Path(__file__).parent / "torchvision_on_cpu"


def python_path() -> list[str]:
    """Returns what must be first on the path of a process that loads a vision model."""
    assert (FOLDER / "torchvision").is_dir(), "torchvision is missing: run `make .venv/.ready`"
    return [str(_LOADER), str(FOLDER)]


@contextmanager
def torchvision() -> Iterator[None]:
    """Lets processes that are started in the block load vision models."""
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        paths = [*python_path(), *([before] if before else [])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


def environment() -> dict[str, str]:
    """Returns the environment of a trainer's process that runs with this interpreter."""
    paths = [*python_path(), str(ROOT), *(path for path in sys.path if path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
