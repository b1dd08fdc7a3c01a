"""SQLite with group commit, on its own thread.

Jobs that wait at the same time share one transaction and one fsync. A failed job is rolled back
alone. A failed commit fails all of its jobs, and none of them is kept. Only one process may open a
file: it holds a lock file, which the kernel releases when the process ends.
"""

import asyncio
import fcntl
import json
import logging
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing, suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, TypeAlias, TypeVar
from urllib.parse import quote

from rollmesh.runtime import owner_only
from rollmesh.runtime.errors import (
    RollmeshError,
    ShuttingDownError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreLostError,
)

# Jobs of the thread of a store, which takes all waiting jobs together.

RETRY_MS = 1000
"""Retry delay of a store that is full or away, milliseconds."""
_MAX_PENDING = 4096
_Result = TypeVar("_Result")
_Door = TypeVar("_Door")
Job: TypeAlias = tuple[Callable[[_Door], Any], Future[Any]]
"""A function of the thread's connection, and its outcome."""


class Jobs(Generic[_Door]):
    """A bounded queue of jobs. Callers add to it, one thread takes from it."""

    def __init__(self, most: int) -> None:
        """Starts empty. A batch has up to `most` jobs."""
        self._most = most
        self._queue: queue.Queue[Job[_Door] | None] = queue.Queue(_MAX_PENDING)
        self._closing = False

    def add(self, work: Callable[[_Door], _Result]) -> Future[_Result]:
        """Adds a job and returns its outcome.

        Raises:
            ShuttingDownError: The store is closed.
            StoreFullError: Too many jobs wait.
        """
        if self._closing:
            raise ShuttingDownError(
                "the store is closed because the service is stopping; try again"
            )
        future: Future[_Result] = Future()
        try:
            self._queue.put_nowait((work, future))
        except queue.Full:
            raise StoreFullError(
                "the store has too many pending writes; try again later", retry_delay_ms=RETRY_MS
            ) from None
        return future

    def refuse(self) -> None:
        """Refuses jobs from now on."""
        self._closing = True

    def end(self) -> None:
        """Ends the thread after the waiting jobs. May wait for a place in the queue."""
        self._queue.put(None)

    def next_batch(self, timeout_s: float | None = None) -> list[Job[_Door]] | None:
        """Returns the waiting jobs, an empty list after the timeout, or None at the end."""
        batch: list[Job[_Door]] = []
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return batch
        while item is not None:
            batch.append(item)
            if len(batch) == self._most or self._queue.empty():
                return batch
            item = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch or None

    def left(self) -> list[Job[_Door]]:
        """Returns the jobs that are left in the queue."""
        jobs: list[Job[_Door]] = []
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                jobs += [item] if item else []
        return jobs


# The error about a store of another release, which is not changed unless it is of the last one.


def refusal(where: str, found: int, version: int) -> str:
    """Returns why a store is refused, and the remedy."""
    writer = "an earlier" if found < version else "a later"
    return (
        f"{where} has version {found}, this release needs {version}; nothing was changed. "
        f"It was written by {writer} release: start the service of that release, which serves and "
        "delivers what it holds; or name another place for it"
    )


Work: TypeAlias = Callable[[sqlite3.Connection], _Result]
_log = logging.getLogger(__name__)
_MAX_BATCH = 256
_LOOK_S = 1.0
_PAGE_BYTES = 4096


