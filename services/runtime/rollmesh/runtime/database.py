"""The one door to SQLite: a thread that runs work in group commits.

Works that wait at the same time share one transaction and one fsync. A work that fails is rolled
back alone; a commit that fails fails all of its works, and nothing of them is kept. One process has
a file at a time: a lock beside it ends with the process, however that ends.
"""

import asyncio
import fcntl
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias, TypeVar

from rollmesh.runtime.errors import (
    RollmeshError,
    ShuttingDownError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreLostError,
)

_Result = TypeVar("_Result")
Work: TypeAlias = Callable[[sqlite3.Connection], _Result]
_log = logging.getLogger(__name__)
_Item: TypeAlias = "tuple[Work[Any], Future[Any]] | None"

_MAX_PENDING = 4096
_MAX_BATCH = 256
_RETRY_MS = 1000
_LOOK_S = 1.0
_PAGE_BYTES = 4096


class Database(AbstractAsyncContextManager["Database"]):
    """A SQLite file in WAL mode with full sync, served by its own thread."""

    def __init__(
        self, path: Path, schema: str, version: int, page_bytes: int = _PAGE_BYTES
    ) -> None:
        """Names the file; entering the context opens it and runs `schema`.

        Args:
            path: The file; made, with its folder, where missing.
            schema: Statements that make what is missing.
            version: Of the schema. A file of another version is refused.
            page_bytes: Size of the pages of a file that is made: large ones for large rows, small
                ones for commits of little.
        """
        self.path = path
        """The file."""
        self._schema = schema
        self._version = version
        self._page_bytes = page_bytes
        self._queue: queue.Queue[_Item] = queue.Queue(_MAX_PENDING)
        self._thread = threading.Thread(target=self._serve, name=f"sqlite-{path.stem}")
        self._closing = False
        self._died = False
        self._opened: Future[None] = Future()
        self._lost: Future[str] = Future()
        self._files: dict[Path, tuple[int, int]] = {}
        """Device and inode of what is open."""

    async def __aenter__(self) -> "Database":
        """Opens the file, creating it and its folder where missing.

        Raises:
            StoreInUseError: Another process has it open.
            StoreError: It cannot be opened, or was written by another version.
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
        """Finishes the waiting works and closes the file."""
        self._closing = True
        await asyncio.to_thread(self._queue.put, None)
        await asyncio.to_thread(self._thread.join)

    async def lost(self) -> str:
        """Returns why nothing is kept any more, as soon as that is so; else waits for ever."""
        return await asyncio.shield(asyncio.wrap_future(self._lost))

    async def run(self, work: Work[_Result]) -> _Result:
        """Runs work inside a transaction; returns once that is on disk.

        Raises:
            StoreLostError: The file was removed or replaced while it was open.
            StoreFullError: The disk is full, or too much is waiting.
            StoreError: The store failed in another way.
        """
        if self._closing:
            raise ShuttingDownError("the store is closed; ask another")
        if self._died:
            raise _dead()
        future: Future[_Result] = Future()
        try:
            self._queue.put_nowait((work, future))
        except queue.Full:
            raise StoreFullError(
                "the store is behind; try again", retry_delay_ms=_RETRY_MS
            ) from None
        if self._died:  # while this was put there
            self._fail_waiting()
        return await asyncio.wrap_future(future)

    def _serve(self) -> None:
        try:
            with self._lock(), closing(self._open()) as connection:
                found = {path: _identity(path) for path in self._paths()}
                self._files = {path: one for path, one in found.items() if any(one)}
                self._opened.set_result(None)
                while (batch := self._next_batch()) is not None:
                    try:
                        _run_batch(connection, batch, self._check_files)
                    except BaseException:  # noqa: BLE001 - the edge of the thread: nobody may hang
                        _log.critical("the store's thread dies", exc_info=True)
                        self._died = True
                        _fail(batch)
                        self._fail_waiting()
                        return
        except (sqlite3.Error, OSError, StoreError) as error:
            if self._opened.done():
                raise
            # Told once the lock is free: who hears of it may try again at once.
            typed = error if isinstance(error, StoreError) else StoreError(f"{self.path}: {error}")
            self._opened.set_exception(typed)

    def _fail_waiting(self) -> None:
        """Tells all who wait that the thread is gone."""
        with suppress(queue.Empty):
            while True:
                _fail([item] if (item := self._queue.get_nowait()) else [])

    def _paths(self) -> list[Path]:
        return [self.path.with_name(f"{self.path.name}{end}") for end in ("", "-wal", ".lock")]

    def _check_files(self) -> StoreLostError | None:
        """Returns why nothing is kept any more; None while all is kept.

        What is written into a file without a name is gone; without the lock another process may
        have the path.
        """
        gone = next((path for path, was in self._files.items() if _identity(path) != was), None)
        if gone is None:
            return None
        error = StoreLostError(
            f"{gone}: was removed or replaced while it was open; nothing more is kept: put the "
            "folder back, or name another data_dir, and start again"
        )
        if not self._lost.done():
            self._lost.set_result(error.message)
        return error

    def _lock(self) -> IO[bytes]:
        """Returns what holds the lock until it is closed; children do not inherit it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f"{self.path.name}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StoreInUseError(
                f"{self.path}: another process that lives has it open; "
                "stop that one, or name another data_dir"
            ) from None
        return lock

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and found != self._version:
            raise StoreError(
                f"{self.path}: has schema version {found}, this is for {self._version}; "
                "run the release that wrote it until it is empty, or name another data_dir"
            )
        connection.execute(f"PRAGMA page_size = {self._page_bytes:d}")
        connection.execute("PRAGMA secure_delete = OFF")  # else what goes is written once more
        connection.execute(f"PRAGMA user_version = {self._version:d}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.executescript(self._schema)

    def _next_batch(self) -> list[tuple[Work[Any], Future[Any]]] | None:
        """Waits for work; returns all that waits, None once the database is to close.

        While nothing is asked for it looks after the files all the same.
        """
        batch: list[tuple[Work[Any], Future[Any]]] = []
        try:
            item = self._queue.get(timeout=_LOOK_S)
        except queue.Empty:
            self._check_files()
            return batch
        while item is not None:
            batch.append(item)
            if len(batch) == _MAX_BATCH or self._queue.empty():
                return batch
            item = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch or None


def _identity(path: Path) -> tuple[int, int]:
    """Returns device and inode of a file; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _run_batch(
    connection: sqlite3.Connection,
    batch: list[tuple[Work[Any], Future[Any]]],
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
    lost = check_files()  # after the commit: what is acknowledged is in a file that has its name
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
            raise  # SQLite rolled the whole batch back itself, as it does on a full disk
        connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
        return None, _typed(error) if isinstance(error, sqlite3.Error) else error
    connection.execute("RELEASE work")
    return result, None


def _fail(batch: list[tuple[Work[Any], Future[Any]]]) -> None:
    for _, future in batch:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(_dead())


def _dead() -> StoreError:
    return StoreError("the store's thread has died, the log says of what; restart the service")


def _typed(error: sqlite3.Error) -> RollmeshError:
    if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        return StoreFullError(f"the disk is full: {error}", retry_delay_ms=_RETRY_MS)
    return StoreError(f"the store failed: {error}")
