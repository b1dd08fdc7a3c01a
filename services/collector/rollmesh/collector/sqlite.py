"""The store of one collector: a SQLite file, with the arrays of large calls in separate files.

SQLite writes data twice, to its log and to the database. Arrays of megabytes are written only once
here, to one file per call. Files are fsynced before a row references them and deleted after the
last reference, so an unreferenced file was left by a process that died in between.
"""

import asyncio
import errno
import itertools
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from rollmesh.collector.log import Arrival, damaged, split
from rollmesh.collector.store import (
    RETRY_MS,
    SCHEMA as TABLES,
    Retention,
    Store,
    Transaction,
    Work,
    store_id,
)
from rollmesh.runtime import Database, SqliteStatements
from rollmesh.runtime.errors import SessionDamagedError, StoreError, StoreFullError
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
_MAX_DIGITS = 18
_FILE_BYTES = "file_bytes"
_LARGE_CALL_BYTES = 1024 * 1024
"""Size of a call's arrays above which they get a file. Below it, two more fsyncs cost more."""
_PAGE_BYTES = 16_384  # a trajectory of 10,000 tokens takes 90 KB
VERSION = 8
"""Version of the tables. Incremented with a change that an older release cannot read."""
SCHEMA = (
    TABLES.format(
        key="INTEGER PRIMARY KEY AUTOINCREMENT",
        text="TEXT",
        blob="BLOB",
        by_key=" WITHOUT ROWID",
        of_sessions=", file INTEGER, at INTEGER, size INTEGER",
        of_consumers="",
        of_progress="",
    )
    + """
CREATE INDEX IF NOT EXISTS sessions_by_file ON sessions (file) WHERE file IS NOT NULL;
CREATE TABLE IF NOT EXISTS files (n INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
"""
)


class Place(NamedTuple):
    """Location of a session's arrays."""

    file: int
    at: int
    """Offset of the first byte."""
    size: int
    """Length, bytes."""


class ArrayFiles:
    """The array files of one directory, by number."""

    def __init__(self, folder: Path) -> None:
        """Takes the directory. Call `keep` before anything else."""
        self._folder = folder
        self._numbers = itertools.count(1)

    def keep(self, files: Collection[int]) -> None:
        """Creates the directory if it is missing, and deletes unreferenced files from it.

        Raises:
            StoreError: The directory cannot be written.
        """
        found: set[int] = set()
        foreign: list[str] = []
        with self._typed():
            self._folder.mkdir(exist_ok=True)
            for path in self._folder.iterdir():
                name = path.name
                is_number = len(name) <= _MAX_DIGITS and name.isascii() and name.isdigit()
                is_file = path.is_file() and not path.is_symlink()
                if is_file and is_number and name == str(int(name)):
                    found.add(int(name))
                else:
                    foreign.append(name)
        if foreign:
            _log.warning(
                "array directory holds other files, which are kept",
                extra=fields(folder=self._folder, count=len(foreign), first=sorted(foreign)[:3]),
            )
        self.remove(found - set(files))
        self._numbers = itertools.count(max(files, default=0) + 1)

    def write(self, sessions: Sequence[Sequence[bytes]]) -> list[Place]:
        """Writes the arrays of sessions to a new file and fsyncs it.

        Raises:
            StoreFullError: The disk is full.
            StoreError: The file could not be written.
        """
        sizes = [sum(map(len, pieces)) for pieces in sessions]
        with self._typed():
            while True:
                file = next(self._numbers)
                with suppress(FileExistsError):  # taken in the directory
                    target = self._path(file).open("xb")
                    break
        try:
            with self._typed():
                with target:
                    target.writelines(itertools.chain.from_iterable(sessions))
                    target.flush()
                    os.fdatasync(target.fileno())
                # Without that a new file may have no name after a crash.
                descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except (StoreFullError, StoreError):
            self.remove([file])
            raise
        begins = itertools.accumulate(sizes, initial=0)
        return [Place(file, at, size) for at, size in zip(begins, sizes, strict=False)]

    def read(self, session_id: str, place: Place) -> bytes:
        """Returns the arrays of a session.

        Raises:
            SessionDamagedError: The arrays are missing.
            StoreError: The arrays cannot be read now, or the directory is missing.
        """
        path = self._path(place.file)
        with self._typed():
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError as error:
                self._folder.stat()  # if it is missing, a disk is not mounted
                raise damaged(session_id, f"{path}: is gone") from error
            try:
                data = os.pread(descriptor, place.size, place.at)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise damaged(session_id, f"{path}: {error}") from error
            finally:
                os.close(descriptor)
        if len(data) != place.size:
            raise damaged(session_id, f"{path}: is cut")
        return data

    def remove(self, files: Collection[int]) -> None:
        """Deletes unreferenced files. A file that is already gone is ignored.

        Raises:
            StoreError: The directory cannot be written.
        """
        with self._typed():
            for file in files:
                self._path(file).unlink(missing_ok=True)

    def _path(self, file: int) -> Path:
        return self._folder / str(file)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(
                    f"the disk is full: {error}", retry_delay_ms=RETRY_MS
                ) from error
            raise StoreError(f"the store failed: {error}") from error


