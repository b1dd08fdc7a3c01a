"""The router as a service: checks requests, applies them to its state and answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import grpc

from rollmesh.internal.v1 import (
    leases_pb2_grpc,
    members_pb2,
    members_pb2_grpc,
    peers_pb2_grpc,
    tunnels_pb2_grpc,
)
from rollmesh.mesh import Tunnels
from rollmesh.router import metrics
from rollmesh.router.config import RouterConfig
from rollmesh.router.dispatch import Dispatch, warn_of_misfits
from rollmesh.router.engines import CircuitLimits, Engine
from rollmesh.router.kept import revision_of
from rollmesh.router.leases import LeaseTable
from rollmesh.router.membership import Members
from rollmesh.router.models import Models, call_engine
from rollmesh.router.pushes import Pushes
from rollmesh.runtime import begun
from rollmesh.runtime.access import caller_roles
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    NoEngineError,
    RoleRefusedError,
    ShuttingDownError,
    check_name,
)
from rollmesh.runtime.rpc import (
    Context,
    Repeats,
    check_action,
    check_address,
    chunks_of,
    drained_on_refusal,
    header_of,
    is_tunnel,
    open_channel,
    read_stream,
    request_metadata,
    tunnel_address,
)
from rollmesh.runtime.telemetry import count_refused
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc, server_pb2

_Answer = TypeVar("_Answer")
_MAX_INTERVAL_MS = 60_000
_RETRY_MS = 500
_NEEDED = {
    router_pb2.REPLICA_KIND_ENGINE: "model",
    router_pb2.REPLICA_KIND_GATEWAY: "model",
    router_pb2.REPLICA_KIND_COLLECTOR: "store_id",
}
"""By kind: the field that its members must give."""


class RouterService(
    router_pb2_grpc.RouterServiceServicer,
    members_pb2_grpc.MembershipServiceServicer,
):
    """One router process. Its state is built from its members' reports.

    Control calls go to all engines of a model in parallel and return a result per engine. Engines
    are told the request id of the call, so a repeat at another router does nothing again.
    """

    names = (
        "rollmesh.v1.RouterService",
        "rollmesh.internal.v1.MembershipService",
        "rollmesh.internal.v1.LeaseService",
        "rollmesh.internal.v1.PeerService",
        "rollmesh.internal.v1.TunnelService",
    )
    capabilities: frozenset[server_pb2.Capability.ValueType] = frozenset()

    def __init__(self, config: RouterConfig) -> None:
        self.table = LeaseTable(
            imbalance_margin=config.imbalance_margin,
            queue_limit=config.queue_limit,
            shares=config.shares(),
            circuits=CircuitLimits(
                config.circuit_losses, config.circuit_first_ms, config.circuit_longest_ms
            ),
        )
        metrics.watch(self.table)
        self._timeout_s = config.control_timeout_ms / 1000
        self._pin_ms = config.pin_ms
        self._members = Members(config.missed_reports)
        self._models = Models(self.table.fleet, self._members, config)
        self._pushes = Pushes(self._models, config)
        self._tunnels = Tunnels()
        self._router_id = uuid.uuid4().hex
        self.dispatch = Dispatch(self.table, self._router_id)
        self._repeats = Repeats()
        self._writes = 0
        """Number of running pushes and control calls, which need the members."""
        self._drains = False
        self._ended: ShuttingDownError | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the services."""
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)
        members_pb2_grpc.add_MembershipServiceServicer_to_server(self, server)
        leases_pb2_grpc.add_LeaseServiceServicer_to_server(self.dispatch, server)
        peers_pb2_grpc.add_PeerServiceServicer_to_server(self._pushes.peers, server)
        tunnels_pb2_grpc.add_TunnelServiceServicer_to_server(self._tunnels, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Restores the kept weights, and runs the updates of engines and the leases.

        Raises:
            StoreError: The folder of weights cannot be read or written.
        """
        async with self._pushes.running(), self.dispatch.running(), asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._members.watch())
            try:
                yield
            finally:
                watch.cancel()

    async def ready(self) -> None:
        """Returns at once: members may register at any time."""

    async def failed(self) -> str:
        """Waits forever: a router can only fail together with its process."""
        await asyncio.Event().wait()
        return ""

    async def drain(self) -> None:
        """Ends the streams of members once no push or control call needs them."""
        self._drains = True
        self._models.pins.end()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._drains and not self._writes and self._ended is None:
            problem = "the router is shutting down; reconnect, or use another router"
            self._ended = ShuttingDownError(problem, retry_delay_ms=_RETRY_MS)
            self._members.end(self._ended)
            self.dispatch.end(self._ended)
            self._tunnels.end()

    async def Register(
        self, request_iterator: AsyncIterator[members_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[members_pb2.RegisterResponse]:
        first = await anext(request_iterator, None)
        if self._ended is not None:
            raise self._ended
        member = await self._members.join(_checked_hello(first))
        engine, hello = None, member.hello
        if hello.kind == router_pb2.REPLICA_KIND_ENGINE:
            engine = Engine(
                hello.replica_id,
                hello.address,
                hello.model,
                hello.lease_capacity,
                tokenizer_sha256=hello.tokenizer_sha256,
                vocabulary_tokens=hello.vocabulary_tokens,
                numerics=hello.numerics,
                max_adapters=hello.max_adapters,
                tunnels=frozenset() if is_tunnel(hello.address) else None,
            )
            _take_load(engine, hello.load)
            self.table.add_engine(engine)
            warn_of_misfits(self.table.fleet)
            self._pushes.joined(engine)
        try:
            yield members_pb2.RegisterResponse(router_id=self._router_id)
            async with self._members.reporting(member):
                async for message in request_iterator:
                    if not message.HasField("load"):
                        raise InvalidFieldError("load", "is missing; after the hello, send loads")
                    self._members.reported(member, message.load)
                    if engine is not None:
                        _take_load(engine, message.load)
                        if engine.tunnels is not None:
                            self.table.judge(engine)
                        self.table.fleet.changed(engine)
                        self._pushes.heed(engine)
                    if message.number:
                        yield members_pb2.RegisterResponse(
                            router_id=self._router_id,
                            number=message.number,
                            lost_adapters=await self._models.lost_adapters(member.hello),
                        )
        except DeadlineError:  # it fell silent
            if engine is not None:
                self.dispatch.warn_of_silence(engine)
            if member.hello.kind == router_pb2.REPLICA_KIND_GATEWAY:
                self.dispatch.end_streams(member.hello.replica_id)
            raise
        finally:
            self._members.leave(member)
            if engine is not None:
                self._pushes.gone(engine)
                if self.table.engines.get(engine.engine_id) is engine:
                    self.table.remove_engine(engine.engine_id)

    async def PlaceSession(
        self, request: router_pb2.PlaceSessionRequest, context: Context
    ) -> router_pb2.PlaceSessionResponse:
        gateway = self._members.place(request.model, self._models.names())
        return router_pb2.PlaceSessionResponse(gateway=gateway)

    async def ListGateways(
        self, request: router_pb2.ListGatewaysRequest, context: Context
    ) -> router_pb2.ListGatewaysResponse:
        return router_pb2.ListGatewaysResponse(
            gateways=[one.as_gateway() for one in self._members.gateways()],
            models=sorted(self._models.names()),
            adapters=sorted(
                {one.name for kept in self._models.all_kept.values() for one in kept.retained}
            ),
        )

    async def ListReplicas(
        self, request: router_pb2.ListReplicasRequest, context: Context
    ) -> router_pb2.ListReplicasResponse:
        response = router_pb2.ListReplicasResponse(models=self._models.weights())
        for hello in self._members.hellos():
            if request.kind not in (router_pb2.REPLICA_KIND_UNSPECIFIED, hello.kind):
                continue
            replica = response.replicas.add(hello=hello)
            replica.hello.ClearField("instance_id")  # by it a process takes over its own stream
            engine = self.table.engines.get(hello.replica_id)
            if engine is not None and hello.kind == router_pb2.REPLICA_KIND_ENGINE:
                replica.leases = engine.leases
                replica.sessions = len(engine.sessions)
                replica.fenced = self.table.fleet.fenced(engine)
                replica.circuit = engine.circuit.state
                if exclusion := self.table.fleet.exclusion(engine):
                    replica.exclusion.CopyFrom(exclusion)
        return response

    async def RelayScoreTokens(
        self, request: router_pb2.RelayScoreTokensRequest, context: Context
    ) -> AsyncIterator[router_pb2.RelayScoreTokensResponse]:
        check_name("engine_id", request.engine_id)
        engine = self.table.engines.get(request.engine_id)
        if engine is None:
            raise NoEngineError(
                f"engine {request.engine_id} is not registered; try another one",
                retry_delay_ms=_RETRY_MS,
            )
        async with open_channel(engine.address) as channel:
            stub: engine_pb2_grpc.EngineServiceAsyncStub
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            call = stub.ScoreTokens(
                request.request, timeout=context.time_remaining(), metadata=request_metadata()
            )
            async with aclosing(read_stream(call)) as parts:
                async for part in parts:
                    yield router_pb2.RelayScoreTokensResponse(part=part)

    async def ControlEngines(
        self, request: engine_pb2.ControlEnginesRequest, context: Context
    ) -> engine_pb2.ControlEnginesResponse:
        check_action(request)

        async def control() -> engine_pb2.ControlEnginesResponse:
            sent = engine_pb2.ControlEnginesRequest()
            sent.CopyFrom(request)
            sent.model = await self._models.named(request.model)

            async def call(
                stub: "engine_pb2_grpc.EngineServiceAsyncStub",
            ) -> engine_pb2.EngineResult:
                return (await stub.ControlEngines(sent, timeout=self._timeout_s)).results[0]

            if request.HasField("unload_adapter"):
                adapter = request.unload_adapter.adapter
                await begun(self._pushes.tasks, self._pushes.forget_adapter(sent.model, adapter))
            engines = self._models.fleet.of_model(sent.model)
            own = request.init_weight_transfer.init_json_by_engine
            if missing := own.keys() - {one.engine_id for one in engines}:
                raise InvalidFieldError(
                    "init_weight_transfer.init_json_by_engine",
                    f"{', '.join(sorted(missing))}: not registered; call ListReplicas",
                )
            return engine_pb2.ControlEnginesResponse(
                results=await asyncio.gather(*(call_engine(one, call) for one in engines))
            )

        return await self._write(request, control)

    async def PushWeights(
        self, request_iterator: AsyncIterator[router_pb2.PushWeightsRequest], context: Context
    ) -> router_pb2.PushWeightsResponse:
        async with drained_on_refusal(request_iterator):
            given = await header_of(request_iterator)

            async def push() -> router_pb2.PushWeightsResponse:
                source = given.WhichOneof("source")
                header = engine_pb2.UpdateWeightsHeader(
                    policy_version=given.policy_version,
                    pause_mode=given.pause_mode,
                    model=given.model,
                    keep_file=given.keep_file,
                    base_push_id=given.base_push_id,
                    **({source: getattr(given, source)} if source else {}),
                )
                version, results = await self._pushes.push(
                    header,
                    chunks_of(request_iterator),
                    given.request_id,
                    context.time_remaining(),
                )
                return router_pb2.PushWeightsResponse(
                    policy_version=version, results=results, push_id=header.push_id
                )

            return await self._write(given, push)

    async def PinWeights(
        self, request: router_pb2.PinWeightsRequest, context: Context
    ) -> router_pb2.PinWeightsResponse:
        model = await self._pushes.pin(request)
        return router_pb2.PinWeightsResponse(model=model, renew_ms=self._pin_ms)

    async def PushAdapter(
        self, request_iterator: AsyncIterator[router_pb2.PushAdapterRequest], context: Context
    ) -> router_pb2.PushAdapterResponse:
        async with drained_on_refusal(request_iterator):
            given = await header_of(request_iterator)

            async def push() -> router_pb2.PushAdapterResponse:
                header = engine_pb2.AdapterHeader()
                header.CopyFrom(given)
                results = await self._pushes.push_adapter(header, chunks_of(request_iterator))
                return router_pb2.PushAdapterResponse(results=results)

            return await self._write(given, push)

    async def OpenRun(
        self, request: router_pb2.OpenRunRequest, context: Context
    ) -> router_pb2.OpenRunResponse:
        pushes = self._pushes
        run = await self._write(request, lambda: begun(pushes.tasks, pushes.open_run(request)))
        return router_pb2.OpenRunResponse(run=run)

    async def ForgetWeights(
        self, request: router_pb2.ForgetWeightsRequest, context: Context
    ) -> router_pb2.ForgetWeightsResponse:
        pushes = self._pushes
        model, version = await self._write(
            request, lambda: begun(pushes.tasks, pushes.forget(request.model))
        )
        return router_pb2.ForgetWeightsResponse(model=model, policy_version=version)

    async def _write(self, request: Any, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Executes a write once. The streams of members stay open until it has ended."""
        self._writes += 1
        try:
            return await self._repeats.once(request, work)
        finally:
            self._writes -= 1
            self._end_if_idle()


def _take_load(engine: Engine, load: router_pb2.ReplicaLoad) -> None:
    engine.policy_version, engine.push_id = load.policy_version, load.push_id
    engine.draining, engine.paused, engine.sleeping = load.draining, load.paused, load.sleeping
    engine.weights_dropped = load.weights_dropped
    engine.adapters = {revision_of(one.adapter): one.push_id for one in load.adapters}
    if engine.tunnels is not None:
        engine.tunnels = frozenset(load.tunnels)
    engine.report(load.running + load.waiting)


def _checked_hello(first: members_pb2.RegisterRequest | None) -> router_pb2.ReplicaHello:
    """Returns the hello of a stream, whose fields are valid and whose kind is the caller's role."""
    if first is None or not first.HasField("hello"):
        raise InvalidFieldError("hello", "is missing; send it in the first message")
    hello = first.hello
    check_name("replica_id", hello.replica_id)
    if hello.kind == router_pb2.REPLICA_KIND_UNSPECIFIED:
        raise InvalidFieldError("kind", "is not set; name the kind of the replica")
    roles = caller_roles()
    role = router_pb2.ReplicaKind.Name(hello.kind).removeprefix("REPLICA_KIND_").lower()
    if roles is not None and role not in roles:
        count_refused("wrong_role")
        shown = ", ".join(sorted(roles))
        raise RoleRefusedError(
            f"kind: role {shown} may not register as {role}; use the token or "
            f"the certificate of the {role}",
            roles=",".join(sorted(roles)),
        )
    needed = _NEEDED.get(hello.kind)
    if needed:
        check_name(needed, getattr(hello, needed))
    if hello.kind != router_pb2.REPLICA_KIND_ENGINE or not is_tunnel(hello.address):
        check_address(hello.address)
    elif hello.address != tunnel_address(hello.replica_id, "replica_id"):
        raise InvalidFieldError("address", "is not that of this engine; give tunnel: and its id")
    if hello.kind == router_pb2.REPLICA_KIND_ENGINE and hello.lease_capacity < 1:
        raise InvalidFieldError("lease_capacity", "is 0; give at least 1")
    if hello.report_interval_ms > _MAX_INTERVAL_MS:
        raise InvalidFieldError(
            "report_interval_ms", f"is {hello.report_interval_ms}; give at most {_MAX_INTERVAL_MS}"
        )
    return hello
