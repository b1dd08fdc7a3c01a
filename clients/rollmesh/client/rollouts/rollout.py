"""Rolls out samples: n sessions for each, with bounded concurrency and isolated failures.

Memory does not grow with the number of samples. The next sample is taken when there is room for
another session, a group is kept from its first session to its last, and groups that the caller has
not read hold back new ones.
"""

import asyncio
import functools
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sized
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from rollmesh.client.client import Client
from rollmesh.client.deliveries.arrivals import Arrivals
from rollmesh.client.deliveries.subscription import SubscribeOptions, Subscription
from rollmesh.client.rollouts.attempts import Attempts, Seat
from rollmesh.client.rollouts.groups import Group, GroupOutcome, GroupState, needed_of
from rollmesh.client.rollouts.progress import Show, showing
from rollmesh.client.rollouts.settings import RolloutSettings
from rollmesh.client.rollouts.summary import RolloutSummary
from rollmesh.client.runners import agent_name
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2

Samples: TypeAlias = Iterable[Any] | AsyncIterable[Any]
"""Samples for the runners, or `Group`s; each becomes one group."""
_Keywords = ParamSpec("_Keywords")
_Result = TypeVar("_Result")


class Rollout(AsyncIterator[GroupOutcome]):
    """A running rollout: an iterator over its groups as they end. Made by `rollout_groups`."""

    def __init__(
        self, attempts: Attempts, samples: Samples, settings: RolloutSettings, show: Show
    ) -> None:
        """Takes the samples; `feed` starts them."""
        self.summary = RolloutSummary()
        """Summary of the seats and groups that have ended."""
        self._samples = samples
        self._settings = settings
        self._show = show
        self._attempts = attempts
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._running: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[GroupOutcome | None] = asyncio.Queue(settings.concurrency)
        self._source_error: Exception | None = None

    async def __anext__(self) -> GroupOutcome:
        """Waits for the next group to end.

        Raises:
            Exception: The iterable of samples raised it; raised after the last group.
        """
        group = await self._ended.get()
        if group is not None:
            return group
        self._ended.put_nowait(None)  # for the next call
        if self._source_error is not None:
            raise self._source_error
        raise StopAsyncIteration

    async def feed(self, tasks: asyncio.TaskGroup) -> None:
        """Starts a session whenever there is room for one, until the samples end."""
        try:
            async for sample in _each(self._samples):
                group, stop = self._begin(sample), asyncio.get_running_loop().create_future()
                for index in range(group.size):
                    await self._slots.acquire()
                    seat = Seat(group, index, stop)
                    task = tasks.create_task(self._run(seat))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
        except Exception as error:  # noqa: BLE001 - `__anext__` raises it
            self._source_error = error
        while self._running:
            await asyncio.wait(self._running)
        await self._ended.put(None)

    def cancel(self) -> None:
        """Cancels the running seats."""
        for task in self._running:
            task.cancel()

    def _begin(self, given: Any) -> GroupState:
        """Returns the group of a sample; its own settings override those of the rollout."""
        settings = self._settings
        group = given if isinstance(given, Group) else Group(sample=given)
        sample, n = group.sample, settings.n if group.n is None else group.n
        if n < 1:
            raise InvalidFieldError("n", f"is {n}; give at least 1")
        metadata = group.metadata
        if metadata is None:
            metadata = settings.metadata(sample) if settings.metadata else {}
        if name := agent_name(sample):
            metadata = {**metadata, "agent_name": name}
        return GroupState(
            group.group_id or self._group_id(sample),
            sample,
            n,
            needed_of(settings.needed, n),
            group.runner or name or settings.runner,
            settings.sampling if group.sampling is None else group.sampling,
            dict(metadata),
        )

    def _group_id(self, sample: Any) -> str:
        group_id = self._settings.group_id(sample) if self._settings.group_id else uuid.uuid4().hex
        if not isinstance(group_id, str) or not group_id:
            raise InvalidFieldError("group_id", f"returned {group_id!r:.200}; return a string")
        return group_id

    async def _run(self, seat: Seat) -> None:
        try:
            outcome = await self._attempts.run(seat)
            self.summary.add(outcome)
            group = seat.group.add(outcome)
            if seat.group.failed and not seat.stop.done():
                seat.stop.set_result(None)
            if group is not None:
                self.summary.add_group(group)
            self._show(self.summary)
            if self._settings.on_sample is not None:
                self._settings.on_sample(outcome)
            if group is not None:
                await self._ended.put(group)
        finally:
            self._slots.release()


