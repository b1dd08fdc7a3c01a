"""An event loop in a thread, for callers without one; Ctrl-C cancels what they wait for."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_END_S = 60.0
_LOOK_S = 0.2


class LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self) -> None:
        """Starts it."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollmesh-client", daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function on the loop, soon."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs work on the loop and waits for it.

        Raises:
            KeyboardInterrupt: Ctrl-C. The work was cancelled and has finished; a second Ctrl-C does
                not wait for it.
        """
        running = _Running(work)
        with _interrupts(lambda: self.call(running.cancel)) as interrupted:
            future = asyncio.run_coroutine_threadsafe(running.run(), self._loop)
            try:
                while not wait([future], _LOOK_S).done:
                    pass  # a signal just before a thread blocks does not wake it
                return future.result()
            except BaseException:
                if not interrupted():  # the caller's signal handler or the work raised
                    self.call(running.cancel)
                    wait([future], _END_S)
                raise

    @contextmanager
    def entered(self, scope: AbstractAsyncContextManager[_Result]) -> Iterator[_Result]:
        """Holds an async context open on the loop, in one task from its entry to its exit."""
        loop = self._loop
        entry: asyncio.Future[_Result] = self.run(_future())
        leave: asyncio.Future[BaseException | None] = self.run(_future())
        holding = asyncio.run_coroutine_threadsafe(_hold(scope, entry, leave), loop)
        try:
            value = self.run(_await(entry))
        except BaseException:
            holding.cancel()
            raise
        try:
            yield value
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, leave, error)
            self._end(holding.result, error)
            raise
        loop.call_soon_threadsafe(_settle, leave, None)
        holding.result()

    @staticmethod
    def _end(result: Any, error: BaseException) -> None:
        """Waits for the exit; the caller re-raises the error that caused it."""
        try:
            result()
        except BaseException as raised:
            if raised is not error:
                raise

    def close(self) -> None:
        """Ends the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Running(Generic[_Result]):
    """Work that can be cancelled before it begins; both methods run on the loop."""

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def run(self) -> _Result:
        if self._cancelled:
            self._work.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


@contextmanager
def _interrupts(cancel: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C call `cancel`, as `asyncio.run` does; yields whether there was one.

    A `KeyboardInterrupt` raised at an arbitrary point could leave work running that was about to be
    awaited, or a lock held. The caller's own signal handler stays in place.

    Raises:
        KeyboardInterrupt: There was a Ctrl-C; raised when the block has ended.
    """
    count = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        cancel()

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: count > 0
    except BaseException as error:
        if count:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if count:
        raise KeyboardInterrupt


async def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def _await(future: asyncio.Future[_Result]) -> _Result:
    return await future


def _settle(leave: asyncio.Future[BaseException | None], cause: BaseException | None) -> None:
    if not leave.done():  # its task was ended meanwhile
        leave.set_result(cause)


async def _hold(
    scope: AbstractAsyncContextManager[_Result],
    entry: asyncio.Future[_Result],
    leave: asyncio.Future[BaseException | None],
) -> None:
    """Enters a context, waits until it is to be left, and leaves it, possibly with an error."""
    try:
        value = await scope.__aenter__()
    except Exception as error:  # noqa: BLE001 - raised in the caller's thread
        entry.set_exception(error)
        return
    except BaseException:  # the context ended its own task
        entry.cancel()
        raise
    entry.set_result(value)
    try:
        cause = await leave
    except BaseException as error:  # the same, while it was open
        if not await scope.__aexit__(type(error), error, error.__traceback__):
            raise
        return
    if cause is None:
        await scope.__aexit__(None, None, None)
    elif not await scope.__aexit__(type(cause), cause, cause.__traceback__):
        raise cause
