"""The SDK's front door: sessions, rollouts, deliveries and weights of one mesh."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import grpc

from rollmesh.client.arguments import ExportForm, export_mode, filled, outcome_of, read_sampling
from rollmesh.client.deliveries.subscription import SubscribeOptions, Subscription
from rollmesh.client.retries import retried
from rollmesh.client.sessions.session import MeshAddresses, Outcome, Session
from rollmesh.client.sessions.trajectories import SessionResult
from rollmesh.client.sessions.transcripts import Transcript
from rollmesh.client.shielding import shielded
from rollmesh.client.weights.push import (
    Transfer,
    forget_weights,
    init_transfers,
    push_weights,
    weights_of,
)
from rollmesh.runtime.errors import SessionUnknownError
from rollmesh.runtime.rpc.channels import open_channel, read_stream, request_metadata, typed_errors
from rollmesh.v1 import (
    collector_pb2,
    collector_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
)

_TIMEOUT_S = 60.0
_LEAVE_S = 10.0
_PAGE = 1000


class Client(AbstractAsyncContextManager["Client"]):
    """One mesh; use it as a context."""

    def __init__(self, addresses: MeshAddresses) -> None:
        """Takes the addresses; connects when first used."""
        self.addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    @asynccontextmanager
    async def session(  # noqa: PLR0913 - keywords, each with a default
        self,
        *,
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        request_id: str = "",
        reward_timeout_ms: int | None = None,
    ) -> AsyncIterator[Session]:
        """Holds a session open; leaving closes it with `session.rewards`.

        It is closed FAILED after an exception and ABORTED after a cancellation.

        Args:
            group_id: The sessions of one prompt share it; empty makes a group of one.
            sample_index: Place in the group.
            group_size: Number of sessions in the group.
            sampling: Defaults of all turns, by the names of `SamplingParams`.
            metadata: Carried to the trainer.
            export: One trajectory for each leaf of the conversation tree, or for each turn; or
                the tree itself, each token once, as `SessionResult.tree`.
            request_id: Makes opening repeatable.
            reward_timeout_ms: As of `close_session`, where the block ends well.

        Raises:
            RollmeshError: The gateway refuses.
        """
        request = self.session_request(
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=sampling,
            metadata=metadata,
            export=export,
            request_id=request_id,
        )
        session = await self.open_session(request)
        try:
            yield session
        except BaseException as error:
            if not session.closed:
                outcome: Outcome = "FAILED" if isinstance(error, Exception) else "ABORTED"
                await shielded(self.close_session(session, outcome=outcome), _LEAVE_S)
            raise
        if not session.closed:
            await self.close_session(session, reward_timeout_ms=reward_timeout_ms)

    def session_request(
        self,
        *,
        group_id: str = "",
        sample_index: int = 0,
        group_size: int = 1,
        sampling: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        export: ExportForm = "leaves",
        request_id: str = "",
    ) -> gateway_pb2.CreateSessionRequest:
        """Returns what asks for a session; the arguments are those of `session`.

        Raises:
            InvalidFieldError: Names the argument that is wrong.
        """
        return filled(
            gateway_pb2.CreateSessionRequest,
            request_id=request_id,
            group_id=group_id,
            sample_index=sample_index,
            group_size=group_size,
            sampling=read_sampling(sampling),
            metadata=dict(metadata or {}),
            export_mode=export_mode(export),
        )

    async def open_session(self, request: gateway_pb2.CreateSessionRequest) -> Session:
        """Opens a session, trying again while the gateway is full; the caller closes it."""
        if not request.request_id:  # one session, however often it is tried
            request.request_id = uuid.uuid4().hex
        opened = await retried(
            lambda timeout_s: self._gateway().CreateSession(
                request, timeout=timeout_s, metadata=request_metadata(), wait_for_ready=True
            ),
            _TIMEOUT_S,
        )
        base_url = f"http://{self.addresses.sidecar}/sessions/{opened.session_key}/v1"
        return Session(opened.session_id, opened.session_key, base_url)

    async def close_session(
        self,
        session: Session,
        *,
        outcome: Outcome = "COMPLETED",
        metadata: Mapping[str, str] | None = None,
        superseded: bool = False,
        reward_timeout_ms: int | None = None,
    ) -> list[str]:
        """Closes a session with its rewards; returns the ids of its trajectories.

        Args:
            session: The session.
            outcome: How it ended.
            metadata: Added to the session's.
            superseded: Whether another session takes its place in the group.
            reward_timeout_ms: Time for `set_rewards` to come, milliseconds from when the collector
                has the session; it is delivered then, or with them. None delivers it at once.

        Raises:
            InvalidFieldError: A reward is of what the session does not have, or another argument
                is wrong; it stays open.
            RollmeshError: The gateway refuses, or is away for too long.
        """
        request = filled(
            gateway_pb2.CloseSessionRequest,
            session_id=session.session_id,
            session_key=session.api_key,
            outcome=outcome_of(outcome),
            metadata=dict(metadata or {}),
            rewards=session.rewards.to_proto(session.session_id),
            superseded=superseded,
            reward_timeout_ms=reward_timeout_ms,
        )
        response = await retried(
            lambda timeout_s: self._gateway().CloseSession(
                request, timeout=timeout_s, wait_for_ready=True
            ),
            _TIMEOUT_S,
        )
        session.closed = True
        return list(response.trajectory_ids)

    async def transcript(self, session: Session) -> Transcript:
        """Returns what was said so far in an open session."""
        request = gateway_pb2.GetSessionRequest(
            session_id=session.session_id, session_key=session.api_key, with_messages=True
        )
        response = await retried(
            lambda timeout_s: self._gateway().GetSession(
                request, timeout=timeout_s, wait_for_ready=True
            ),
            _TIMEOUT_S,
        )
        return Transcript.from_proto(response)

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
        turn_rewards: Mapping[int, float] | None = None,
        request_id: str = "",
    ) -> None:
        """Gives a closed session rewards; what is left out stays as it was.

        Args:
            session_id: The session; waits for a while until the collector has it.
            reward: Of the whole session.
            trajectory_rewards: By trajectory id; each wins over the session's.
            turn_rewards: By the node id of the turn.
            request_id: Makes the call repeatable by another process too.

        Raises:
            InvalidFieldError: What is given is no reward.
            RollmeshError: The session stays unknown, or lacks the trajectory or turn.
        """
        rewards = filled(
            types_pb2.SessionRewards,
            reward=reward,
            trajectory_rewards=dict(trajectory_rewards or {}),
            turn_rewards=dict(turn_rewards or {}),
        )
        request = collector_pb2.SetRewardsRequest(
            session_id=session_id, rewards=rewards, request_id=request_id or uuid.uuid4().hex
        )
        await retried(
            lambda timeout_s: self._collector().SetRewards(
                request, timeout=timeout_s, wait_for_ready=True
            ),
            _TIMEOUT_S,
            SessionUnknownError,
        )

    async def seek(
        self, consumer: str, position: collector_pb2.Position
    ) -> collector_pb2.SeekResponse:
        """Moves a known consumer; says how many units come again and how many do not come."""
        with typed_errors():
            return await self._collector().Seek(
                collector_pb2.SeekRequest(consumer=consumer, position=position), timeout=_TIMEOUT_S
            )

    async def drop_consumer(self, consumer: str) -> bool:
        """Forgets a consumer, so that it holds no sessions; says whether it was known."""
        with typed_errors():
            response = await self._collector().DropConsumer(
                collector_pb2.DropConsumerRequest(consumer=consumer), timeout=_TIMEOUT_S
            )
        return response.known

    async def push_weights(
        self,
        weights: Mapping[str, Any] | Path | Transfer,
        policy_version: int,
        *,
        mode: Literal["keep", "abort", "wait"] = "keep",
        allow_partial: bool = False,
        model: str = "",
    ) -> list[router_pb2.EngineResult]:
        """Gives all engines of a model new weights; what is sampled next carries the version.

        Args:
            weights: torch tensors or NumPy arrays by the checkpoint's names, where no disk is
                shared; a directory of safetensors files, where every engine can read it; or a
                `Transfer`, where GPUs of trainer and engines share NCCL or a machine, after
                `init_weight_transfer`. Late engines wait for the push after a `Transfer`.
            policy_version: Above the last one, which `policy_version` returns.
            mode: What happens to running requests; "keep" lets them go on with the new weights.
            allow_partial: Whether an engine that failed is told by its result only.
            model: Name of the model; empty where the mesh has one.

        Returns:
            One result per engine.

        Raises:
            WeightsPushError: An engine did not take them.
        """
        return await push_weights(
            self._router(), weights, policy_version, mode, model, allow_partial=allow_partial
        )

    async def policy_version(self, model: str = "") -> int:
        """Returns the highest policy version that engines were offered; 0 before the first push."""
        return weights_of(await self.replicas(), model).last_policy_version

    async def forget_weights(self, model: str = "") -> router_pb2.ForgetWeightsResponse:
        """Makes the router forget what was pushed, so that the next push may have any version."""
        return await forget_weights(self._router(), model)

    async def init_weight_transfer(
        self,
        backend: str,
        init_info: Mapping[str, Any],
        by_engine: Mapping[str, Any] | None = None,
        model: str = "",
    ) -> list[router_pb2.EngineResult]:
        """Makes all engines join the trainer by a transfer backend; it joins in another thread.

        Args:
            backend: Name of the backend that the engines were started with: nccl, ipc.
            init_info: What vLLM's `init_weight_transfer_engine` takes.
            by_engine: Fields of `init_info` that differ, such as `rank_offset`, by engine id.
            model: Name of the model; empty where the mesh has one.

        Raises:
            WeightsPushError: An engine did not join.
        """
        return await init_transfers(self._router(), backend, init_info, by_engine or {}, model)

    async def replicas(self) -> router_pb2.ListReplicasResponse:
        """Returns who is in the mesh."""
        request = router_pb2.ListReplicasRequest()
        with typed_errors():
            return await self._router().ListReplicas(request, timeout=_TIMEOUT_S)

    async def filtered(self, consumer: str) -> list[collector_pb2.FilteredEntry]:
        """Returns what a subscription's rules kept from a consumer and why, oldest first."""
        request = collector_pb2.ListFilteredRequest(consumer=consumer, page_size=_PAGE)
        entries: list[collector_pb2.FilteredEntry] = []
        with typed_errors():
            while True:
                page = await self._collector().ListFiltered(request, timeout=_TIMEOUT_S)
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
        call = self._collector().ReadSessions(request, timeout=_TIMEOUT_S)
        async with aclosing(read_stream(call)) as responses:
            response: collector_pb2.ReadSessionsResponse = await anext(responses)
        return SessionResult.from_proto(response.session)

    async def stats(self) -> collector_pb2.GetStatsResponse:
        """Returns how much the collector holds."""
        request = collector_pb2.GetStatsRequest()
        with typed_errors():
            return await self._collector().GetStats(request, timeout=_TIMEOUT_S)

    def _router(self) -> "router_pb2_grpc.RouterServiceAsyncStub":
        return router_pb2_grpc.RouterServiceStub(self._channel(self.addresses.router))

    def _collector(self) -> "collector_pb2_grpc.CollectorServiceAsyncStub":
        return collector_pb2_grpc.CollectorServiceStub(self._channel(self.addresses.collector))

    def _gateway(self) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        return gateway_pb2_grpc.GatewayServiceStub(self._channel(self.addresses.gateway))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]