def _with_settings(
    make: Callable[_Keywords, RolloutSettings],
) -> Callable[
    [Callable[[Client, Samples, RolloutSettings], _Result]],
    Callable[Concatenate[Client, Samples, _Keywords], _Result],
]:
    """Turns a function of the settings into one of keyword arguments, with their types."""

    def wrap(
        call: Callable[[Client, Samples, RolloutSettings], _Result],
    ) -> Callable[Concatenate[Client, Samples, _Keywords], _Result]:
        def called(
            client: Client, samples: Samples, /, *args: _Keywords.args, **settings: _Keywords.kwargs
        ) -> _Result:
            return call(client, samples, make(*args, **settings))

        functools.update_wrapper(called, call)
        return called

    return wrap


@_with_settings(RolloutSettings)
def rollout_groups(
    client: Client, samples: Samples, settings: RolloutSettings
) -> AbstractAsyncContextManager[Rollout]:
    """Rolls samples out while the block runs: `async with ... as groups: async for g in groups`.

    Leaving the block early stops running agents and closes their sessions. The keyword arguments
    are those of `RolloutSettings`.

    Raises:
        InvalidFieldError: A setting is invalid.
        Exception: `on_sample` raised it.
    """
    return _rolling(client, samples, settings)


@_with_settings(RolloutSettings)
async def rollout(client: Client, samples: Samples, settings: RolloutSettings) -> RolloutSummary:
    """Runs every sample `n` times, as one group, and waits for all groups.

    The keyword arguments are those of `RolloutSettings`.

    Returns:
        Counts, rewards and durations. A failed session does not affect its siblings.

    Raises:
        InvalidFieldError: A setting is invalid.
        Exception: The iterable of samples or `on_sample` raised it.
    """
    async with _rolling(client, samples, settings) as groups:
        async for _ in groups:
            pass
    return groups.summary


@asynccontextmanager
async def _rolling(
    client: Client, samples: Samples, settings: RolloutSettings
) -> AsyncIterator[Rollout]:
    error: Exception | None = None
    with showing(_total(samples, settings.n), wanted=settings.progress) as show:
        async with _deliveries(client, settings) as deliveries:
            arrivals = None if deliveries is None else Arrivals(deliveries)
            running = Rollout(Attempts(client, settings, arrivals), samples, settings, show)
            try:
                async with asyncio.TaskGroup() as tasks:
                    working = [tasks.create_task(running.feed(tasks))]
                    if arrivals is not None:
                        working.append(tasks.create_task(arrivals.serve()))
                    try:
                        yield running
                    except Exception as raised:  # noqa: BLE001 - raised below, not in a group
                        error = raised
                    for task in working:
                        task.cancel()
                    running.cancel()
            except (
                ExceptionGroup
            ) as group:  # of `on_sample`; an error of the block takes precedence
                error = error or group.exceptions[0]
    if error is not None:
        raise error


def _deliveries(
    client: Client, settings: RolloutSettings
) -> AbstractAsyncContextManager[Subscription | None]:
    """Returns the subscription for `on_session`."""
    if settings.on_session is None:
        return nullcontext()
    return client.subscribe(
        settings.consumer,
        unit="session",
        credits=settings.concurrency,
        options=SubscribeOptions(filter=collector_pb2.DeliveryFilter(model=settings.model)),
    )


def _total(samples: Samples, n: int) -> int | None:
    """Returns the number of seats, for the progress bar; None if it is not known."""
    if isinstance(samples, (list, tuple)):
        return sum((isinstance(one, Group) and one.n) or n for one in samples)
    return len(samples) * n if isinstance(samples, Sized) else None


async def _each(samples: Samples) -> AsyncIterator[Any]:
    if isinstance(samples, AsyncIterable):
        async for sample in samples:
            yield sample
    else:
        for sample in samples:
            yield sample
