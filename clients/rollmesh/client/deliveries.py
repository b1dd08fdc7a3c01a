"""A consumer's stream of sessions or groups, with credits and acknowledgements."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, Protocol, Self

import grpc

from rollmesh.client.arguments import PURPOSES, Purpose, chosen, filled
from rollmesh.client.runs import RunCalls, numbered
from rollmesh.client.sessions import Delivery, Rewards, SessionResult
from rollmesh.mesh import CollectorDirectory
from rollmesh.runtime import Background, Backoff
from rollmesh.runtime.errors import (
    ConsumerExistsError,
    ConsumerMovedError,
    ConsumerUnknownError,
    DeadlineError,
    InvalidFieldError,
    RollmeshError,
    RunAbandonedError,
    SessionUnknownError,
    ShuttingDownError,
)
from rollmesh.runtime.rpc import read_stream, stub_of, typed_errors
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, sampling_pb2

_log = logging.getLogger(__name__)
_CALL_S = 60.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_MAX_CREDITS, _PAGE = 65_536, 1000
_LOOK_S = 1.0
"""How long nothing comes before a wait for groups looks for filtered ones."""
_MOST_NAMED = 8
_MAX_ACKNOWLEDGED = 4096
"""Of one message."""
_UNITS = {
    "session": collector_pb2.DELIVERY_UNIT_SESSION,
    "group": collector_pb2.DELIVERY_UNIT_GROUP,
}


class Ended(Protocol):
    """A group that has ended: a `GroupOutcome`."""

    @property
    def run_id(self) -> str:
        """Id of its run."""
        ...

    @property
    def group_id(self) -> str:
        """Its id."""
        ...


@dataclass(frozen=True, kw_only=True)
class SubscribeOptions:
    """Optional settings of a consumer. See docs/delivery.md."""

    start: collector_pb2.Position | None = None
    """Where a new consumer starts. None: at the oldest session."""
    groups: collector_pb2.GroupPolicy | None = None
    """When a group is delivered. None: when all its samples have arrived."""
    filter: collector_pb2.DeliveryFilter | None = None
    """The filter. None: everything passes."""
    policy_version: int | None = None
    """The version being trained. Update it with `Subscription.report_version`."""
    run: sampling_pb2.PolicyRun | None = None
    """The trainer's run. None: the only run that the client has opened, or the first."""
    teacher: str = ""
    """Name of a model of the mesh that scores every trajectory before its delivery. It must have
    the tokenizer of the policy. Empty: none."""
    top_k: int = 0
    """Number of most likely ids that the teacher names at each position, at most 256."""
    messages: bool = False
    """Whether deliveries have recorded messages, for `SessionResult.conversation`."""
    records: bool = False
    """Whether deliveries have their sessions as messages, too: `Delivery.records`."""


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
            collectors: The collectors, which it closes, or host:port of one, or several, separated
                by commas.
            consumer: Its name. A known consumer resumes where it stopped.
            unit: Whether a delivery holds a session or a group.
            credits: Maximum number of deliveries that wait in this process. 0: deliveries come only
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
        self._run = run = options.run or sampling_pb2.PolicyRun()
        self._hello = filled(collector_pb2.SubscribeHello, consumer=consumer, run=run.number)
        settings = filled(
            collector_pb2.Consumer,
            name=consumer,
            unit=chosen("unit", unit, _UNITS),
            lease_ms=lease_ms,
            groups=options.groups or collector_pb2.GroupPolicy(),
            filter=options.filter or collector_pb2.DeliveryFilter(),
            policy_run=run,
            policy_version=numbered(run, options.policy_version),
            teacher=filled(collector_pb2.Teacher, model=options.teacher, top_k=options.top_k),
            messages=options.messages,
        )
        self._create = filled(
            collector_pb2.CreateConsumerRequest, consumer=settings, start=options.start
        )
        self._created = False
        self._records = options.records
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
        """Starts reading and returns at once."""
        await super().__aenter__()
        # However the task ends, nobody keeps waiting for its deliveries.
        if self._task is not None:
            ended = ShuttingDownError("the subscription has ended; open another")
            self._task.add_done_callback(lambda _: self._refuse(ended))
        return self

    def __aiter__(self) -> AsyncIterator[Delivery]:
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

    async def until(
        self, ended: Iterable[Ended], *, timeout_s: float = 600.0
    ) -> AsyncIterator[Delivery]:
        """Iterates over deliveries until each of these groups has come, or was filtered.

        Groups of an earlier run may come first.

        Args:
            ended: The groups, as a rollout yields them.
            timeout_s: Longest wait for the next delivery.

        Raises:
            DeadlineError: The collector delivers nothing, and groups are missing. It names them.
            ShuttingDownError: The subscription has ended.
            RollmeshError: The collector refuses the subscription.
        """
        missing = {(one.run_id, one.group_id) for one in ended}
        now, page = asyncio.get_running_loop().time, ""
        since_s = now()
        while missing:
            try:
                async with asyncio.timeout(_LOOK_S):
                    delivery = await anext(self)
            except TimeoutError:
                filtered, page = await self._filtered(page)
                missing -= filtered
                if missing and now() - since_s > timeout_s:
                    names = ", ".join(sorted(group_id for _, group_id in missing)[:_MOST_NAMED])
                    raise DeadlineError(
                        f"{len(missing)} groups did not come in {timeout_s:g} s: {names}; a seat "
                        "of each is open (client.abandon_seat), or the collector is away"
                    ) from None
                continue
            missing.discard((delivery.run_id, delivery.group_id))
            yield delivery
            since_s = now()

    async def _filtered(self, page: str) -> tuple[set[tuple[str, str]], str]:
        """Returns the groups that were filtered from a page of the list on, and its last page."""
        request = collector_pb2.ListFilteredRequest(
            consumer=self._hello.consumer, page_size=_PAGE, page_token=page
        )

        async def read(channel: grpc.aio.Channel) -> collector_pb2.ListFilteredResponse:
            stub = stub_of(channel, collector_pb2_grpc.CollectorServiceStub)
            with typed_errors():
                found: collector_pb2.ListFilteredResponse
                found = await stub.ListFiltered(request, timeout=_CALL_S)
                return found

        groups: set[tuple[str, str]] = set()
        try:
            while True:
                found = await self._collectors.call(read)
                groups |= {
                    (one.run_id, one.group_id)
                    for one in found.entries
                    if one.reason and not one.session_id
                }
                if not found.next_page_token:
                    break
                request.page_token = found.next_page_token
        except RollmeshError as error:  # the next look asks again
            _log.info("filtered groups were not read", extra=fields(error=str(error)))
        return groups, request.page_token

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
        """Acknowledges deliveries and returns when the collector has stored it durably.

        Raises:
            ShuttingDownError: The subscription has ended. The deliveries will be redelivered.
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
        number = numbered(self._run, policy_version)
        message = filled(collector_pb2.ReportPolicyVersion, policy_version=number)
        self._create.consumer.policy_version = message.policy_version  # for the next stream
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
                except (InvalidFieldError, RunAbandonedError) as error:
                    self._refuse(error)
                    return
                except (ConsumerMovedError, ConsumerUnknownError) as error:
                    self._created = isinstance(error, ConsumerMovedError)
                    # The collector resends deliveries that wait here, from the new position on.
                    while not self._ready.empty():
                        item = self._ready.get_nowait()
                        if isinstance(item, Delivery):
                            self._held.discard(item.delivery_id)
                except RollmeshError as error:
                    _log.info("collector unreachable", extra=fields(error=str(error)))
                await asyncio.sleep(self._backoff.next_s())
        finally:
            await self._collectors.aclose()

    def _refuse(self, error: RollmeshError) -> None:
        """Fails all current and future waits with an error. The first error wins."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._ready.put_nowait(error)
        for future in self._acknowledging.values():
            if not future.done():
                future.set_exception(error)

    async def _hold_stream(self, channel: grpc.aio.Channel) -> None:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        if not self._created:
            try:
                with typed_errors():
                    made = await stub.CreateConsumer(self._create, timeout=_CALL_S)
                said = fields(consumer=made.consumer.name, stored_units=made.stored_units)
                _log.info("consumer created", extra=said)
            except ConsumerExistsError:
                update = collector_pb2.UpdateConsumerRequest(consumer=self._create.consumer)
                with typed_errors():
                    await stub.UpdateConsumer(update, timeout=_CALL_S)
            self._created = True
        # What was granted while the consumer was created is in the credits that follow.
        self._outgoing = asyncio.Queue()
        if self._acknowledging:  # the broken stream may have lost them
            self._send_acknowledgements(list(self._acknowledging))
        if (wanted := self._credits - self._ready.qsize()) > 0:
            self._grant(wanted)
        call = stub.Subscribe(self._requests(self._outgoing))
        try:
            async with aclosing(read_stream(call)) as responses:
                async for response in responses:
                    self._backoff.reset()
                    for delivery_id in response.acknowledged.delivery_ids:
                        self._held.discard(delivery_id)
                        future = self._acknowledging.pop(delivery_id, None)
                        if future is not None and not future.done():
                            future.set_result(None)
                    if not response.HasField("delivery"):
                        continue
                    proto = response.delivery
                    if proto.delivery_id in self._held:  # redelivered after a restart
                        self._grant(1)
                        continue
                    self._held.add(proto.delivery_id)
                    delivery = Delivery(
                        proto.delivery_id,
                        proto.attempt,
                        tuple(map(SessionResult.from_proto, proto.sessions)),
                        tuple(proto.removed),
                        proto.partial,
                        tuple(proto.sessions) if self._records else (),
                    )
                    self._ready.put_nowait(delivery)
        finally:
            self._outgoing.put_nowait(None)  # ends the request iterator

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


