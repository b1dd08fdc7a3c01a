"""Jobs that wait for the thread of a store, which takes all that wait at a time."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from rollmesh.runtime.errors import ShuttingDownError, StoreFullError

RETRY_MS = 1000
"""Retry delay of a store that is full or away, milliseconds."""
_MAX_PENDING = 4096
_Result = TypeVar("_Result")
_Door = TypeVar("_Door")
Job: TypeAlias = tuple[Callable[[_Door], Any], Future[Any]]
"""What to run, given what the thread has of the store, and its outcome."""


class Jobs(Generic[_Door]):
    """A bounded queue of jobs; callers add to it, one thread takes from it."""

    def __init__(self, most: int) -> None:
        """Starts empty; a batch has up to `most` jobs."""
        self._most = most
        self._queue: queue.Queue[Job[_Door] | None] = queue.Queue(_MAX_PENDING)
        self._closing = False

    def add(self, work: Callable[[_Door], _Result]) -> Future[_Result]:
        """Adds a job; returns its outcome.

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
        """Ends the thread after the jobs that wait; may wait for a place in the queue."""
        self._queue.put(None)

    def next_batch(self, timeout_s: float | None = None) -> list[Job[_Door]] | None:
        """Waits for jobs and returns those that wait; none after the timeout, None at the end."""
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
        """Returns the jobs that nobody will take."""
        jobs: list[Job[_Door]] = []
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                jobs += [item] if item else []
        return jobs
