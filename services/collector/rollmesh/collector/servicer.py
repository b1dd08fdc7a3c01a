"""CollectorService: validates requests, calls the store, and builds responses."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from rollmesh.collector import metrics
from rollmesh.collector.checks import (
    MAX_SESSIONS,
    check_count,
    check_page_size,
    check_position,
    check_sessions,
)
from rollmesh.collector.delivery.consumer import Consumer
from rollmesh.collector.delivery.settings import created
from rollmesh.collector.delivery.units import Arrival
from rollmesh.collector.scoring.scoring import Scoring, wants_score
from rollmesh.collector.storage.store import Store
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.runtime import clock
from rollmesh.runtime.codec.session_records import check_name
from rollmesh.runtime.errors import (
    ConsumerUnknownError,
    InvalidFieldError,
    SessionDamagedError,
    SessionUnknownError,
    StoreAwayError,
    StoreError,
    StoreFullError,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.runtime.rpc.repeats import Repeats
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2

_READ_PAGE = 100


class CollectorServicer(collector_pb2_grpc.CollectorServiceServicer):
    """Serves the RPCs of one collector."""

    def __init__(self) -> None:
        """Creates a servicer without a store."""
        self._subscriptions: Subscriptions | None = None
        self.scoring: Scoring | None = None
        self.score_hold_ms = 0
        self._duplicates = 0
        self._repeats = Repeats()

    @property
    def subscriptions(self) -> Subscriptions:
        """The open streams and their store; set before the service has started."""
        assert self._subscriptions is not None
        return self._subscriptions

    @subscriptions.setter
    def subscriptions(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions

    @property
    def store(self) -> Store:
        """The session store."""
        return self.subscriptions.store

    async def Ingest(self, request: pb.IngestRequest, context: Context) -> pb.IngestResponse:
        check_count("sessions", request.sessions, MAX_SESSIONS)
        await asyncio.to_thread(check_sessions, request.sessions)
        duplicates = await self.subscriptions.finish(self._ingest(request.sessions))
        await faults.reach("collector-before-ack")
        return pb.IngestResponse(duplicates=duplicates)

    async def CreateConsumer(
        self, request: pb.CreateConsumerRequest, context: Context
    ) -> pb.CreateConsumerResponse:
        consumer = created(request.consumer)
        start = request.start if request.HasField("start") else None
        if start:
            check_position("start", start)
        subscriptions = self.subscriptions

        async def create() -> pb.CreateConsumerResponse:
            made = await subscriptions.finish(subscriptions.create(consumer, start))
            return pb.CreateConsumerResponse(consumer=made)

        return await self._repeats.once(request, create)

    async def GetConsumer(
        self, request: pb.GetConsumerRequest, context: Context
    ) -> pb.GetConsumerResponse:
        return pb.GetConsumerResponse(consumer=await self.store.consumer(request.consumer))

    async def ListConsumers(
        self, request: pb.ListConsumersRequest, context: Context
    ) -> pb.ListConsumersResponse:
        size = check_page_size(request)
        consumers, token = await self.store.consumers(size, request.page_token)
        return pb.ListConsumersResponse(consumers=consumers, next_page_token=token)

    async def UpdateConsumer(
        self, request: pb.UpdateConsumerRequest, context: Context
    ) -> pb.UpdateConsumerResponse:
        subscriptions = self.subscriptions

        async def update() -> pb.UpdateConsumerResponse:
            changed = await subscriptions.finish(subscriptions.update(request.consumer))
            return pb.UpdateConsumerResponse(consumer=changed)

        return await self._repeats.once(request, update)

    async def DeleteConsumer(
        self, request: pb.DeleteConsumerRequest, context: Context
    ) -> pb.DeleteConsumerResponse:
        subscriptions = self.subscriptions

        async def delete() -> pb.DeleteConsumerResponse:
            await subscriptions.finish(subscriptions.delete(request.consumer))
            return pb.DeleteConsumerResponse()

        return await self._repeats.once(request, delete)

    async def Subscribe(
        self, request_iterator: AsyncIterator[pb.SubscribeRequest], context: Context
    ) -> AsyncIterator[pb.SubscribeResponse]:
        async for response in self.subscriptions.stream(request_iterator):
            yield response

    async def SetRewards(
        self, request: pb.SetRewardsRequest, context: Context
    ) -> pb.SetRewardsResponse:
        check_name("request_id", request.request_id)
        duplicate = await self.subscriptions.finish(self._set_rewards(request))
        metrics.REWARDS.labels("repeat" if duplicate else "set").inc()
        return pb.SetRewardsResponse(duplicate=duplicate)

    async def Seek(self, request: pb.SeekRequest, context: Context) -> pb.SeekResponse:
        check_position("position", request.position)
        subscriptions = self.subscriptions

        async def seek() -> pb.SeekResponse:
            work = subscriptions.seek(request.consumer, request.position)
            sought = await subscriptions.finish(work)
            return pb.SeekResponse(again=sought.again, skipped=sought.skipped)

        return await self._repeats.once(request, seek)

    async def ListFiltered(
        self, request: pb.ListFilteredRequest, context: Context
    ) -> pb.ListFilteredResponse:
        size = check_page_size(request)
        entries, token = await self.store.filtered(request.consumer, size, request.page_token)
        return pb.ListFilteredResponse(entries=entries, next_page_token=token)

    async def ListOpenGroups(
        self, request: pb.ListOpenGroupsRequest, context: Context
    ) -> pb.ListOpenGroupsResponse:
        size = check_page_size(request)
        groups, token = await self.store.open_groups(size, request.page_token)
        return pb.ListOpenGroupsResponse(groups=groups, next_page_token=token)

    async def ReadSessions(
        self, request: pb.ReadSessionsRequest, context: Context
    ) -> AsyncIterator[pb.ReadSessionsResponse]:
        arrays = not request.without_arrays
        if request.session_id:
            session = await self.store.session(request.session_id, arrays=arrays)
            yield pb.ReadSessionsResponse(session=session)
            return
        page = await self.store.sessions_after(0, _READ_PAGE)
        while page:
            for _, session_id in page:
                try:
                    session = await self.store.session(session_id, arrays=arrays)
                except SessionUnknownError:  # removed since the page was read
                    continue
                except SessionDamagedError:
                    yield pb.ReadSessionsResponse(damaged_session_id=session_id)
                    continue
                yield pb.ReadSessionsResponse(session=session)
            page = await self.store.sessions_after(page[-1][0], _READ_PAGE)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        counts = await self.store.counts()
        consumers = [await self._stats(consumer) for consumer in self.subscriptions.consumers]
        return pb.GetStatsResponse(
            sessions=counts.sessions,
            trajectories=counts.trajectories,
            complete_groups=counts.complete_groups,
            open_groups=counts.open_groups,
            duplicates=self._duplicates,
            consumers=[stats for stats in consumers if stats is not None],
            waiting_for_rewards=counts.waiting_for_rewards,
            reward_timeouts=counts.reward_timeouts,
            stored_bytes=counts.stored_bytes,
            removed_sessions=counts.removed_sessions,
        )

    async def _stats(self, consumer: Consumer) -> pb.ConsumerStats | None:
        try:
            standing = await self.store.standing(consumer.name)
        except ConsumerUnknownError:  # deleted since
            return None
        return pb.ConsumerStats(
            consumer=consumer.name,
            acknowledged=standing.acknowledged,
            leased=consumer.leased,
            ready=max(standing.open - consumer.leased, 0),
            streams=consumer.streams,
            filtered=standing.filtered,
        )

    async def _ingest(self, sessions: Sequence[session_pb2.SessionRecord]) -> list[bool]:
        """Stores sessions; returns for each whether it was a repeat."""
        await faults.reach("collector-mid-ingest")
        scored = [self.scoring is not None and wants_score(session) for session in sessions]
        arrivals = [
            Arrival(session, self.score_hold_ms if held else None)
            for session, held in zip(sessions, scored, strict=True)
        ]
        try:
            if self.scoring:
                self.scoring.check_room(sum(scored))
            duplicates = await self.store.ingest(arrivals, clock.steady_unix_ms())
        except (StoreFullError, StoreError, StoreAwayError) as error:
            metrics.STORE_ERRORS.labels(error.reason).inc()
            raise
        repeats = sum(duplicates)
        self._duplicates += repeats
        metrics.SESSIONS.labels("repeat").inc(repeats)
        metrics.SESSIONS.labels("stored").inc(len(duplicates) - repeats)
        if not all(duplicates):
            self.subscriptions.announce()
        for session, held, duplicate in zip(sessions, scored, duplicates, strict=True):
            if self.scoring and held and not duplicate:
                self.scoring.add(session.session_id)
        return duplicates

    async def _set_rewards(self, request: pb.SetRewardsRequest) -> bool:
        """Stores rewards; returns whether the request was a repeat."""
        if not request.HasField("rewards"):
            raise InvalidFieldError("rewards", "is missing; give at least one reward")
        duplicate = await self.store.set_rewards(
            request.session_id, request.rewards, request.request_id, clock.steady_unix_ms()
        )
        if not duplicate:
            self.subscriptions.announce()
        return duplicate