class SqliteStore(Store):
    """The store of the file's only writer. Reads wait for earlier jobs."""

    columns = ("file", "at", "size")

    def __init__(self, database: Database, files: ArrayFiles, retention: Retention) -> None:
        """Takes an open database with the tables of `SCHEMA`, and its array files."""
        super().__init__(retention)
        self._database = database
        self._files = files
        self._left: list[str] | None = None  # to score, by an earlier process, once they are known

    async def write(
        self, work: Work[_Arguments, _Result], *args: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Runs work in a transaction, then deletes array files that lost their last session."""

        def job(db: sqlite3.Connection) -> tuple[_Result, list[int]]:
            tx = Transaction(SqliteStatements(db), self)
            result = work(tx, *args, **named)
            files = _forget_files(tx) if tx.left else []
            tx.write_totals()
            return result, files

        result, files = await self._database.run(job)
        if files:
            await asyncio.to_thread(self._files.remove, files)
        return result

    def pack(self, arrivals: Sequence[Arrival]) -> None:
        """Splits sessions into heads and arrays. Writes the arrays to a file if they are large."""
        pieces: list[list[bytes]] = []
        for one in arrivals:
            one.head, arrays = split(one.record)
            pieces.append(arrays)
        if sum(map(len, itertools.chain.from_iterable(pieces))) >= _LARGE_CALL_BYTES:
            for one, place in zip(arrivals, self._files.write(pieces), strict=True):
                one.columns = place
            return
        for one, arrays in zip(arrivals, pieces, strict=True):
            one.arrays, one.columns = b"".join(arrays), (None, None, None)

    def forget(self, packed: Sequence[Arrival]) -> None:
        """Deletes the file of a call whose sessions were not stored."""
        self._files.remove({one.columns[0] for one in packed} - {None})

    def stored_bytes(self, tx: Transaction) -> int:
        """Returns the bytes in use. Free pages of the database are reused and do not count.

        An array file counts in full until its last session is removed.
        """
        pages: int = tx.db.value("PRAGMA page_count")
        free: int = tx.db.value("PRAGMA freelist_count")
        return (pages - free) * _PAGE_BYTES + tx.total(_FILE_BYTES)

    def stored(self, tx: Transaction, packed: Sequence[Arrival]) -> None:
        """Adds the file of a call."""
        file = packed[0].columns[0]
        if file is not None:
            size = sum([one.columns[2] for one in packed])
            tx.db.run("INSERT INTO files VALUES (?1, ?2)", file, size)
            tx.add(_FILE_BYTES, size)
            tx.left.add(file)  # all of its sessions may be repeats

    def arrays(
        self, tx: Transaction, session_ids: Sequence[str]
    ) -> dict[str, bytes | SessionDamagedError]:
        """Returns the arrays of stored sessions, or the error that they are damaged."""
        rows = tx.db.rows(
            "SELECT session_id, arrays, file, at, size FROM sessions"
            f" WHERE session_id {tx.db.within(1)}",
            [*session_ids],
        )
        found: dict[str, bytes | SessionDamagedError] = {}
        for session_id, arrays, *place in rows:
            found[session_id] = arrays
            if arrays is None:
                try:
                    found[session_id] = self._files.read(session_id, Place(*place))
                except SessionDamagedError as error:
                    found[session_id] = error
        return found

    def removing(self, tx: Transaction, keys: Sequence[str]) -> None:
        """Notes the files that hold arrays of the groups."""
        rows = tx.db.rows(
            "SELECT DISTINCT file FROM sessions WHERE file IS NOT NULL"
            f" AND group_key {tx.db.within(1)}",
            [*keys],
        )
        tx.left |= {file for (file,) in rows}

    async def to_score(self, limit: int) -> list[str]:
        """Takes the sessions that an earlier process left. The first call finds them all."""
        if self._left is None:
            sql = "SELECT session_id FROM sessions WHERE due_ms IS NOT NULL ORDER BY due_ms"
            rows = await self.write(lambda tx: tx.db.rows(sql))
            self._left = [session_id for (session_id,) in rows]
        taken, self._left = self._left[:limit], self._left[limit:]
        return taken

    async def lost(self) -> str:
        """Returns once the file is removed or replaced under this collector."""
        return await self._database.lost()


def _forget_files(tx: Transaction) -> list[int]:
    """Forgets the noted files without sessions and returns their numbers.

    They may be deleted once this transaction is on disk.
    """
    forgotten: list[int] = []
    for file in sorted(tx.left):
        gone = tx.db.rows(
            "DELETE FROM files WHERE n = ?1"
            " AND NOT EXISTS (SELECT 1 FROM sessions WHERE file = ?1) RETURNING bytes",
            file,
        )
        forgotten += [file] * len(gone)
        tx.add(_FILE_BYTES, -sum([size for (size,) in gone]))
    return forgotten


@asynccontextmanager
async def open_sqlite(folder: Path, retention: Retention) -> AsyncIterator[Store]:
    """Opens the store in a directory, which is created if it is missing.

    Raises:
        StoreError: The store cannot be opened, or was written by another version.
    """
    path, files = folder / "collector.sqlite", ArrayFiles(folder / "arrays")
    async with Database(path, SCHEMA, VERSION, _PAGE_BYTES) as database:
        await database.run(
            lambda db: files.keep([file for (file,) in db.execute("SELECT n FROM files")])
        )
        store = SqliteStore(database, files, retention)
        store.store_id = await store.write(store_id)
        yield store
