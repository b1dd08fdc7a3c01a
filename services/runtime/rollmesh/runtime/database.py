"""SQLite with group commit, on a thread of its own.

Jobs that wait at the same time share one transaction and one fsync. A failed job is rolled back
alone. A failed commit fails all of its jobs, and none of them is kept. Only one process may open a
file: it holds a lock file, which the kernel releases when the process ends.
"""

import asyncio
import fcntl
import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias, TypeVar
from urllib.parse import quote

from rollmesh.runtime import owner_only
from rollmesh.runtime.errors import (
    RollmeshError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreLostError,
)
from rollmesh.runtime.jobs import RETRY_MS, Job, Jobs
from rollmesh.runtime.schemas import refusal

_Result = TypeVar("_Result")
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
        rescue: str = "give another path",
    ) -> None:
        """Names the file; entering the context opens it and runs `schema`.

        Args:
            path: The file; it and its folder are created if missing.
            schema: Idempotent statements that create the tables.
            version: Version of the schema. A file of another version is refused, untouched.
            page_bytes: Page size of a new file: large for large rows, small for small commits.
            rescue: What to do with a file of another version, for its error.
        """
        self.path = path
        """The file."""
        self._schema = schema
        self._version = version
        self._page_bytes = page_bytes
        self._rescue = rescue
        self._jobs = Jobs[sqlite3.Connection](_MAX_BATCH)
        self._thread = threading.Thread(target=self._serve, name=f"sqlite-{path.stem}")
        self._died = False
        self._opened: Future[None] = Future()
        self._lost: Future[str] = Future()
        self._files: dict[Path, tuple[int, int]] = {}
        """Device and inode of each open file."""

    async def __aenter__(self) -> "Database":
        """Opens the file; creates it and its folder if missing.

        Raises:
            StoreInUseError: Another process has it open.
            StoreError: It cannot be opened, or has another schema version.
        """
        self._thread.start()
        await asyncio.wrap_future(self._opened)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Runs the waiting jobs and closes the file."""
        self._jobs.refuse()
        await asyncio.to_thread(self._jobs.end)
        await asyncio.to_thread(self._thread.join)

    async def lost(self) -> str:
        """Waits until the file is removed or replaced; returns the reason."""
        return await asyncio.shield(asyncio.wrap_future(self._lost))

    async def run(self, work: Work[_Result]) -> _Result:
        """Runs a job in a transaction; returns once the commit is on disk.

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
                found = {path: _identity(path) for path in self._paths()}
                self._files = {path: one for path, one in found.items() if any(one)}
                self._opened.set_result(None)
                while (batch := self._jobs.next_batch(_LOOK_S)) is not None:
                    try:
                        if not batch:
                            self._check_files()
                        _run_batch(connection, batch, self._check_files)
                    except BaseException:  # noqa: BLE001 - the edge of the thread: no caller may hang
                        _log.critical("the store's thread dies", exc_info=True)
                        self._died = True
                        _fail([*batch, *self._jobs.left()])
                        return
        except (sqlite3.Error, OSError, StoreError) as error:
            if self._opened.done():
                raise
            # Reported after the lock is released, so that a retry can succeed at once.
            typed = error if isinstance(error, StoreError) else StoreError(f"{self.path}: {error}")
            self._opened.set_exception(typed)

    def _paths(self) -> list[Path]:
        return [self.path.with_name(f"{self.path.name}{end}") for end in ("", "-wal", ".lock")]

    def _check_files(self) -> StoreLostError | None:
        """Returns an error if a file was removed or replaced; None while all are in place.

        Data written to an unlinked file is lost, and without the lock file another process may
        open the path.
        """
        gone = next((path for path, was in self._files.items() if _identity(path) != was), None)
        if gone is None:
            return None
        error = StoreLostError(
            f"{gone}: was removed or replaced while open, so nothing more is stored; put the "
            "folder back, or give another data_dir, and restart"
        )
        if not self._lost.done():
            self._lost.set_result(error.message)
        return error

    def _lock(self) -> IO[bytes]:
        """Takes the lock; closing the returned file releases it. Children do not inherit it."""
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
        self._check_version()
        for end in ("", "-wal", "-shm", ".lock"):  # SQLite gives new ones the mode of the first
            path = self.path.with_name(f"{self.path.name}{end}")
            if not end or path.exists():
                owner_only.make_file(path)
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_version(self) -> None:
        """Refuses a file of another version without a change of any byte.

        SQLite would recover a file on opening it, and empty its write-ahead log on closing it.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return
        # The version is written before the first table, and before there is such a log.
        unchanged = f"file:{quote(str(self.path.absolute()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(unchanged, uri=True)) as connection:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if found != self._version and (found or tables):
            raise StoreError(refusal(str(self.path), found, self._version, self._rescue))

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA page_size = {self._page_bytes:d}")
        connection.execute("PRAGMA secure_delete = OFF")  # else deleted rows are overwritten
        connection.execute(f"PRAGMA user_version = {self._version:d}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.executescript(self._schema)


def _identity(path: Path) -> tuple[int, int]:
    """Returns device and inode of a file; zeros if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _run_batch(
    connection: sqlite3.Connection,
    batch: list[Job[sqlite3.Connection]],
    check_files: Callable[[], StoreLostError | None],
) -> None:
    if not batch:
        return
    outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for work, future in batch:
            outcomes.append((future, *_run_work(connection, work)))
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        outcomes = [(future, None, _typed(error)) for _, future in batch]
    lost = check_files()  # after the commit: acknowledged data is in the named file
    if lost is not None:
        outcomes = [(future, None, lost) for _, future in batch]
    for future, result, failure in outcomes:
        if not future.set_running_or_notify_cancel():
            continue
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)


def _run_work(connection: sqlite3.Connection, work: Work[Any]) -> tuple[Any, Exception | None]:
    connection.execute("SAVEPOINT work")
    try:
        result = work(connection)
    except Exception as error:
        if isinstance(error, sqlite3.Error) and not connection.in_transaction:
            raise  # SQLite rolled back the whole batch, as it does when the disk is full
        connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
        return None, _typed(error) if isinstance(error, sqlite3.Error) else error
    connection.execute("RELEASE work")
    return result, None


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
