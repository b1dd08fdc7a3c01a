"""The SDK without async: the same client, run on an event loop in a thread of its own.

Methods take the arguments of their asynchronous namesakes, and return and raise the same.
"""

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rollmesh.client.client import Client as AsyncClient
from rollmesh.client.connections import MeshAddresses
from rollmesh.client.deliveries import Subscription as AsyncSubscription
from rollmesh.client.evaluations import evaluate
from rollmesh.client.rollouts import GroupOutcome, RolloutSummary, rollout, rollout_groups
from rollmesh.client.sessions import Delivery
from rollmesh.v1.sampling_pb2 import VersionSpan

# An event loop in a thread, for callers without one. Ctrl-C cancels their call.

_Result = TypeVar("_Result")
_END_S = 60.0
_LOOK_S = 0.2


class LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self) -> None:
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
            KeyboardInterrupt: Ctrl-C. The work was cancelled and has finished. A second Ctrl-C does
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
        entry: asyncio.Future[_Result] = loop.create_future()
        leave: asyncio.Future[BaseException | None] = loop.create_future()

        async def hold() -> None:
            cause = None
            try:
                async with scope as value:
                    entry.set_result(value)
                    if (cause := await leave) is not None:
                        raise cause  # noqa: TRY301 - through the context, whose exit sees it
            except BaseException as error:
                if error is cause:  # the caller's thread raises it. Here, Ctrl-C ends the loop
                    return
                if entry.done():
                    raise
                if not isinstance(error, Exception):  # the context ended its own task
                    entry.cancel()
                    raise
                entry.set_exception(error)  # raised in the caller's thread

        async def enter() -> _Result:
            return await entry

        def end(cause: BaseException | None) -> None:
            if not leave.done():  # its task was ended meanwhile
                leave.set_result(cause)

        holding = asyncio.run_coroutine_threadsafe(hold(), loop)
        try:
            value = self.run(enter())
        except BaseException:
            holding.cancel()
            raise
        try:
            yield value
        except BaseException as error:
            loop.call_soon_threadsafe(end, error)
            holding.result()
            raise
        loop.call_soon_threadsafe(end, None)
        holding.result()

    def close(self) -> None:
        """Ends the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Running(Generic[_Result]):
    """Work that can be cancelled before it begins. Both methods run on the loop."""

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
    """Makes the first Ctrl-C call `cancel`, as `asyncio.run` does. Yields whether there was one.

    A `KeyboardInterrupt` raised at an arbitrary point could leave work running that was about to be
    awaited, or a lock held. The caller's own signal handler stays in place.

    Raises:
        KeyboardInterrupt: There was a Ctrl-C. Raised when the block has ended.
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


_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


class _Blocking:
    """Does its work with an asynchronous object on the loop of a thread."""

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread


def _waiting(
    method: Callable[Concatenate[Any, _Arguments], Coroutine[Any, Any, _Result]],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """Makes a method that waits for the result of an asynchronous one."""

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return self._thread.run(method(self._inner, *args, **kwargs))

    return call


def _not_waiting(
    method: Callable[Concatenate[Any, _Arguments], None],
) -> Callable[Concatenate[Any, _Arguments], None]:
    """Makes a method that lets the loop call a plain one."""

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        self._thread.call(functools.partial(method, self._inner, *args, **kwargs))

    return call


def _holding(
    method: Callable[Concatenate[Any, _Arguments], AbstractAsyncContextManager[_Value]],
    wrap: Callable[[_Value, LoopThread], _Result],
) -> Callable[Concatenate[Any, _Arguments], AbstractContextManager[_Result]]:
    """Makes a method that holds an asynchronous context open and yields its wrapped value."""

    @functools.wraps(method)
    @contextmanager
    def call(
        self: _Blocking, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Iterator[_Result]:
        with self._thread.entered(method(self._inner, *args, **kwargs)) as value:
            yield wrap(value, self._thread)

    return call


class Subscription(_Blocking):
    """Deliveries of a consumer. See `rollmesh.client.Subscription`."""

    def __iter__(self) -> Iterator[Delivery]:
        return self

    __next__ = _waiting(AsyncSubscription.__anext__)

    def until(
        self, ended: Iterable[GroupOutcome], *, timeout_s: float = 600.0
    ) -> Iterator[Delivery]:
        """Iterates over deliveries until each of these groups has come, or was filtered."""
        inner = self._inner.until(ended, timeout_s=timeout_s)
        while (delivery := self._thread.run(anext(inner, None))) is not None:
            yield delivery

    acknowledge = _waiting(AsyncSubscription.acknowledge)
    grant = _not_waiting(AsyncSubscription.grant)
    report_version = _not_waiting(AsyncSubscription.report_version)


class Rollout(_Blocking):
    """A running rollout: iterates over its groups. See `rollmesh.client.Rollout`."""

    @property
    def summary(self) -> RolloutSummary:
        """Summary of the groups that have ended so far."""
        summary: RolloutSummary = self._inner.summary
        return summary

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which `resume` goes on."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def __iter__(self) -> Iterator[GroupOutcome]:
        return self

    def __next__(self) -> GroupOutcome:
        group: GroupOutcome | None = self._thread.run(anext(self._inner, None))
        if group is None:
            raise StopIteration
        return group


class Client(_Blocking, AbstractContextManager["Client"]):
    """One mesh, for programs without an event loop. See `rollmesh.client.Client`."""

    def __init__(self, addresses: MeshAddresses) -> None:
        """Takes the addresses and starts the thread. Leaving the context ends it."""
        super().__init__(AsyncClient(addresses), LoopThread())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the channels and ends the thread."""
        self._thread.run(self._inner.__aexit__(None, None, None))
        self._thread.close()

    session = _holding(AsyncClient.session, lambda session, _thread: session)
    session_request = staticmethod(AsyncClient.session_request)
    open_session = _waiting(AsyncClient.open_session)
    close_session = _waiting(AsyncClient.close_session)
    declare_lineage = _waiting(AsyncClient.declare_lineage)
    revoke_key = _waiting(AsyncClient.revoke_key)
    renew_key = _waiting(AsyncClient.renew_key)
    transcript = _waiting(AsyncClient.transcript)
    find_session = _waiting(AsyncClient.find_session)

    evaluate = _waiting(evaluate)
    rollout = _waiting(rollout)
    rollout_groups = _holding(rollout_groups, Rollout)

    subscribe = _holding(AsyncClient.subscribe, Subscription)
    abandon_seat = _waiting(AsyncClient.abandon_seat)
    set_rewards = _waiting(AsyncClient.set_rewards)
    seek = _waiting(AsyncClient.seek)
    state_dict = _waiting(AsyncClient.state_dict)
    load_state_dict = _waiting(AsyncClient.load_state_dict)
    release_state = _waiting(AsyncClient.release_state)
    consumers = _waiting(AsyncClient.consumers)
    update_consumer = _waiting(AsyncClient.update_consumer)
    delete_consumer = _waiting(AsyncClient.delete_consumer)
    report_step = _waiting(AsyncClient.report_step)
    annotate = _waiting(AsyncClient.annotate)
    steps = _waiting(AsyncClient.steps)
    filtered = _waiting(AsyncClient.filtered)
    stored_session = _waiting(AsyncClient.stored_session)
    start_at = _waiting(AsyncClient.start_at)
    stored_group = _waiting(AsyncClient.stored_group)
    stored_sessions = _waiting(AsyncClient.stored_sessions)
    changed_sessions = _waiting(AsyncClient.changed_sessions)
    open_sessions = _waiting(AsyncClient.open_sessions)
    open_session_tree = _waiting(AsyncClient.open_session_tree)
    stats = _waiting(AsyncClient.stats)
    server_infos = _waiting(AsyncClient.server_infos)

    push_weights = _waiting(AsyncClient.push_weights)
    push_adapter = _waiting(AsyncClient.push_adapter)
    unload_adapter = _waiting(AsyncClient.unload_adapter)
    init_weight_transfer = _waiting(AsyncClient.init_weight_transfer)
    pin_weights = _waiting(AsyncClient.pin_weights)
    policy_version = _waiting(AsyncClient.policy_version)
    open_run = _waiting(AsyncClient.open_run)
    follow_run = _not_waiting(AsyncClient.follow_run)

    def is_abandoned(self, spans: Iterable[VersionSpan], model: str = "") -> bool:
        """Returns whether a run from which the client's does not descend sampled a span."""
        return bool(self._inner.is_abandoned(spans, model))

    check_temperature = _waiting(AsyncClient.check_temperature)
    forget_weights = _waiting(AsyncClient.forget_weights)
    replicas = _waiting(AsyncClient.replicas)
    score = _waiting(AsyncClient.score)

    pause_engines = _waiting(AsyncClient.pause_engines)
    resume_engines = _waiting(AsyncClient.resume_engines)
    sleep_engines = _waiting(AsyncClient.sleep_engines)
    wake_up_engines = _waiting(AsyncClient.wake_up_engines)
    reset_prefix_caches = _waiting(AsyncClient.reset_prefix_caches)
    abort_generations = _waiting(AsyncClient.abort_generations)
