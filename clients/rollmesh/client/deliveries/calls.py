"""The client's calls about closed sessions and the consumers that receive them."""

import uuid
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

import grpc

from rollmesh.client.connections import CALL_S, Connections
from rollmesh.client.deliveries.subscription import SubscribeOptions, Subscription
from rollmesh.client.sessions.rewards import Rewards
from rollmesh.client.sessions.trajectories import SessionResult
from rollmesh.mesh.directories.members import CollectorDirectory
from rollmesh.runtime.errors import ConsumerUnknownError, SessionUnknownError
from rollmesh.runtime.rpc.channels import read_stream, stub_of
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2

_PAGE = 1000


class DeliveryCalls(Connections):
    """Subscribes to the collector, and reads and scores what it holds."""

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
            consumer: Its name; a known consumer gets these settings and resumes where it stopped.
            unit: Whether a delivery holds a session or a group.
            credits: Maximum number of deliveries that wait in this process; 0: deliveries come only
                when `Subscription.grant` asks for them.
            lease_ms: Time to acknowledge a delivery, milliseconds.
            options: Start position, group policy and filter.
        """
        return Subscription(
            CollectorDirectory(self.addresses.router, self.addresses.collector, self._identity),
            consumer=consumer,
            unit=unit,
            credits=credits,
            lease_ms=lease_ms,
            options=options,
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
        """Sets rewards of a closed session; omitted ones keep their value.

        Args:
            session_id: The session; the call waits a while until the collector has it.
            reward: Reward of the whole session.
            trajectory_rewards: By the ids of `Rewards`; each wins over the session's.
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

    async def seek(
        self, consumer: str, position: collector_pb2.Position
    ) -> collector_pb2.SeekResponse:
        """Moves a known consumer; returns how many units are redelivered and how many skipped."""
        request = collector_pb2.SeekRequest(
            consumer=consumer, position=position, request_id=uuid.uuid4().hex
        )
        sought: collector_pb2.SeekResponse
        sought = await self._at_collector(lambda stub: stub.Seek, request)
        return sought

    async def consumers(self) -> list[collector_pb2.Consumer]:
        """Returns all consumers, ordered by name."""
        request = collector_pb2.ListConsumersRequest(page_size=_PAGE)
        consumers: list[collector_pb2.Consumer] = []
        while True:
            page = await self._at_collector(lambda stub: stub.ListConsumers, request)
            consumers += page.consumers
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return consumers

    async def update_consumer(self, changes: collector_pb2.Consumer) -> collector_pb2.Consumer:
        """Changes the settings of a consumer; returns it as it is now.

        Args:
            changes: The consumer's `name`, and the settings that change; see `UpdateConsumer` in
                `collector.proto`. A new group policy ends the consumer's streams, which subscribe
                again by themselves.

        Raises:
            ConsumerUnknownError: No consumer has this name.
            InvalidFieldError: A setting is invalid.
        """
        request = collector_pb2.UpdateConsumerRequest(consumer=changes, request_id=uuid.uuid4().hex)
        response: collector_pb2.UpdateConsumerResponse
        response = await self._at_collector(lambda stub: stub.UpdateConsumer, request)
        return response.consumer

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
        """Returns what was filtered out for a consumer, and why, oldest first."""
        request = collector_pb2.ListFilteredRequest(consumer=consumer, page_size=_PAGE)
        entries: list[collector_pb2.FilteredEntry] = []
        while True:
            page = await self._at_collector(lambda stub: stub.ListFiltered, request)
            entries += page.entries
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return entries

    async def stored_session(self, session_id: str) -> SessionResult:
        """Returns a closed session from the collector, delivered or not.

        Raises:
            SessionUnknownError: The collector does not have it, or has removed it.
        """
        request = collector_pb2.ReadSessionsRequest(session_id=session_id)

        async def read(channel: grpc.aio.Channel) -> session_pb2.SessionRecord:
            stub = stub_of(channel, collector_pb2_grpc.CollectorServiceStub)
            call = stub.ReadSessions(request, timeout=CALL_S)
            async with aclosing(read_stream(call)) as responses:
                response: collector_pb2.ReadSessionsResponse = await anext(responses)
            return response.session

        return SessionResult.from_proto(await self._collectors.call(read))

    async def stats(self) -> collector_pb2.GetStatsResponse:
        """Returns how much is stored; streams and leases are those of one collector."""
        stats: collector_pb2.GetStatsResponse
        stats = await self._at_collector(
            lambda stub: stub.GetStats, collector_pb2.GetStatsRequest()
        )
        return stats
