"""Disks that can be full: small file systems in memory."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOUNT = ("mount", "-t", "tmpfs", "-o")
_UMOUNT = ("umount", "--lazy")


class Disk:
    """A mounted file system of its own."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder where it is mounted."""
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leaves no room."""
        with self._filler.open("wb") as filler, suppress(OSError):
            while room := os.statvfs(filler.fileno()).f_bavail:
                size = os.fstat(filler.fileno()).st_size
                os.posix_fallocate(filler.fileno(), size, room * os.sysconf("SC_PAGE_SIZE"))

    def free(self) -> None:
        """Gives the room back."""
        self._filler.unlink()


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Disk | None]:
    """Mounts a disk of this size at a folder until the block ends. Yields None if it may not."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={megabytes}m,mode=1777"
    command = (*_MOUNT, options, "rollmesh-chaos", str(folder))
    with suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            try:
                yield Disk(folder)
            finally:
                subprocess.run((*_UMOUNT, str(folder)), check=True)
            return
    yield None
