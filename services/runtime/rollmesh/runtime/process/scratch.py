"""Temporary folders of which a killed process leaves none for long: the next one removes them."""

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_LOCK = "lock"


class Scratch:
    """A temporary folder. The context manager removes it, and `close` does."""

    def __init__(self, kind: str) -> None:
        """Creates a folder, and removes those of its kind whose processes were killed.

        Args:
            kind: Begins the name of the folder.

        Raises:
            OSError: The folder cannot be created.
        """
        prefix = f"rollmesh-{kind}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError), (left / _LOCK).open("rb") as lock:  # it may be in use
                _take(lock)
                shutil.rmtree(left, ignore_errors=True)
        self.path, self._lock = _locked(prefix)
        """The folder. It has a lock file, which is held as long as the process lives."""

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(prefix: str) -> tuple[Path, IO[bytes]]:
    """Creates a folder, and takes its lock before another process takes it for a left one."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        lock = (path / _LOCK).open("wb")
        with suppress(BlockingIOError):
            _take(lock)
            if (path / _LOCK).exists():
                return path, lock
        lock.close()  # the other process removes the folder


def _take(lock: IO[bytes]) -> None:
    """Takes a lock that a process holds until it ends.

    Raises:
        BlockingIOError: Another process holds it.
    """
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
