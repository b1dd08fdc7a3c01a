"""A thread with a PostgreSQL connection, which runs jobs in transactions.

Jobs that wait at the same time share one transaction, its lock and its fsync. If one of them fails,
the transaction is rolled back and each job runs in one of its own.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from rollmesh.collector.storage.postgres.connection import STATEMENT_MS, Address, Connection
from rollmesh.collector.storage.postgres.transaction import PostgresTransaction
from rollmesh.collector.storage.store import RETRY_MS
from rollmesh.runtime.errors import ShuttingDownError, StoreAwayError, StoreFullError

_Result = TypeVar("_Result")
Work: TypeAlias = Callable[[PostgresTransaction], _Result]
_Job: TypeAlias = tuple[Work[Any], "Future[Any]"]
_log = logging.getLogger(__name__)
_MAX_PENDING = 4096
_MAX_BATCH = 64
_LOOK_S = 1.0
PATIENCE_S = STATEMENT_MS / 1000 + 5
"""Longest time without an answer of the server."""


class Lane(AbstractAsyncContextManager["Lane"]):
    """One connection, its thread, and the jobs that wait for it."""

    def __init__(self, address: Address, begin: str, name: str) -> None:
        """Takes the database, the statements that begin a transaction, and a name for the log."""
        self._connection = Connection(address, begin)
        self._queue: queue.Queue[_Job | None] = queue.Queue(_MAX_PENDING)
        self._thread = threading.Thread(target=self._serve, name=f"postgres-{name}")
        self._closing = False

    async def __aenter__(self) -> "Lane":
        """Starts the thread; the first job connects."""
        self._thread.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Runs the waiting jobs and closes the connection."""
        self._closing = True
        await asyncio.to_thread(self._queue.put, None)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _LOOK_S)
            self._connection.abort(PATIENCE_S)

    async def run(self, work: Work[_Result]) -> _Result:
        """Runs a job in a transaction; returns once the commit is durable.

        A job may run more than once; all but the last run leave nothing.

        Raises:
            RollmeshError: As `Connection.transaction` says, or an error of the job.
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
        done = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([done], timeout=_LOOK_S))[0]:
                self._connection.abort(PATIENCE_S)
        finally:
            done.cancel()  # if the caller was cancelled
        return done.result()

    def _serve(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                batch = [job for job in batch if job[1].set_running_or_notify_cancel()]
                if batch:
                    self._run_batch(batch)
        finally:
            self._connection.close()

    def _next_batch(self) -> list[_Job] | None:
        """Waits for jobs and returns all that wait; None when the lane closes."""
        batch: list[_Job] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == _MAX_BATCH or self._queue.empty():
                return batch
            item = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch or None

    def _run_batch(self, batch: Sequence[_Job]) -> None:
        try:
            results = self._transact([work for work, _ in batch])
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: no caller may hang
            if len(batch) > 1 and not isinstance(error, StoreAwayError):
                for job in batch:
                    self._run_batch([job])
                return
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)

    def _transact(self, jobs: Sequence[Work[Any]]) -> list[Any]:
        results: list[Any] = []
        with self._connection.transaction():
            for work in jobs:
                tx = PostgresTransaction(self._connection.statements)
                results.append(work(tx))
                tx.finish()
        return results
