"""A consumer's stream of sessions or groups, with credits and acknowledgements."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, Self

import grpc

from rollmesh.client.arguments import chosen, filled
from rollmesh.client.sessions.trajectories import Delivery, SessionResult
from rollmesh.mesh.directories.members import CollectorDirectory
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    ConsumerExistsError,
    ConsumerMovedError,
    ConsumerUnknownError,
    InvalidFieldError,
    RollmeshError,
    ShuttingDownError,
)
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.runtime.tasks import Background
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2, collector_pb2_grpc

_log = logging.getLogger(__name__)
_CALL_S = 60.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_MAX_CREDITS = 65_536
_MAX_ACKNOWLEDGED = 4096
"""Of one message."""
_UNITS = {
    "session": collector_pb2.DELIVERY_UNIT_SESSION,
    "group": collector_pb2.DELIVERY_UNIT_GROUP,
}


@dataclass(frozen=True, kw_only=True)
class SubscribeOptions:
    """Optional settings of a consumer; see docs/delivery.md."""

    start: collector_pb2.Position | None = None
    """Where a new consumer starts; None: at the oldest session."""
    groups: collector_pb2.GroupPolicy | None = None
    """When a group is delivered; None: when all its samples have arrived."""
    filter: collector_pb2.DeliveryFilter | None = None
    """What is filtered out; None: nothing."""
    policy_version: int | None = None
    """The version being trained; update it with `Subscription.report_version`."""


class Subscription(Background):
    """A named consumer's stream of deliveries.

    It survives restarts of the collector, and goes on at another collector of the same store if the
    one that it uses is away.

    Opening it creates the consumer, or gives a known one these settings. A consumer that is deleted
    later is created again.

    A delivery that was handed out and not acknowledged is not handed out twice by this object, even
    if the collector redelivers it after a restart. A process that takes over the name gets it.
    """

    def __init__(
        self,
        collectors: CollectorDirectory | str,
        *,
        consumer: str,
        unit: Literal["session", "group"],
        credits: int = 8,  # noqa: A002 - the protocol's word
        lease_ms: int = 600_000,
        options: SubscribeOptions | None = None,
    ) -> None:
        """Describes the consumer.

        Args:
            collectors: The collectors, which it closes; or host:port of one, or several, separated
                by commas.
            consumer: Its name; a known consumer resumes where it stopped.
            unit: Whether a delivery holds a session or a group.
            credits: Maximum number of deliveries that wait in this process; 0: deliveries come only
                when `grant` asks for them.
            lease_ms: Time to acknowledge a delivery, milliseconds.
            options: Start position, group policy and filter.

        Raises:
            InvalidFieldError: An argument is invalid.
        """
        super().__init__()
        if isinstance(collectors, str):
            collectors = CollectorDirectory("", collectors)
        self._collectors = collectors
        options = options or SubscribeOptions()
        _check_credits("credits", credits, least=0)
        self._hello = filled(collector_pb2.SubscribeHello, consumer=consumer)
        settings = filled(
            collector_pb2.Consumer,
            name=consumer,
            unit=chosen("unit", unit, _UNITS),
            lease_ms=lease_ms,
            groups=options.groups or collector_pb2.GroupPolicy(),
            filter=options.filter or collector_pb2.DeliveryFilter(),
            policy_version=options.policy_version,
        )
        self._create = filled(
            collector_pb2.CreateConsumerRequest, consumer=settings, start=options.start
        )
        self._created = False
        self._credits = credits
        self._by_hand = credits == 0
        # Bounded by the credits: each delivery taken grants the next. The queue itself has no bound
        # because `grant` raises it.
        self._ready: asyncio.Queue[Delivery | RollmeshError] = asyncio.Queue()
        self._held: set[str] = set()
        # Bounded by the trainer's own actions while the collector does not read: a credit per
        # delivery taken, an acknowledgement per waiting caller, a few bytes per reported version.
        # A new stream starts with an empty queue.
        self._outgoing: asyncio.Queue[collector_pb2.SubscribeRequest | None] = asyncio.Queue()
        self._acknowledging: dict[str, asyncio.Future[None]] = {}
        self._refusal: RollmeshError | None = None
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)

    async def __aenter__(self) -> Self:
        """Starts reading; returns at once."""
        await super().__aenter__()
        # However the task ends, nobody keeps waiting for its deliveries.
        if self._task is not None:
            self._task.add_done_callback(lambda _: self._refuse(_ended()))
        return self

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Iterates over deliveries without end."""
        return self

    async def __anext__(self) -> Delivery:
        """Waits for the next delivery and grants the collector another one.

        Raises:
            ShuttingDownError: The subscription has ended.
            RollmeshError: The collector refuses the subscription.
        """
        item = await self._ready.get()
        if isinstance(item, RollmeshError):
            self._ready.put_nowait(item)  # for the next caller
            raise item
        if self._by_hand:
            self._credits -= 1
        else:
            self._grant(1)
        return item

    def grant(self, count: int) -> None:
        """Asks for more deliveries, in addition to `credits`.

        With `credits=0`, every delivery is filtered by the policy version reported last before it
        was asked for, so that no delivery becomes stale while it waits here.

        Raises:
            InvalidFieldError: It is not 1 to 65,536.
        """
        _check_credits("count", count, least=1)
        self._credits += count
        self._grant(count)

    async def acknowledge(self, *deliveries: Delivery) -> None:
        """Acknowledges deliveries; returns when the collector has stored it durably.

        Raises:
            ShuttingDownError: The subscription has ended; the deliveries will be redelivered.
            RollmeshError: The collector refuses the subscription.
        """
        if self._refusal is not None:
            raise self._refusal
        waiting: list[asyncio.Future[None]] = []
        for delivery in deliveries:
            future = self._acknowledging.get(delivery.delivery_id)
            if future is None or future.done():  # done: whoever waited was cancelled
                future = asyncio.get_running_loop().create_future()
                self._acknowledging[delivery.delivery_id] = future
            waiting.append(future)
        self._send_acknowledgements([delivery.delivery_id for delivery in deliveries])
        await asyncio.gather(*waiting)

    def report_version(self, policy_version: int) -> None:
        """Says which policy version is trained from now on: the filter's lag counts from it.

        Raises:
            InvalidFieldError: It is not a version.
        """
        message = filled(collector_pb2.ReportPolicyVersion, policy_version=policy_version)
        self._create.consumer.policy_version = policy_version  # for the next stream
        self._outgoing.put_nowait(collector_pb2.SubscribeRequest(version=message))

    def _send_acknowledgements(self, ids: list[str]) -> None:
        for at in range(0, len(ids), _MAX_ACKNOWLEDGED):
            part = ids[at : at + _MAX_ACKNOWLEDGED]
            message = collector_pb2.AcknowledgeDeliveries(delivery_ids=part)
            self._outgoing.put_nowait(collector_pb2.SubscribeRequest(acknowledge=message))

    def _grant(self, credits_: int) -> None:
        grant = collector_pb2.GrantCredits(credits=credits_)
        self._outgoing.put_nowait(collector_pb2.SubscribeRequest(grant=grant))

    async def _stay(self) -> None:
        try:
            while True:
                try:
                    async with self._collectors.one() as channel:
                        await self._hold_stream(channel)
                except InvalidFieldError as error:
                    self._refuse(error)
                    return
                except (ConsumerMovedError, ConsumerUnknownError) as error:
                    self._created = isinstance(error, ConsumerMovedError)
                    self._forget_waiting()
                except RollmeshError as error:
                    _log.info("collector unreachable", extra=fields(error=str(error)))
                await asyncio.sleep(self._backoff.next_s())
        finally:
            await self._collectors.aclose()

    def _forget_waiting(self) -> None:
        """Drops waiting deliveries; the collector resends those at or after the new position."""
        while not self._ready.empty():
            item = self._ready.get_nowait()
            if isinstance(item, Delivery):
                self._held.discard(item.delivery_id)

    def _refuse(self, error: RollmeshError) -> None:
        """Fails all current and future waits with an error; the first error wins."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._ready.put_nowait(error)
        for future in self._acknowledging.values():
            if not future.done():
                future.set_exception(error)

    async def _hold_stream(self, channel: grpc.aio.Channel) -> None:
        self._outgoing = asyncio.Queue()
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        if not self._created:
            await self._create_or_update(stub)
            self._created = True
        if self._acknowledging:  # the broken stream may have lost them
            self._send_acknowledgements(list(self._acknowledging))
        if (wanted := self._credits - self._ready.qsize()) > 0:
            self._grant(wanted)
        call = stub.Subscribe(self._requests(self._outgoing))
        try:
            async with aclosing(read_stream(call)) as responses:
                async for response in responses:
                    self._backoff.reset()
                    if response.HasField("delivery"):
                        self._take(response.delivery)
                    else:
                        self._settle(response.acknowledged)
        finally:
            self._outgoing.put_nowait(None)  # ends the request iterator

    async def _create_or_update(self, stub: "collector_pb2_grpc.CollectorServiceAsyncStub") -> None:
        try:
            with typed_errors():
                await stub.CreateConsumer(self._create, timeout=_CALL_S)
        except ConsumerExistsError:
            update = collector_pb2.UpdateConsumerRequest(consumer=self._create.consumer)
            with typed_errors():
                await stub.UpdateConsumer(update, timeout=_CALL_S)

    def _take(self, proto: collector_pb2.Delivery) -> None:
        if proto.delivery_id in self._held:  # redelivered after a restart
            self._grant(1)
            return
        self._held.add(proto.delivery_id)
        sessions = tuple(map(SessionResult.from_proto, proto.sessions))
        delivery = Delivery(
            proto.delivery_id, proto.attempt, sessions, tuple(proto.removed), proto.partial
        )
        self._ready.put_nowait(delivery)

    def _settle(self, acknowledged: collector_pb2.Acknowledged) -> None:
        for delivery_id in acknowledged.delivery_ids:
            self._held.discard(delivery_id)
            future = self._acknowledging.pop(delivery_id, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def _requests(
        self, outgoing: asyncio.Queue[collector_pb2.SubscribeRequest | None]
    ) -> AsyncIterator[collector_pb2.SubscribeRequest]:
        consumer = self._create.consumer
        yield collector_pb2.SubscribeRequest(hello=self._hello)
        if consumer.HasField("policy_version"):  # the last report may have been lost
            version = collector_pb2.ReportPolicyVersion(policy_version=consumer.policy_version)
            yield collector_pb2.SubscribeRequest(version=version)
        while (message := await outgoing.get()) is not None:
            yield message


def _ended() -> RollmeshError:
    return ShuttingDownError("the subscription has ended; open another")


def _check_credits(field: str, count: object, *, least: int) -> None:
    if not isinstance(count, Integral) or not least <= int(count) <= _MAX_CREDITS:
        raise InvalidFieldError(field, f"is {count!r}; give {least} to {_MAX_CREDITS}")