class Database(AbstractAsyncContextManager["Database"]):
    """A SQLite file in WAL mode with full sync."""

    def __init__(
        self,
        path: Path,
        schema: str,
        version: int,
        page_bytes: int = _PAGE_BYTES,
        *,
        upgrades: Sequence[str] = (),
    ) -> None:
        """Names the file. Entering the context opens it and runs `schema`.

        Args:
            path: The file. It and its folder are created if missing.
            schema: Idempotent statements that create the tables.
            version: Version of the schema. A file of another version is refused, untouched.
            upgrades: Statements that each bring a file of one version to the next, the last one to
                this version. Older files are refused.
            page_bytes: Page size of a new file: large for large rows, small for small commits.
        """
        self.path = path
        """The file."""
        self._schema = schema
        self._version = version
        self._page_bytes = page_bytes
        self._upgrades = upgrades
        self._jobs = Jobs[sqlite3.Connection](_MAX_BATCH)
        self._thread = threading.Thread(target=self._serve, name=f"sqlite-{path.stem}")
        self._died = False
        self._opened: Future[None] = Future()
        self._lost: Future[str] = Future()
        self._files: dict[Path, tuple[int, int]] = {}
        """Device and inode of each open file."""

    async def __aenter__(self) -> "Database":
        """Opens the file, and creates it and its folder if missing.

        Raises:
            StoreInUseError: Another process has it open.
            StoreError: It cannot be opened, or has another schema version.
        """
        self._thread.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._opened))
        except asyncio.CancelledError as cancelled:
            await self.__aexit__(type(cancelled), cancelled, cancelled.__traceback__)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Runs the waiting jobs and closes the file."""
        self._jobs.refuse()  # here, so that no job is added behind the end
        await asyncio.to_thread(self._jobs.end)
        await asyncio.to_thread(self._thread.join)

    async def lost(self) -> str:
        """Waits until the file is removed or replaced and returns the reason."""
        return await asyncio.shield(asyncio.wrap_future(self._lost))

    async def run(self, work: Work[_Result]) -> _Result:
        """Runs a job in a transaction and returns once the commit is on disk.

        Raises:
            StoreLostError: The file was removed or replaced while it was open.
            StoreFullError: The disk or the queue is full.
            StoreError: The store failed for another reason.
        """
        if self._died:
            raise _dead()
        future = self._jobs.add(work)
        if self._died:  # while the job was queued
            _fail(self._jobs.left())
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        try:
            with self._lock(), closing(self._open()) as connection:
                self._prepare(connection)
                for end in ("", "-wal", ".lock"):
                    path = self.path.with_name(f"{self.path.name}{end}")
                    with suppress(FileNotFoundError):
                        found = path.stat()
                        self._files[path] = found.st_dev, found.st_ino
                self._opened.set_result(None)
                while (batch := self._jobs.next_batch(_LOOK_S)) is not None:
                    try:
                        self._run_batch(connection, batch)
                    except BaseException:  # the edge of the thread: no caller may hang
                        _log.critical("store thread failed", exc_info=True)
                        self._died = True
                        _fail([*batch, *self._jobs.left()])
                        return
        except (sqlite3.Error, OSError, StoreError) as error:
            if self._opened.done():
                raise
            # Reported after the lock is released, so that a retry can succeed at once.
            typed = error if isinstance(error, StoreError) else StoreError(f"{self.path}: {error}")
            self._opened.set_exception(typed)

    def _check_files(self) -> StoreLostError | None:
        """Returns an error if a file was removed or replaced, and None while all are in place.

        Data written to an unlinked file is lost, and without the lock file another process may
        open the path.
        """
        for path, was in self._files.items():
            try:
                found = path.stat()
            except OSError:
                break
            if (found.st_dev, found.st_ino) != was:
                break
        else:
            return None
        error = StoreLostError(
            f"{path}: was removed or replaced while open, so nothing more is stored; put the "
            "folder back, or give another data_dir, and restart"
        )
        if not self._lost.done():
            self._lost.set_result(error.message)
        return error

    def _run_batch(
        self, connection: sqlite3.Connection, batch: list[Job[sqlite3.Connection]]
    ) -> None:
        outcomes: list[tuple[Future[Any], Any, Exception | None]] = []
        try:
            if batch:
                connection.execute("BEGIN IMMEDIATE")
            for work, future in batch:
                connection.execute("SAVEPOINT work")
                result, failure = None, None
                try:
                    result = work(connection)
                except Exception as error:
                    failure = error
                    if isinstance(error, sqlite3.Error):
                        if not connection.in_transaction:
                            raise  # SQLite rolled back the whole batch, as when the disk is full
                        failure = _typed(error)
                    connection.execute("ROLLBACK TO work")
                connection.execute("RELEASE work")
                outcomes.append((future, result, failure))
            if batch:
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            outcomes = [(future, None, _typed(error)) for _, future in batch]
        lost = self._check_files()  # after the commit: acknowledged data is in the named file
        for future, result, failure in outcomes:
            if not future.set_running_or_notify_cancel():
                continue
            if lost or failure:
                future.set_exception(lost or failure)
            else:
                future.set_result(result)

    def _lock(self) -> IO[bytes]:
        """Takes the lock. Closing the returned file releases it. Children do not inherit it."""
        owner_only.make_folder(self.path.parent)
        lock = self.path.with_name(f"{self.path.name}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StoreInUseError(
                f"{self.path}: is open in another process; "
                "stop that process, or give another data_dir"
            ) from None
        return lock

    def _open(self) -> sqlite3.Connection:
        """Opens the file. One of another version is refused without a change of any byte.

        SQLite would recover a file on opening it, and empty its write-ahead log on closing it.
        """
        if self.path.exists() and self.path.stat().st_size:
            # The version is written before the first table, and before the log exists.
            unchanged = f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"
            with closing(sqlite3.connect(unchanged, uri=True)) as connection:
                (found,) = connection.execute("PRAGMA user_version").fetchone()
                (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            known = range(self._version - len(self._upgrades), self._version + 1)
            if found not in known and (found or tables):
                raise StoreError(refusal(str(self.path), found, self._version))
        for end in ("", "-wal", "-shm", ".lock"):  # SQLite gives new ones the mode of the first
            path = self.path.with_name(f"{self.path.name}{end}")
            if not end or path.exists():
                owner_only.make_file(path)
        return sqlite3.connect(self.path, isolation_level=None)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA page_size = {self._page_bytes:d}")
        connection.execute("PRAGMA secure_delete = OFF")  # else deleted rows are overwritten
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        with connection:  # both or nothing
            connection.execute("BEGIN IMMEDIATE")
            if found:
                for statement in self._upgrades[found - self._version + len(self._upgrades) :]:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {self._version:d}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.executescript(self._schema)


def _fail(batch: list[Job[sqlite3.Connection]]) -> None:
    for _, future in batch:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(_dead())


def _dead() -> StoreError:
    return StoreError("the store's thread died, see the log; restart the service")


def _typed(error: sqlite3.Error) -> RollmeshError:
    if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        return StoreFullError(f"the disk is full: {error}", retry_delay_ms=RETRY_MS)
    return StoreError(f"the store failed: {error}")


# SQL statements that are written once for SQLite and PostgreSQL.
#
# Their parameters are numbered (`?1`), which SQLite takes, and PostgreSQL after a translation.

Row: TypeAlias = tuple[Any, ...]


class Statements(ABC):
    """Runs the statements of a transaction."""

    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of the database that end the transaction."""

    @abstractmethod
    def run(self, sql: str, *parameters: Any) -> Any:
        """Runs a statement and returns its cursor.

        The error of one without rows may be raised by a later statement.
        """

    @abstractmethod
    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters."""

    @abstractmethod
    def within(self, number: int) -> str:
        """Returns SQL for "is one of": the parameter with this number is a list."""

    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        """Runs a statement and returns its rows."""
        rows: list[Row] = self.run(sql, *parameters).fetchall()
        return rows

    def changed(self, sql: str, *parameters: Any) -> int:
        """Runs a statement without rows and returns the number of rows that it changed."""
        changed: int = self.run(sql, *parameters).rowcount
        return changed

    def row(self, sql: str, *parameters: Any) -> Row | None:
        """Runs a statement and returns its only row, or None."""
        rows: list[Row] = self.run(sql, *parameters).fetchall()
        return rows[0] if rows else None

    def value(self, sql: str, *parameters: Any) -> Any:
        """Runs a statement and returns the value of its only row."""
        ((found,),) = self.run(sql, *parameters).fetchall()
        return found


_NUMBERS = tuple(map(str, range(1, 100)))
"""Names of the parameters `?1` and `?2`: sqlite3 binds a sequence to `?` alone."""
sqlite3.register_adapter(list, json.dumps)  # the list of `within`


class SqliteStatements(Statements):
    """Statements on a connection to SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def run(self, sql: str, *parameters: Any) -> Any:
        """Runs a statement and returns its cursor."""
        return self._db.execute(sql, dict(zip(_NUMBERS, parameters, strict=False)))

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters."""
        named = (dict(zip(_NUMBERS, one, strict=False)) for one in parameters)
        self._db.executemany(sql, named)

    def within(self, number: int) -> str:
        """Returns SQL for "is one of"."""
        return f"IN (SELECT value FROM json_each(?{number}))"
