"""The SDK without async: the same client, run on an event loop in a thread of its own.

Methods take the arguments of their asynchronous namesakes, and return and raise the same.
"""

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from rollmesh.client.client import Client as AsyncClient
from rollmesh.client.connections import MeshAddresses
from rollmesh.client.deliveries.subscription import Subscription as AsyncSubscription
from rollmesh.client.loop_thread import LoopThread
from rollmesh.client.rollouts.groups import GroupOutcome
from rollmesh.client.rollouts.rollout import rollout, rollout_groups
from rollmesh.client.rollouts.summary import RolloutSummary
from rollmesh.client.sessions.session import Session
from rollmesh.client.sessions.trajectories import Delivery

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


class _Blocking:
    """Does its work with an asynchronous object on the loop of a thread."""

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        """Takes the asynchronous object and the thread that it runs in."""
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
    """Deliveries of a consumer; see `rollmesh.client.Subscription`."""

    def __iter__(self) -> Iterator[Delivery]:
        """Iterates over deliveries without end."""
        return self

    __next__ = _waiting(AsyncSubscription.__anext__)
    acknowledge = _waiting(AsyncSubscription.acknowledge)
    grant = _not_waiting(AsyncSubscription.grant)
    report_version = _not_waiting(AsyncSubscription.report_version)


class Rollout(_Blocking):
    """A running rollout: iterates over its groups; see `rollmesh.client.Rollout`."""

    @property
    def summary(self) -> RolloutSummary:
        """Summary of the groups that have ended so far."""
        summary: RolloutSummary = self._inner.summary
        return summary

    def __iter__(self) -> Iterator[GroupOutcome]:
        """Iterates over the groups as they end."""
        return self

    def __next__(self) -> GroupOutcome:
        """Waits for the next group to end."""
        group: GroupOutcome | None = self._thread.run(anext(self._inner, None))
        if group is None:
            raise StopIteration
        return group


def _plain(session: Session, _thread: LoopThread) -> Session:
    return session


class Client(_Blocking, AbstractContextManager["Client"]):
    """One mesh, for programs without an event loop; see `rollmesh.client.Client`."""

    def __init__(self, addresses: MeshAddresses) -> None:
        """Takes the addresses and starts the thread; leaving the context ends it."""
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

    session = _holding(AsyncClient.session, _plain)
    session_request = staticmethod(AsyncClient.session_request)
    open_session = _waiting(AsyncClient.open_session)
    close_session = _waiting(AsyncClient.close_session)
    revoke_key = _waiting(AsyncClient.revoke_key)
    renew_key = _waiting(AsyncClient.renew_key)
    transcript = _waiting(AsyncClient.transcript)

    rollout = _waiting(rollout)
    rollout_groups = _holding(rollout_groups, Rollout)

    subscribe = _holding(AsyncClient.subscribe, Subscription)
    set_rewards = _waiting(AsyncClient.set_rewards)
    seek = _waiting(AsyncClient.seek)
    consumers = _waiting(AsyncClient.consumers)
    update_consumer = _waiting(AsyncClient.update_consumer)
    delete_consumer = _waiting(AsyncClient.delete_consumer)
    filtered = _waiting(AsyncClient.filtered)
    stored_session = _waiting(AsyncClient.stored_session)
    stats = _waiting(AsyncClient.stats)
    server_infos = _waiting(AsyncClient.server_infos)

    push_weights = _waiting(AsyncClient.push_weights)
    init_weight_transfer = _waiting(AsyncClient.init_weight_transfer)
    policy_version = _waiting(AsyncClient.policy_version)
    forget_weights = _waiting(AsyncClient.forget_weights)
    replicas = _waiting(AsyncClient.replicas)

    pause_engines = _waiting(AsyncClient.pause_engines)
    resume_engines = _waiting(AsyncClient.resume_engines)
    sleep_engines = _waiting(AsyncClient.sleep_engines)
    wake_up_engines = _waiting(AsyncClient.wake_up_engines)
    reset_prefix_caches = _waiting(AsyncClient.reset_prefix_caches)
    abort_generations = _waiting(AsyncClient.abort_generations)
