"""RouterService: checks requests, applies them to the router's state and answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from rollmesh.router.config import RouterConfig
from rollmesh.router.control import Control
from rollmesh.router.dispatch import Dispatch, warn_of_misfits
from rollmesh.router.leasing.circuit import CircuitState
from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leasing.leases import LeaseTable
from rollmesh.router.leaving import Leaving
from rollmesh.router.membership.gateways import GatewayTable, RegisteredGateway
from rollmesh.router.membership.members import Member, Members
from rollmesh.router.weights.models import Models
from rollmesh.router.weights.pushes import Pushes
from rollmesh.runtime.access.guard import caller_roles
from rollmesh.runtime.errors import DeadlineError, InvalidFieldError, RoleRefusedError
from rollmesh.runtime.rpc.addresses import check_address
from rollmesh.runtime.rpc.channels import drained_on_refusal
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.runtime.rpc.repeats import Repeats, Write
from rollmesh.runtime.rpc.uploads import check_pause_mode, chunks_of
from rollmesh.runtime.telemetry.metrics import count_refused
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc

_Answer = TypeVar("_Answer")
_MAX_ID_CHARS = 128
_MAX_INTERVAL_MS = 60_000
_CIRCUITS = {
    CircuitState.CLOSED: router_pb2.CIRCUIT_STATE_CLOSED,
    CircuitState.OPEN: router_pb2.CIRCUIT_STATE_OPEN,
    CircuitState.HALF_OPEN: router_pb2.CIRCUIT_STATE_HALF_OPEN,
}
_NEEDED = {
    router_pb2.REPLICA_KIND_ENGINE: "model",
    router_pb2.REPLICA_KIND_GATEWAY: "model",
    router_pb2.REPLICA_KIND_COLLECTOR: "store_id",
}
"""By kind: the field that its members must give."""


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves one router."""

    def __init__(
        self,
        table: LeaseTable,
        members: Members,
        models: Models,
        config: RouterConfig,
        leaving: Leaving,
    ) -> None:
        """Takes the state, the settings, and when the streams of members end."""
        self._table = table
        self._members = members
        self._models = models
        self._control = Control(models, config.control_timeout_ms / 1000)
        self._pushes = Pushes(models, config)
        self._router_id = uuid.uuid4().hex
        self._dispatch = Dispatch(table, self._router_id)
        self._gateways = GatewayTable()
        self._repeats = Repeats()
        self._leaving = leaving
        leaving.on_over.append(self._end_streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Restores the kept weights, and runs the updates of engines and the leases.

        Raises:
            StoreError: The folder of weights cannot be read or written.
        """
        async with self._pushes.running(), self._dispatch.running(), asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._members.watch())
            try:
                yield
            finally:
                watch.cancel()

    async def Register(
        self, request_iterator: AsyncIterator[router_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[router_pb2.RegisterResponse]:
        first = await anext(request_iterator, None)
        self._check_open()
        member = await self._members.join(_checked_hello(first))
        engine = self._add_engine(member.hello)
        gateway = self._add_gateway(member)
        try:
            yield router_pb2.RegisterResponse(router_id=self._router_id)
            async with self._members.reporting(member):
                async for message in request_iterator:
                    if not message.HasField("load"):
                        raise InvalidFieldError("load", "is missing; after the hello, send loads")
                    self._members.reported(member, message.load)
                    if gateway is not None:
                        self._gateways.reported(gateway)
                    if engine is not None:
                        _take_load(engine, message.load)
                        self._table.fleet.changed(engine)
                        self._pushes.heed(engine)
        except DeadlineError:  # it fell silent
            if engine is not None:
                self._dispatch.warn_of_silence(engine)
            if gateway is not None:
                self._dispatch.end_streams(gateway.hello.replica_id)
            raise
        finally:
            self._members.leave(member)
            if gateway is not None:
                self._gateways.remove(gateway)
            if engine is not None:
                self._remove_engine(engine)

    async def Dispatch(
        self, request_iterator: AsyncIterator[router_pb2.DispatchRequest], context: Context
    ) -> AsyncIterator[router_pb2.DispatchResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidFieldError("hello", "is missing; send it in the first message")
        self._check_open()
        async with aclosing(self._dispatch.serve(first.hello, request_iterator)) as responses:
            async for response in responses:
                yield response

    async def PlaceSession(
        self, request: router_pb2.PlaceSessionRequest, context: Context
    ) -> router_pb2.PlaceSessionResponse:
        gateway = self._gateways.place(request.model, self._models.names())
        return router_pb2.PlaceSessionResponse(gateway=gateway)

    async def ListGateways(
        self, request: router_pb2.ListGatewaysRequest, context: Context
    ) -> router_pb2.ListGatewaysResponse:
        return router_pb2.ListGatewaysResponse(
            gateways=self._gateways.gateways(), models=sorted(self._models.names())
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
            engine = self._table.engines.get(hello.replica_id)
            if engine is not None and hello.kind == router_pb2.REPLICA_KIND_ENGINE:
                replica.leases = engine.leases
                replica.sessions = len(engine.sessions)
                replica.fenced = self._table.fleet.fenced(engine)
                replica.circuit = _CIRCUITS[engine.circuit.state]
                if exclusion := self._table.fleet.exclusion(engine):
                    replica.exclusion.CopyFrom(exclusion)
        return response

    async def PauseEngines(
        self, request: router_pb2.PauseEnginesRequest, context: Context
    ) -> router_pb2.PauseEnginesResponse:
        check_pause_mode(request.mode, "mode")
        asked = engine_pb2.PauseRequest(
            mode=request.mode, model=request.model, request_id=request.request_id
        )

        async def pause() -> router_pb2.PauseEnginesResponse:
            results = await self._control.pause(asked)
            return router_pb2.PauseEnginesResponse(results=results)

        return await self._write(request, pause)

    async def ResumeEngines(
        self, request: router_pb2.ResumeEnginesRequest, context: Context
    ) -> router_pb2.ResumeEnginesResponse:
        asked = engine_pb2.ResumeRequest(model=request.model, request_id=request.request_id)

        async def resume() -> router_pb2.ResumeEnginesResponse:
            results = await self._control.resume(asked)
            return router_pb2.ResumeEnginesResponse(results=results)

        return await self._write(request, resume)

    async def SleepEngines(
        self, request: router_pb2.SleepEnginesRequest, context: Context
    ) -> router_pb2.SleepEnginesResponse:
        level = request.level if request.HasField("level") else None
        if level not in {None, 1, 2}:
            raise InvalidFieldError("level", f"is {level}; give 1 or 2")
        asked = engine_pb2.SleepRequest(
            level=level, model=request.model, request_id=request.request_id
        )

        async def sleep() -> router_pb2.SleepEnginesResponse:
            results = await self._control.sleep(asked)
            return router_pb2.SleepEnginesResponse(results=results)

        return await self._write(request, sleep)

    async def WakeUpEngines(
        self, request: router_pb2.WakeUpEnginesRequest, context: Context
    ) -> router_pb2.WakeUpEnginesResponse:
        asked = engine_pb2.WakeUpRequest(model=request.model, request_id=request.request_id)

        async def wake_up() -> router_pb2.WakeUpEnginesResponse:
            results = await self._control.wake_up(asked)
            return router_pb2.WakeUpEnginesResponse(results=results)

        return await self._write(request, wake_up)

    async def ResetPrefixCaches(
        self, request: router_pb2.ResetPrefixCachesRequest, context: Context
    ) -> router_pb2.ResetPrefixCachesResponse:
        asked = engine_pb2.ResetPrefixCacheRequest(
            model=request.model, request_id=request.request_id
        )

        async def reset() -> router_pb2.ResetPrefixCachesResponse:
            results = await self._control.reset_prefix_caches(asked)
            return router_pb2.ResetPrefixCachesResponse(results=results)

        return await self._write(request, reset)

    async def AbortGenerations(
        self, request: router_pb2.AbortGenerationsRequest, context: Context
    ) -> router_pb2.AbortGenerationsResponse:
        asked = engine_pb2.AbortRequest(
            request_ids=request.request_ids,
            all=request.all,
            model=request.model,
            request_id=request.request_id,
        )

        async def abort() -> router_pb2.AbortGenerationsResponse:
            results, aborted = await self._control.abort(asked)
            return router_pb2.AbortGenerationsResponse(results=results, request_ids=aborted)

        return await self._write(request, abort)

    async def PushWeights(
        self, request_iterator: AsyncIterator[router_pb2.PushWeightsRequest], context: Context
    ) -> router_pb2.PushWeightsResponse:
        async with drained_on_refusal(request_iterator):
            first = await anext(request_iterator, None)
            if first is None or not first.HasField("header"):
                raise InvalidFieldError("header", "is missing; send it in the first message")

            async def push() -> router_pb2.PushWeightsResponse:
                header = _update_header(first.header)
                version, results = await self._pushes.push(
                    header, chunks_of(request_iterator), first.header.request_id
                )
                return router_pb2.PushWeightsResponse(policy_version=version, results=results)

            return await self._write(first.header, push)

    async def ListKeptWeights(
        self, request: router_pb2.ListKeptWeightsRequest, context: Context
    ) -> router_pb2.ListKeptWeightsResponse:
        return router_pb2.ListKeptWeightsResponse(kept=self._pushes.all_kept())

    async def FetchWeights(
        self, request: router_pb2.FetchWeightsRequest, context: Context
    ) -> AsyncIterator[router_pb2.FetchWeightsResponse]:
        async with aclosing(self._pushes.fetch(request.model, request.push_id)) as chunks:
            async for chunk in chunks:
                yield router_pb2.FetchWeightsResponse(safetensors_chunk=chunk)

    async def SyncWeights(
        self, request: router_pb2.SyncWeightsRequest, context: Context
    ) -> router_pb2.SyncWeightsResponse:
        await self._pushes.sync()
        return router_pb2.SyncWeightsResponse()

    async def ForgetWeights(
        self, request: router_pb2.ForgetWeightsRequest, context: Context
    ) -> router_pb2.ForgetWeightsResponse:
        async def forget() -> router_pb2.ForgetWeightsResponse:
            model, version = await self._pushes.forget(request.model)
            return router_pb2.ForgetWeightsResponse(model=model, policy_version=version)

        return await self._write(request, forget)

    async def InitWeightTransfers(
        self, request: router_pb2.InitWeightTransfersRequest, context: Context
    ) -> router_pb2.InitWeightTransfersResponse:
        by_engine = {engine.engine_id: engine.init_json for engine in request.engines}
        init = engine_pb2.InitWeightTransferRequest(
            backend=request.backend,
            init_json=request.init_json,
            model=request.model,
            request_id=request.request_id,
        )

        async def join() -> router_pb2.InitWeightTransfersResponse:
            results = await self._control.init_transfers(init, by_engine)
            return router_pb2.InitWeightTransfersResponse(results=results)

        return await self._write(request, join)

    async def _write(self, request: Write, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Executes a write once; the streams of members stay open until it has ended."""
        with self._leaving.needed():
            return await self._repeats.once(request, work)

    def _check_open(self) -> None:
        if self._leaving.is_over:
            raise self._leaving.error()

    def _end_streams(self) -> None:
        """Ends the streams of members: this router needs them no longer."""
        error = self._leaving.error()
        self._members.end(error)
        self._dispatch.end(error)

    def _add_gateway(self, member: Member) -> RegisteredGateway | None:
        is_gateway = member.hello.kind == router_pb2.REPLICA_KIND_GATEWAY
        return self._gateways.add(member) if is_gateway else None

    def _remove_engine(self, engine: Engine) -> None:
        self._pushes.gone(engine)
        if self._table.engines.get(engine.engine_id) is engine:
            self._table.remove_engine(engine.engine_id)

    def _add_engine(self, hello: router_pb2.ReplicaHello) -> Engine | None:
        if hello.kind != router_pb2.REPLICA_KIND_ENGINE:
            return None
        engine = Engine(
            hello.replica_id,
            hello.address,
            hello.model,
            hello.lease_capacity,
            tokenizer_sha256=hello.tokenizer_sha256,
            vocabulary_tokens=hello.vocabulary_tokens,
        )
        _take_load(engine, hello.load)
        self._table.add_engine(engine)
        warn_of_misfits(self._table.fleet)
        self._pushes.joined(engine)
        return engine


def _update_header(header: router_pb2.PushWeightsHeader) -> engine_pb2.UpdateWeightsHeader:
    """Returns the header of a push that engines receive."""
    update = engine_pb2.UpdateWeightsHeader(
        policy_version=header.policy_version, pause_mode=header.pause_mode, model=header.model
    )
    match header.WhichOneof("source"):
        case "checkpoint_dir":
            update.checkpoint_dir = header.checkpoint_dir
        case "safetensors_bytes":
            update.safetensors_bytes = header.safetensors_bytes
        case "transfer":
            update.transfer.CopyFrom(header.transfer)
        case _:
            pass
    return update


def _take_load(engine: Engine, load: router_pb2.ReplicaLoad) -> None:
    engine.policy_version, engine.push_id = load.policy_version, load.push_id
    engine.draining, engine.paused, engine.sleeping = load.draining, load.paused, load.sleeping
    engine.report(load.running + load.waiting)


def _check_role(kind: router_pb2.ReplicaKind.ValueType) -> None:
    """Refuses a caller that registers as what its role is not."""
    roles = caller_roles()
    needed = router_pb2.ReplicaKind.Name(kind).removeprefix("REPLICA_KIND_").lower()
    if roles is not None and needed not in roles:
        count_refused("wrong_role")
        shown = ", ".join(sorted(roles))
        raise RoleRefusedError(
            f"kind: role {shown} may not register as {needed}; use the token or the certificate of "
            f"the {needed}",
            roles=",".join(sorted(roles)),
        )


def _checked_hello(first: router_pb2.RegisterRequest | None) -> router_pb2.ReplicaHello:
    if first is None or not first.HasField("hello"):
        raise InvalidFieldError("hello", "is missing; send it in the first message")
    hello = first.hello
    if not 0 < len(hello.replica_id) <= _MAX_ID_CHARS:
        raise InvalidFieldError("replica_id", f"give 1 to {_MAX_ID_CHARS} characters")
    if hello.kind == router_pb2.REPLICA_KIND_UNSPECIFIED:
        raise InvalidFieldError("kind", "is not set; say what the replica is")
    _check_role(hello.kind)
    needed = _NEEDED.get(hello.kind)
    if needed and not 0 < len(getattr(hello, needed)) <= _MAX_ID_CHARS:
        raise InvalidFieldError(needed, f"give 1 to {_MAX_ID_CHARS} characters")
    check_address(hello.address)
    if hello.kind == router_pb2.REPLICA_KIND_ENGINE and hello.lease_capacity < 1:
        raise InvalidFieldError("lease_capacity", "is 0; give at least 1")
    if hello.report_interval_ms > _MAX_INTERVAL_MS:
        raise InvalidFieldError(
            "report_interval_ms", f"is {hello.report_interval_ms}; give at most {_MAX_INTERVAL_MS}"
        )
    return hello
