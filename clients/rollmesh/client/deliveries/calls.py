"""The client's calls about closed sessions and the consumers that receive them."""

import uuid
from collections.abc import Mapping
from contextlib import aclosing
from typing import Literal

from rollmesh.client.connections import CALL_S, Connections
from rollmesh.client.deliveries.subscription import SubscribeOptions, Subscription
from rollmesh.client.sessions.rewards import Rewards
from rollmesh.client.sessions.trajectories import SessionResult
from rollmesh.runtime.errors import SessionUnknownError
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.v1 import collector_pb2

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
            consumer: Name; a known one goes on where it stopped.
            unit: What one delivery holds.
            credits: Most deliveries that may wait in this process; 0: none comes unless
                `Subscription.grant` asked for it.
            lease_ms: Time to acknowledge, milliseconds.
            options: Where to begin, when groups are whole, what is kept back.
        """
        return Subscription(
            self.addresses.collector,
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
        """Gives a closed session rewards; what is left out stays as it was.

        Args:
            session_id: The session; waits for a while until the collector has it.
            reward: Of the whole session.
            trajectory_rewards: By the ids of `Rewards`; each wins over the session's.
            turn_rewards: By the ids of `Rewards`.
            request_id: Makes the call repeatable by another process too.

        Raises:
            InvalidFieldError: What is given is no reward.
            RollmeshError: The session stays unknown, or lacks the trajectory or turn.
        """
        rewards = Rewards(reward, dict(trajectory_rewards or {}), dict(turn_rewards or {}))
        request = collector_pb2.SetRewardsRequest(
            session_id=session_id,
            rewards=rewards.to_proto(session_id),
            request_id=request_id or uuid.uuid4().hex,
        )
        await self._repeated(self._collector().SetRewards, request, SessionUnknownError)

    async def seek(
        self, consumer: str, position: collector_pb2.Position
    ) -> collector_pb2.SeekResponse:
        """Moves a known consumer; says how many units come again and how many do not come."""
        with typed_errors():
            return await self._collector().Seek(
                collector_pb2.SeekRequest(consumer=consumer, position=position), timeout=CALL_S
            )

    async def drop_consumer(self, consumer: str) -> bool:
        """Forgets a consumer, so that it holds no sessions; says whether it was known."""
        with typed_errors():
            response = await self._collector().DropConsumer(
                collector_pb2.DropConsumerRequest(consumer=consumer), timeout=CALL_S
            )
        return response.known

    async def filtered(self, consumer: str) -> list[collector_pb2.FilteredEntry]:
        """Returns what a subscription's rules kept from a consumer and why, oldest first."""
        request = collector_pb2.ListFilteredRequest(consumer=consumer, page_size=_PAGE)
        entries: list[collector_pb2.FilteredEntry] = []
        with typed_errors():
            while True:
                page = await self._collector().ListFiltered(request, timeout=CALL_S)
                entries += page.entries
                request.page_token = page.next_page_token
                if not page.next_page_token:
                    return entries

    async def stored_session(self, session_id: str) -> SessionResult:
        """Returns a closed session as the collector has it, delivered or not.

        Raises:
            SessionUnknownError: The collector has not got it, or no longer has.
        """
        request = collector_pb2.ReadSessionsRequest(session_id=session_id)
        call = self._collector().ReadSessions(request, timeout=CALL_S)
        async with aclosing(read_stream(call)) as responses:
            response: collector_pb2.ReadSessionsResponse = await anext(responses)
        return SessionResult.from_proto(response.session)

    async def stats(self) -> collector_pb2.GetStatsResponse:
        """Returns how much the collector holds."""
        request = collector_pb2.GetStatsRequest()
        with typed_errors():
            return await self._collector().GetStats(request, timeout=CALL_S)
