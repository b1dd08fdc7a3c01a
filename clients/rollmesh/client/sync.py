"""The SDK without async: the same client, run on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rollmesh.client import client as async_client
from rollmesh.client.client import MeshAddresses, Session
from rollmesh.client.delivery import Subscription as AsyncSubscription
from rollmesh.client.groups import GroupOutcome
from rollmesh.client.rollout import Rollout as AsyncRollout, Samples, rollout, rollout_groups
from rollmesh.client.summary import RolloutSummary
from rollmesh.client.trajectories import Delivery
from rollmesh.client.transcripts import Transcript
from rollmesh.client.weights import Transfer
from rollmesh.v1 import collector_pb2, gateway_pb2, router_pb2

_Result = TypeVar("_Result")
_END_S = 60.0


class _LoopThread:
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
        ended = threading.Event()

        async def held() -> _Result:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(held(), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here ends the work there, in order: sessions are closed
            future.cancel()
            ended.wait(_END_S)
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
            loop.call_soon_threadsafe(leave.set_result, error)
            self._end(holding.result, error)
            raise
        loop.call_soon_threadsafe(leave.set_result, None)
        holding.result()

    @staticmethod
    def _end(result: Any, error: BaseException) -> None:
        """Waits for the exit; the error that caused it is the caller's to raise again."""
        try:
            result()
        except BaseException as raised:
            if raised is not error:
                raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def _await(future: asyncio.Future[_Result]) -> _Result:
    return await future


async def _hold(
    scope: AbstractAsyncContextManager[_Result],
    entry: asyncio.Future[_Result],
    leave: asyncio.Future[BaseException | None],
) -> None:
    """Enters a context, waits to leave it, and leaves it, with an error where there is one."""
    try:
        value = await scope.__aenter__()
    except Exception as error:  # noqa: BLE001 - the edge of the thread: the caller gets it
        entry.set_exception(error)
        return
    entry.set_result(value)
    cause = await leave
    if cause is None:
        await scope.__aexit__(None, None, None)
    elif not await scope.__aexit__(type(cause), cause, cause.__traceback__):
        raise cause


class Subscription:
    """Deliveries of a consumer; see `rollmesh.client.Subscription`."""

    def __init__(self, inner: AsyncSubscription, thread: _LoopThread) -> None:
        """Made by `Client.subscribe`."""
        self._inner = inner
        self._thread = thread

    def __iter__(self) -> Iterator[Delivery]:
        """Iterates over deliveries, for ever."""
        return self

    def __next__(self) -> Delivery:
        """Waits for the next delivery."""
        return self._thread.run(self._inner.__anext__())

    def acknowledge(self, *deliveries: Delivery) -> None:
        """Says that deliveries are safe here; returns once the collector has that on disk."""
        self._thread.run(self._inner.acknowledge(*deliveries))

    def grant(self, count: int) -> None:
        """Asks for more deliveries, on top of the `credits`."""
        self._thread.call(self._inner.grant, count)

    def report_version(self, policy_version: int) -> None:
        """Says which policy version is trained from now on."""
        self._thread.call(self._inner.report_version, policy_version)


class Rollout:
    """A running rollout: iterates over its groups; see `rollmesh.client.Rollout`."""

    def __init__(self, inner: AsyncRollout, thread: _LoopThread) -> None:
        """Made by `Client.rollout_groups`."""
        self._inner = inner
        self._thread = thread

    @property
    def summary(self) -> RolloutSummary:
        """What has come of it so far."""
        return self._inner.summary

    def __iter__(self) -> Iterator[GroupOutcome]:
        """Iterates over the groups as they end."""
        return self

    def __next__(self) -> GroupOutcome:
        """Waits for the next group to end."""
        group = self._thread.run(anext(self._inner, None))
        if group is None:
            raise StopIteration
        return group


class Client(AbstractContextManager["Client"]):
    """One mesh, for programs without an event loop; see `rollmesh.client.Client`.

    The keyword arguments of every method are those of the async one.
    """

    def __init__(self, addresses: MeshAddresses) -> None:
        """Takes the addresses and starts the thread; leaving the context ends it."""
        self._inner = async_client.Client(addresses)
        self._thread = _LoopThread()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the channels and ends the thread."""
        self._thread.run(self._inner.__aexit__(None, None, None))
        self._thread.close()

    def session(self, **options: Any) -> AbstractContextManager[Session]:
        """Holds a session open; leaving closes it with `session.rewards`, FAILED after an error."""
        return self._thread.entered(self._inner.session(**options))

    def open_session(self, request: gateway_pb2.CreateSessionRequest) -> Session:
        """Opens a session; the caller closes it."""
        return self._thread.run(self._inner.open_session(request))

    def close_session(self, session: Session, **options: Any) -> list[str]:
        """Closes a session with its reward; returns the ids of its trajectories."""
        return self._thread.run(self._inner.close_session(session, **options))

    def transcript(self, session: Session) -> Transcript:
        """Returns what was said so far in an open session."""
        return self._thread.run(self._inner.transcript(session))

    def rollout(self, samples: Samples, **settings: Any) -> RolloutSummary:
        """Runs every sample n times; see `rollmesh.client.rollout`."""
        return self._thread.run(rollout(self._inner, samples, **settings))

    @contextmanager
    def rollout_groups(self, samples: Samples, **settings: Any) -> Iterator[Rollout]:
        """Rolls samples out while the block runs: `with ... as groups: for group in groups`."""
        with self._thread.entered(rollout_groups(self._inner, samples, **settings)) as inner:
            yield Rollout(inner, self._thread)

    def set_rewards(self, session_id: str, **rewards: Any) -> None:
        """Gives a closed session rewards."""
        self._thread.run(self._inner.set_rewards(session_id, **rewards))

    @contextmanager
    def subscribe(self, consumer: str, **options: Any) -> Iterator[Subscription]:
        """Holds a subscription: `with ... as groups: for delivery in groups: ...`."""
        with self._thread.entered(self._inner.subscribe(consumer, **options)) as inner:
            yield Subscription(inner, self._thread)

    def push_weights(
        self, weights: Mapping[str, Any] | Path | Transfer, policy_version: int, **options: Any
    ) -> list[router_pb2.EngineResult]:
        """Gives all engines new weights."""
        return self._thread.run(self._inner.push_weights(weights, policy_version, **options))

    def init_weight_transfer(
        self, backend: str, init_info: Mapping[str, Any], **options: Any
    ) -> list[router_pb2.EngineResult]:
        """Makes all engines join the trainer, which must join meanwhile in another thread."""
        return self._thread.run(self._inner.init_weight_transfer(backend, init_info, **options))

    def replicas(self) -> router_pb2.ListReplicasResponse:
        """Returns who is in the mesh."""
        return self._thread.run(self._inner.replicas())

    def stats(self) -> collector_pb2.GetStatsResponse:
        """Returns how much the collector holds."""
        return self._thread.run(self._inner.stats())
