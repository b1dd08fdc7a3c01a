"""The SDK without async: the same client, run on an event loop in a thread of its own."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rollmesh.client import client as async_client
from rollmesh.client.connections import MeshAddresses
from rollmesh.client.deliveries.subscription import Subscription as AsyncSubscription
from rollmesh.client.loop_thread import LoopThread
from rollmesh.client.rollouts.groups import GroupOutcome
from rollmesh.client.rollouts.rollout import (
    Rollout as AsyncRollout,
    Samples,
    rollout,
    rollout_groups,
)
from rollmesh.client.rollouts.summary import RolloutSummary
from rollmesh.client.sessions.session import Session
from rollmesh.client.sessions.trajectories import Delivery, SessionResult
from rollmesh.client.sessions.transcripts import Transcript
from rollmesh.client.weights.push import Transfer
from rollmesh.v1 import collector_pb2, gateway_pb2, router_pb2


class Subscription:
    """Deliveries of a consumer; see `rollmesh.client.Subscription`."""

    def __init__(self, inner: AsyncSubscription, thread: LoopThread) -> None:
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

    def __init__(self, inner: AsyncRollout, thread: LoopThread) -> None:
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
        self._thread = LoopThread()

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

    def session_request(self, **options: Any) -> gateway_pb2.CreateSessionRequest:
        """Returns what asks for a session; the arguments are those of `session`."""
        return self._inner.session_request(**options)

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
        """Runs every sample n times; see `rollmesh.client.rollouts.rollout`."""
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

    def seek(self, consumer: str, position: collector_pb2.Position) -> collector_pb2.SeekResponse:
        """Moves a known consumer; says how many units come again and how many do not come."""
        return self._thread.run(self._inner.seek(consumer, position))

    def drop_consumer(self, consumer: str) -> bool:
        """Forgets a consumer, so that it holds no sessions; says whether it was known."""
        return self._thread.run(self._inner.drop_consumer(consumer))

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

    def policy_version(self, model: str = "") -> int:
        """Returns the highest policy version that was pushed; 0 before the first push."""
        return self._thread.run(self._inner.policy_version(model))

    def forget_weights(self, model: str = "") -> router_pb2.ForgetWeightsResponse:
        """Makes the router forget what was pushed, so that the next push may have any version."""
        return self._thread.run(self._inner.forget_weights(model))

    def replicas(self) -> router_pb2.ListReplicasResponse:
        """Returns who is in the mesh."""
        return self._thread.run(self._inner.replicas())

    def filtered(self, consumer: str) -> list[collector_pb2.FilteredEntry]:
        """Returns what a subscription's rules kept from a consumer and why, oldest first."""
        return self._thread.run(self._inner.filtered(consumer))

    def stored_session(self, session_id: str) -> SessionResult:
        """Returns a closed session as the collector has it, delivered or not."""
        return self._thread.run(self._inner.stored_session(session_id))

    def stats(self) -> collector_pb2.GetStatsResponse:
        """Returns how much the collector holds."""
        return self._thread.run(self._inner.stats())
