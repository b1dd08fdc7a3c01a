"""A thread with a PostgreSQL connection, which runs jobs in transactions.

Jobs that wait at the same time share one transaction and its fsync. If one of them fails, the
transaction is rolled back and each job runs in one of its own.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from rollmesh.runtime.errors import StoreAwayError
from rollmesh.runtime.jobs import Job, Jobs
from rollmesh.runtime.postgres.connection import Address, Connection
from rollmesh.runtime.statements import Statements

_Result = TypeVar("_Result")
Work: TypeAlias = Callable[[Statements], _Result]
_MAX_BATCH = 64
_LOOK_S = 1.0


class Lane(AbstractAsyncContextManager["Lane"]):
    """One connection, its thread, and the jobs that wait for it."""

    def __init__(
        self, address: Address, begin: str, name: str, *, is_pipelined: bool = False
    ) -> None:
        """Takes what a `Connection` takes, and a name for the log."""
        self._connection = Connection(address, begin, is_pipelined=is_pipelined)
        self._patience_s = address.limits.silence_ms / 1000
        self._jobs = Jobs[Statements](_MAX_BATCH)
        self._thread = threading.Thread(target=self._serve, name=f"postgres-{name}")

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
        self._jobs.refuse()
        await asyncio.to_thread(self._jobs.end)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _LOOK_S)
            self._connection.abort(self._patience_s)

    async def run(self, work: Work[_Result]) -> _Result:
        """Runs a job in a transaction; returns once the commit is durable.

        A job may run more than once; all but the last run leave nothing. Each transaction has
        statements of its own, so a job can tell whether it shares one with another job.

        Raises:
            RollmeshError: As `Connection.transaction` says, or an error of the job.
        """
        done = asyncio.wrap_future(self._jobs.add(work))
        try:
            while not (await asyncio.wait([done], timeout=_LOOK_S))[0]:
                self._connection.abort(self._patience_s)
        finally:
            done.cancel()  # if the caller was cancelled
        return done.result()

    def _serve(self) -> None:
        try:
            while (batch := self._jobs.next_batch()) is not None:
                batch = [job for job in batch if job[1].set_running_or_notify_cancel()]
                if batch:
                    self._run_batch(batch)
        finally:
            self._connection.close()

    def _run_batch(self, batch: Sequence[Job[Statements]]) -> None:
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
        with self._connection.transaction() as statements:
            return [work(statements) for work in jobs]
