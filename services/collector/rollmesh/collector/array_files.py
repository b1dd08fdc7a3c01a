"""The arrays of large calls: each call's in a file of its own, beside the database.

SQLite writes what it stores into its log and again into its file; megabytes are written once here.
A file is on disk before a row names it, and goes after the last row that named it: what no row
names was left by a process that died in between.
"""

import errno
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rollmesh.runtime.errors import StoreError, StoreFullError

_RETRY_MS = 1000
Pieces: TypeAlias = Sequence[bytes | memoryview]


class Place(NamedTuple):
    """Where the arrays of a session are."""

    file: int
    at: int
    """First byte."""
    size: int
    """Bytes."""


class ArrayFiles:
    """The files of one folder, by number."""

    def __init__(self, folder: Path) -> None:
        """Names the folder; `keep` begins."""
        self._folder = folder
        self._numbers = itertools.count(1)

    def keep(self, files: Collection[int]) -> None:
        """Makes the folder where it is missing, and removes from it what no row names.

        Raises:
            StoreError: The folder cannot be written.
        """
        with self._typed():
            self._folder.mkdir(exist_ok=True)
            found = {int(path.name) for path in self._folder.iterdir()}
        self.remove(found - set(files))
        self._numbers = itertools.count(max(files, default=0) + 1)

    def write(self, sessions: Sequence[Pieces]) -> list[Place]:
        """Writes the arrays of sessions into a new file; returns once they are on disk.

        Raises:
            StoreFullError: The disk is full.
            StoreError: The file could not be written.
        """
        file = next(self._numbers)
        sizes = [sum(map(len, pieces)) for pieces in sessions]
        try:
            with self._typed():
                with self._path(file).open("xb") as target:
                    target.writelines(itertools.chain.from_iterable(sessions))
                    target.flush()
                    os.fdatasync(target.fileno())
                self._sync_names()
        except (StoreFullError, StoreError):
            self.remove([file])
            raise
        begins = itertools.accumulate(sizes, initial=0)
        return [Place(file, at, size) for at, size in zip(begins, sizes, strict=False)]

    def read(self, place: Place) -> bytes:
        """Returns the arrays of a session.

        Raises:
            StoreError: They are not there.
        """
        with self._typed():
            descriptor = os.open(self._path(place.file), os.O_RDONLY)
            try:
                data = os.pread(descriptor, place.size, place.at)
            finally:
                os.close(descriptor)
        if len(data) != place.size:
            raise StoreError(f"{self._path(place.file)}: is cut; restore it from a copy")
        return data

    def remove(self, files: Collection[int]) -> None:
        """Removes files that no row names; one that is gone is ignored.

        Raises:
            StoreError: The folder cannot be written.
        """
        with self._typed():
            for file in files:
                self._path(file).unlink(missing_ok=True)

    def _path(self, file: int) -> Path:
        return self._folder / str(file)

    def _sync_names(self) -> None:
        """Waits until the folder itself is on disk: without it a file has no name."""
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
