"""Files for the arrays of large calls, one per call, next to the database.

SQLite writes data twice, to its log and to the database; arrays of megabytes are written only once
here. Files are fsynced before a row references them and deleted after the last reference, so an
unreferenced file was left by a process that died in between.
"""

import errno
import itertools
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from rollmesh.runtime.errors import StoreError, StoreFullError
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_RETRY_MS = 1000
_MAX_DIGITS = 18
Pieces: TypeAlias = Sequence[bytes]


class Place(NamedTuple):
    """Location of a session's arrays."""

    file: int
    at: int
    """Offset of the first byte."""
    size: int
    """Length, bytes."""


class ArraysLostError(Exception):
    """The arrays of a session are missing from their file."""


def _is_ours(path: Path) -> bool:
    """Returns whether a file is named like those of `ArrayFiles`."""
    name = path.name
    number = len(name) <= _MAX_DIGITS and name.isascii() and name.isdigit()
    return number and name == str(int(name)) and path.is_file() and not path.is_symlink()


class ArrayFiles:
    """The array files of one directory, by number."""

    def __init__(self, folder: Path) -> None:
        """Takes the directory; call `keep` before anything else."""
        self._folder = folder
        self._numbers = itertools.count(1)

    def keep(self, files: Collection[int]) -> None:
        """Creates the directory if it is missing, and deletes unreferenced files from it.

        Raises:
            StoreError: The directory cannot be written.
        """
        with self._typed():
            self._folder.mkdir(exist_ok=True)
            found = {path.name for path in self._folder.iterdir() if _is_ours(path)}
            foreign = sorted(path.name for path in self._folder.iterdir() if not _is_ours(path))
        if foreign:
            _log.warning(
                "the arrays' directory holds other files, which stay",
                extra=fields(folder=self._folder, count=len(foreign), first=foreign[:3]),
            )
        self.remove({int(name) for name in found} - set(files))
        self._numbers = itertools.count(max(files, default=0) + 1)

    def write(self, sessions: Sequence[Pieces]) -> list[Place]:
        """Writes the arrays of sessions to a new file and fsyncs it.

        Raises:
            StoreFullError: The disk is full.
            StoreError: The file could not be written.
        """
        sizes = [sum(map(len, pieces)) for pieces in sessions]
        with self._typed():
            file, target = self._open_next()
        try:
            with self._typed():
                with target:
                    target.writelines(itertools.chain.from_iterable(sessions))
                    target.flush()
                    os.fdatasync(target.fileno())
                self._sync_names()
        except (StoreFullError, StoreError):
            self.remove([file])
            raise
        begins = itertools.accumulate(sizes, initial=0)
        return [Place(file, at, size) for at, size in zip(begins, sizes, strict=False)]

    def _open_next(self) -> tuple[int, BinaryIO]:
        """Creates the next file, skipping numbers that are already taken in the directory."""
        while True:
            file = next(self._numbers)
            with suppress(FileExistsError):
                return file, self._path(file).open("xb")

    def read(self, place: Place) -> bytes:
        """Returns the arrays of a session.

        Raises:
            ArraysLostError: The arrays are missing.
            StoreError: The arrays cannot be read now, or the directory is missing.
        """
        path = self._path(place.file)
        with self._typed():
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError as error:
                self._folder.stat()  # if it is missing, a disk is not mounted
                raise ArraysLostError(f"{path}: is gone") from error
            try:
                data = os.pread(descriptor, place.size, place.at)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise ArraysLostError(f"{path}: {error}") from error
            finally:
                os.close(descriptor)
        if len(data) != place.size:
            raise ArraysLostError(f"{path}: is cut")
        return data

    def remove(self, files: Collection[int]) -> None:
        """Deletes unreferenced files; a file that is already gone is ignored.

        Raises:
            StoreError: The directory cannot be written.
        """
        with self._typed():
            for file in files:
                self._path(file).unlink(missing_ok=True)

    def _path(self, file: int) -> Path:
        return self._folder / str(file)

    def _sync_names(self) -> None:
        """Fsyncs the directory; without that a new file may have no name after a crash."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(
                    f"the disk is full: {error}", retry_delay_ms=_RETRY_MS
                ) from error
            raise StoreError(f"the store failed: {error}") from error
