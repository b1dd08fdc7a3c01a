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
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        """The folder. It has a lock file, which is held as long as the process lives."""
        self._lock = (self.path / _LOCK).open("wb")
        _take(self._lock)

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        """Returns the folder."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Removes the folder."""
        self.close()


def _take(lock: IO[bytes]) -> None:
    """Takes a lock that a process holds until it ends.

    Raises:
        BlockingIOError: Another process holds it.
    """
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