def _check_credits(field: str, count: object, *, least: int) -> None:
    if not isinstance(count, Integral) or not least <= int(count) <= _MAX_CREDITS:
        raise InvalidFieldError(field, f"is {count!r}; give {least} to {_MAX_CREDITS}")


# The client's calls about closed sessions and the consumers that receive them.


class DeliveryCalls(RunCalls):
    """Subscribes to the collector, and reads and scores its sessions."""

    def subscribe(
        self,
        consumer: str,
        *,
        unit: Literal["session", "group"] = "group",
        credits: int = 8,  # noqa: A002 - the protocol's word
        lease_ms: int = 600_000,
        options: SubscribeOptions | None = None,
    ) -> Subscription:
        """Returns a subscription: `async with ... as groups: async for delivery in groups: ...`.

        Args:
            consumer: Its name. A known consumer gets these settings and resumes where it stopped.
            unit: Whether a delivery holds a session or a group.
            credits: Maximum number of deliveries that wait in this process. 0: deliveries come only
                when `Subscription.grant` asks for them.
            lease_ms: Time to acknowledge a delivery, milliseconds.
            options: Start position, group policy, filter and run.
        """
        options = options or SubscribeOptions()
        return Subscription(
            CollectorDirectory(self.addresses.router, self.addresses.collector, self._identity),
            consumer=consumer,
            unit=unit,
            credits=credits,
            lease_ms=lease_ms,
            options=replace(options, run=self._only_run(options.run)),
        )

    async def set_rewards(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        trajectory_rewards: Mapping[str, float] | None = None,
        turn_rewards: Mapping[str | int, float] | None = None,
        request_id: str = "",
    ) -> None:
        """Sets rewards of a closed session. Omitted ones keep their value.

        Args:
            session_id: The session. The call waits a while until the collector has it.
            reward: Reward of the whole session.
            trajectory_rewards: By the ids of `Rewards`. Each wins over the session's.
            turn_rewards: By the ids of `Rewards`.
            request_id: Lets another process repeat the call.

        Raises:
            InvalidFieldError: A reward is not a finite number.
            RollmeshError: The session stays unknown, or has no such trajectory or turn.
        """
        rewards = Rewards(reward, dict(trajectory_rewards or {}), dict(turn_rewards or {}))
        request = collector_pb2.SetRewardsRequest(
            session_id=session_id,
            rewards=rewards.to_proto(session_id),
            request_id=request_id or uuid.uuid4().hex,
        )
        await self._at_collector(lambda stub: stub.SetRewards, request, SessionUnknownError)

    async def abandon_seat(  # noqa: PLR0913 - keywords, each with a default
        self,
        group_id: str,
        sample_index: int,
        group_size: int,
        *,
        reason: str,
        model: str = "",
        purpose: Purpose = "train",
        metadata: Mapping[str, str] | None = None,
        run_id: str = "",
    ) -> None:
        """Ends a seat of a group that no session will take, so that the group need not wait for it.

        The group is delivered with a `SessionResult` that has the reason in `abandoned`. A rollout
        calls this itself.

        Args:
            group_id: The group.
            sample_index: The seat.
            group_size: Number of seats in the group.
            reason: Why no session takes the seat, up to 4,096 characters.
            model: Name of the model that would have answered.
            purpose: The purpose of the group's sessions.
            metadata: Metadata of the group's sessions.
            run_id: The run of the group.

        Raises:
            InvalidFieldError: A field is invalid.
            RollmeshError: The collectors are unavailable for too long.
        """
        request = filled(
            collector_pb2.AbandonSeatRequest,
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            reason=reason,
            model=model,
            purpose=chosen("purpose", purpose, PURPOSES),
            metadata=dict(metadata or {}),
            run_id=run_id,
        )
        await self._at_collector(lambda stub: stub.AbandonSeat, request)

    async def seek(
        self, consumer: str, position: collector_pb2.Position
    ) -> collector_pb2.SeekResponse:
        """Moves a known consumer. Returns the numbers of units redelivered and skipped."""
        request = collector_pb2.SeekRequest(
            consumer=consumer, position=position, request_id=uuid.uuid4().hex
        )
        return await self._at_collector(lambda stub: stub.Seek, request)

    async def consumers(self) -> list[collector_pb2.Consumer]:
        """Returns all consumers, ordered by name."""
        request = collector_pb2.ListConsumersRequest(page_size=_PAGE)
        pages = self._pages(lambda stub: stub.ListConsumers, request)
        return [one async for page in pages for one in page.consumers]

    async def update_consumer(self, changes: collector_pb2.Consumer) -> collector_pb2.Consumer:
        """Changes the settings of a consumer and returns it as it is now.

        Args:
            changes: The consumer's `name`, and the settings that change. See `UpdateConsumer` in
                `collector.proto`. A new group policy ends the consumer's streams, which subscribe
                again by themselves.

        Raises:
            ConsumerUnknownError: No consumer has this name.
            InvalidFieldError: A setting is invalid.
        """
        request = collector_pb2.UpdateConsumerRequest(consumer=changes, request_id=uuid.uuid4().hex)
        return (await self._at_collector(lambda stub: stub.UpdateConsumer, request)).consumer

    async def delete_consumer(self, consumer: str) -> None:
        """Deletes a consumer, which then retains no sessions.

        Raises:
            ConsumerUnknownError: No consumer has this name.
        """
        request = collector_pb2.DeleteConsumerRequest(
            consumer=consumer, request_id=uuid.uuid4().hex
        )
        tries = 0

        def method(stub: "collector_pb2_grpc.CollectorServiceAsyncStub") -> Any:
            nonlocal tries
            tries += 1
            return stub.DeleteConsumer

        try:
            await self._at_collector(method, request)
        except ConsumerUnknownError:
            if tries == 1:  # otherwise an earlier try may have deleted it at another collector
                raise

    async def filtered(self, consumer: str) -> list[collector_pb2.FilteredEntry]:
        """Returns the units filtered for a consumer, with reasons, oldest first."""
        request = collector_pb2.ListFilteredRequest(consumer=consumer, page_size=_PAGE)
        pages = self._pages(lambda stub: stub.ListFiltered, request)
        return [one async for page in pages for one in page.entries]

    async def _pages(
        self,
        method: Callable[["collector_pb2_grpc.CollectorServiceAsyncStub"], Any],
        request: collector_pb2.ListConsumersRequest | collector_pb2.ListFilteredRequest,
    ) -> AsyncIterator[Any]:
        while True:
            page = await self._at_collector(method, request)
            yield page
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    async def stats(self) -> collector_pb2.GetStatsResponse:
        """Returns how much is stored. Streams and leases belong to one collector."""
        request = collector_pb2.GetStatsRequest()
        return await self._at_collector(lambda stub: stub.GetStats, request)
