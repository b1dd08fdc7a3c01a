"""Temporary folders of processes that are killed."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from rollmesh.runtime.process import Scratch
from tests.paths import ROOT

HOLDER = """
import signal, sys
from rollmesh.runtime.process.scratch import Scratch
held = Scratch("test")
print(held.path, flush=True)
signal.pause()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def holder(temporary: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process with a folder, in which a file is."""
    paths = os.pathsep.join(str(ROOT / one) for one in ("services/runtime", "protos/gen"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": paths},
    ) as process:
        try:
            assert process.stdout is not None
            folder = Path(process.stdout.readline().strip())
            (folder / "file").write_bytes(b"weights")
            yield process, folder
        finally:
            process.kill()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(temporary: Path) -> None:
    with holder(temporary) as (process, left):
        with Scratch("test") as own:
            assert (left / "file").exists()  # its process lives
        assert not own.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert (left / "file").exists()
        with Scratch("other"):
            assert left.exists()
        with Scratch("test") as own:
            assert not left.exists()
            assert own.is_dir()
    assert list(temporary.iterdir()) == []


def test_a_folder_without_a_lock_is_left_alone(temporary: Path) -> None:
    """Another process may have created it just now."""
    fresh = temporary / "rollmesh-test-fresh"
    fresh.mkdir()
    with Scratch("test"):
        assert fresh.is_dir()


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_folder_that_is_taken_for_a_left_one_is_created_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """Another process looks when the folder is there and its lock is not held yet."""
    flock, others = fcntl.flock, ExitStack()
    taken: list[Path] = []

    def late(file: IO[bytes], how: int) -> None:
        if not taken:
            taken.append(Path(file.name).parent)
            lock = os.open(file.name, os.O_RDONLY)
            others.callback(os.close, lock)
            flock(lock, how)
            if is_removed:
                shutil.rmtree(taken[0])
                others.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with others, Scratch("test") as folder:
        assert folder.is_dir()
        assert folder not in taken
        others.close()
        with Scratch("test"):
            assert folder.is_dir()
    assert list(temporary.iterdir()) == []


def test_folders_of_one_process_are_apart(temporary: Path) -> None:
    with Scratch("test") as one, Scratch("test") as other:
        assert one != other
        assert one.is_dir()
