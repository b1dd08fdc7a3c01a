"""The collector as a service: its RPCs, its store, and its place in the mesh."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from rollmesh.collector import metrics
from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.log import Arrival, abandoned_seat, kept_of, key_of
from rollmesh.collector.scoring import Scoring, Teachers, wants_score
from rollmesh.collector.settings import created
from rollmesh.collector.sqlite import open_sqlite
from rollmesh.collector.store import MOST_CHECKPOINTS, Retention, Store
from rollmesh.collector.streams import Subscriptions, check_count
from rollmesh.mesh import Membership, ScoringEngines
from rollmesh.runtime import WINDOW, alarms_of, begun, clock, first_of
from rollmesh.runtime.codec import check_session
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    ConsumerUnknownError,
    InvalidFieldError,
    RollmeshError,
    SessionDamagedError,
    SessionUnknownError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    check_name,
)
from rollmesh.runtime.process import faults
from rollmesh.runtime.rpc import Context, Repeats, open_channel
from rollmesh.runtime.telemetry import fields, genai, show_alarms, tracing
from rollmesh.v1 import (
    collector_pb2 as pb,
    collector_pb2_grpc,
    router_pb2,
    server_pb2,
    session_pb2,
    trajectory_pb2,
)

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_READ_PAGE = 100
_ALARMS_S = 10.0
_MAX_REASON_CHARS = 4096
_MAX_METADATA = 65_536
_MAX_UNTRAINED = 65_536
_MAX_SESSIONS = 4096
"""Of one message."""
_MAX_PAGE, _DEFAULT_PAGE = 1000, 100
_MAX_STEP, _MAX_METRICS = 2**63 - 1, 64
_METRIC_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)
_NO_METRIC_NAME = "{0!r:.80} is not 1 to 64 letters, digits, _, ., - or /"


def open_store(config: CollectorConfig) -> AbstractAsyncContextManager[Store]:
    """Opens the store of a collector.

    Raises:
        ConfigError: The package for its database is missing.
        StoreError: It cannot be opened, or was written by another version.
    """
    retention = Retention(config.retain_settled_ms, config.max_stored_bytes)
    if config.store == "sqlite":
        return open_sqlite(config.data_dir, retention)
    try:  # not needed by the SQLite store
        from rollmesh.collector.postgres import open_postgres
    except ImportError as error:
        raise ConfigError(
            "store: a PostgreSQL store needs the psycopg package: pip install 'rollmesh[collector]'"
        ) from error
    return open_postgres(config.store, retention)


class CollectorService(collector_pb2_grpc.CollectorServiceServicer):
    """One collector process, which serves the RPCs of a collector."""

    names = ("rollmesh.v1.CollectorService",)
    store: Store
    """The session store. Set before any RPC is served, as `subscriptions` is."""
    subscriptions: Subscriptions
    """The open streams."""

    def __init__(self, config: CollectorConfig) -> None:
        """Takes the settings. `running` opens the store."""
        self._config = config
        self._repeats = Repeats()
        self._duplicates = 0
        self._scoring: Scoring | None = None
        self._membership: Membership | None = None

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Whether the collector scores sessions, and whether its store is shared."""
        found = {
            server_pb2.CAPABILITY_SCORING: bool(self._config.scorer),
            server_pb2.CAPABILITY_SHARED_STORE: self._config.store != "sqlite",
        }
        return frozenset(one for one, is_there in found.items() if is_there)

    def register(self, server: grpc.aio.Server) -> None:
        """Registers the RPCs."""
        collector_pb2_grpc.add_CollectorServiceServicer_to_server(self, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Opens the store, starts the work beside the RPCs, and registers with the router.

        Sessions without a reward are scored if a scorer is configured, and teachers score for
        consumers if a router knows their engines.
        """
        config = self._config
        async with (
            open_store(config) as self.store,
            asyncio.TaskGroup() as tasks,
            AsyncExitStack() as stack,
        ):
            self.subscriptions = Subscriptions(self.store, tasks)
            await self.subscriptions.refresh()
            work = maintain(self.store, self.subscriptions, config.tick_ms, config.consumer_ttl_ms)
            running = [tasks.create_task(work), tasks.create_task(self._export_alarms())]
            if config.scorer:
                timeout_s = config.scorer_timeout_ms / 1000
                announce = self.subscriptions.announce
                self._scoring = Scoring(self.store, announce, config.scorer_tries, timeout_s)
                scorer = await stack.enter_async_context(open_channel(config.scorer))
                work = self._scoring.run(scorer, config.scorer_concurrency)
                running.append(tasks.create_task(work))
            if config.router:
                engines = ScoringEngines(config.router)
                await stack.enter_async_context(aclosing(engines))
                work = self.subscriptions.teach(Teachers(self.store, engines))
                running.append(tasks.create_task(work))
                hello = router_pb2.ReplicaHello(
                    replica_id=f"collector-{uuid.uuid4().hex}",
                    kind=router_pb2.REPLICA_KIND_COLLECTOR,
                    address=address,
                    store_id=self.store.store_id,
                )
                membership = Membership(config.router, hello, router_pb2.ReplicaLoad)
                metrics.REGISTERED.set_function(lambda: membership.registered)
                self._membership = await stack.enter_async_context(membership)
            yield
            for task in running:
                task.cancel()
            await asyncio.wait(running)  # before what they use is closed

    async def ready(self) -> None:
        """Waits until the collector is registered with the router, if there is one."""
        if self._membership is not None:
            await self._membership.wait_registered()

    async def drain(self) -> None:
        """Leaves the router and ends the consumers' streams. The consumers go on elsewhere."""
        if self._membership is not None:
            await self._membership.leave()
        self.subscriptions.end_streams()

    async def failed(self) -> str:
        """Returns once the store is lost for good, or the router refuses the collector."""
        waits: list[Coroutine[Any, Any, str]] = [self.store.lost()]
        if self._membership is not None:
            waits.append(self._membership.wait_refused())
        return await first_of(waits)

    async def Ingest(self, request: pb.IngestRequest, context: Context) -> pb.IngestResponse:
        check_count("sessions", request.sessions, _MAX_SESSIONS)
        if not request.sessions:
            raise InvalidFieldError("sessions", "is empty; send at least one")
        began_ms = clock.monotonic_ms()
        names = [f"sessions[{at}]" for at in range(len(request.sessions))]
        await asyncio.to_thread(lambda: list(map(check_session, request.sessions, names)))
        duplicates = await begun(self.subscriptions.tasks, self._ingest(request.sessions))
        if tracing.is_on():
            took_ms = clock.monotonic_ms() - began_ms
            for one, duplicate in zip(request.sessions, duplicates, strict=True):  # in their traces
                reward = one.reward if one.HasField("reward") else None
                attributes = {
                    genai.SESSION_ID: one.session_id,
                    **genai.session(one.run_id, one.group_id, one.sample_index, one.purpose),
                    **genai.ended(one.outcome, reward, one.turns),
                    genai.DUPLICATE: duplicate,
                }
                parent = tracing.place_of_session(one.session_id)
                tracing.child("ingest", "consumer", parent, took_ms, attributes)
        await faults.reach("collector-before-ack")
        return pb.IngestResponse(duplicates=duplicates)

    async def AbandonSeat(
        self, request: pb.AbandonSeatRequest, context: Context
    ) -> pb.AbandonSeatResponse:
        check_name("group_id", request.group_id)
        if request.run_id:
            check_name("run_id", request.run_id)
        if not 0 < len(request.reason) <= _MAX_REASON_CHARS:
            raise InvalidFieldError("reason", f"give 1 to {_MAX_REASON_CHARS} characters")
        if request.sample_index >= request.group_size:
            raise InvalidFieldError(
                "sample_index",
                f"is {request.sample_index}; give one below group_size, {request.group_size}",
            )
        if sum(len(key) + len(value) for key, value in request.metadata.items()) > _MAX_METADATA:
            raise InvalidFieldError("metadata", f"is longer than {_MAX_METADATA} characters")
        seat = abandoned_seat(request, clock.unix_ms())
        (duplicate,) = await begun(self.subscriptions.tasks, self._ingest([seat]))
        if not duplicate:
            metrics.ABANDONED_SEATS.inc()
        return pb.AbandonSeatResponse(duplicate=duplicate)

    async def CreateConsumer(
        self, request: pb.CreateConsumerRequest, context: Context
    ) -> pb.CreateConsumerResponse:
        consumer = created(request.consumer)
        start = request.start if request.HasField("start") else None
        if start:
            _check_position("start", start)

        async def create() -> pb.CreateConsumerResponse:
            made = await self.subscriptions.create(consumer, start)
            standing = await self.store.standing(made.name)
            return pb.CreateConsumerResponse(consumer=made, stored_units=standing.ready)

        return await self._once(request, create)

    async def GetConsumer(
        self, request: pb.GetConsumerRequest, context: Context
    ) -> pb.GetConsumerResponse:
        consumer = await self.store.consumer(request.consumer)
        checkpoints = await self.store.checkpoints(request.consumer)
        return pb.GetConsumerResponse(consumer=consumer, checkpoints=checkpoints)

    async def ListConsumers(
        self, request: pb.ListConsumersRequest, context: Context
    ) -> pb.ListConsumersResponse:
        size = _page_size(request)
        consumers, token = await self.store.consumers(size, request.page_token)
        return pb.ListConsumersResponse(consumers=consumers, next_page_token=token)

    async def UpdateConsumer(
        self, request: pb.UpdateConsumerRequest, context: Context
    ) -> pb.UpdateConsumerResponse:
        async def update() -> pb.UpdateConsumerResponse:
            changed = await self.subscriptions.update(request.consumer)
            return pb.UpdateConsumerResponse(consumer=changed)

        return await self._once(request, update)

    async def DeleteConsumer(
        self, request: pb.DeleteConsumerRequest, context: Context
    ) -> pb.DeleteConsumerResponse:
        async def delete() -> pb.DeleteConsumerResponse:
            await self.subscriptions.delete(request.consumer)
            return pb.DeleteConsumerResponse()

        return await self._once(request, delete)

    async def Subscribe(
        self, request_iterator: AsyncIterator[pb.SubscribeRequest], context: Context
    ) -> AsyncIterator[pb.SubscribeResponse]:
        async for response in self.subscriptions.stream(request_iterator):
            yield response

    async def SetRewards(
        self, request: pb.SetRewardsRequest, context: Context
    ) -> pb.SetRewardsResponse:
        check_name("request_id", request.request_id)
        duplicate = await begun(self.subscriptions.tasks, self._set_rewards(request))
        metrics.REWARDS.labels("repeat" if duplicate else "set").inc()
        return pb.SetRewardsResponse(duplicate=duplicate)

    async def Seek(self, request: pb.SeekRequest, context: Context) -> pb.SeekResponse:
        _check_position("position", request.position)

        async def seek() -> pb.SeekResponse:
            work = self.store.seek(request.consumer, request.position, clock.steady_unix_ms())
            return await self.subscriptions.move(request.consumer, work)

        return await self._once(request, seek)

    async def CreateCheckpoint(
        self, request: pb.CreateCheckpointRequest, context: Context
    ) -> pb.CreateCheckpointResponse:
        check_name("checkpoint_id", request.checkpoint_id)
        if request.HasField("keep") and not 0 < request.keep <= MOST_CHECKPOINTS:
            raise InvalidFieldError("keep", f"is {request.keep}; give 1 to {MOST_CHECKPOINTS}")
        if (count := len(request.untrained_delivery_ids)) > _MAX_UNTRAINED:
            raise InvalidFieldError(
                "untrained_delivery_ids", f"has {count} ids; give at most {_MAX_UNTRAINED}"
            )
        work = self.store.create_checkpoint(request, clock.steady_unix_ms())
        checkpoint = await begun(self.subscriptions.tasks, work)
        return pb.CreateCheckpointResponse(checkpoint=checkpoint)

    async def RestoreCheckpoint(
        self, request: pb.RestoreCheckpointRequest, context: Context
    ) -> pb.RestoreCheckpointResponse:
        async def restore() -> pb.RestoreCheckpointResponse:
            work = self.store.restore_checkpoint(request)
            again = await self.subscriptions.move(request.consumer, work)
            return pb.RestoreCheckpointResponse(again=again)

        return await self._once(request, restore)

    async def ReleaseCheckpoint(
        self, request: pb.ReleaseCheckpointRequest, context: Context
    ) -> pb.ReleaseCheckpointResponse:
        work = self.store.release_checkpoint(request.consumer, request.checkpoint_id)
        await begun(self.subscriptions.tasks, work)
        return pb.ReleaseCheckpointResponse()

    async def ReportStep(
        self, request: pb.ReportStepRequest, context: Context
    ) -> pb.ReportStepResponse:
        step = pb.TrainingStep(
            step=request.step.step,
            metrics=request.step.metrics,
            reported_unix_ms=clock.unix_ms(),
        )
        if step.step > _MAX_STEP:
            raise InvalidFieldError("step.step", f"is {step.step}; give at most {_MAX_STEP}")
        if (count := len(step.metrics)) > _MAX_METRICS:
            raise InvalidFieldError(
                "step.metrics", f"has {count} names; give at most {_MAX_METRICS}"
            )
        for name in step.metrics:
            if not _METRIC_NAME.fullmatch(name):
                raise InvalidFieldError("step.metrics", _NO_METRIC_NAME.format(name))
        await begun(
            self.subscriptions.tasks, self.store.report_step(request.consumer, step, request.run)
        )
        steps = await self.store.steps(request.consumer, WINDOW)
        alarms = alarms_of(steps)
        show_alarms([(one.name, request.consumer) for one in alarms], request.consumer)
        return pb.ReportStepResponse(alarms=alarms)

    async def Annotate(self, request: pb.AnnotateRequest, context: Context) -> pb.AnnotateResponse:
        if not request.annotations:
            raise InvalidFieldError("annotations", "is empty; give at least one")
        for at, one in enumerate(request.annotations):
            if not _METRIC_NAME.fullmatch(one.name):
                raise InvalidFieldError(f"annotations[{at}].name", _NO_METRIC_NAME.format(one.name))
        work = self.store.annotate(request.session_id, request.annotations)
        await begun(self.subscriptions.tasks, work)
        return pb.AnnotateResponse()

    async def ListSteps(
        self, request: pb.ListStepsRequest, context: Context
    ) -> pb.ListStepsResponse:
        steps = await self.store.steps(request.consumer, max(_page_size(request), WINDOW))
        alarms = alarms_of(steps[-WINDOW:])
        return pb.ListStepsResponse(steps=steps[-_page_size(request) :], alarms=alarms)

    async def ListFiltered(
        self, request: pb.ListFilteredRequest, context: Context
    ) -> pb.ListFilteredResponse:
        size = _page_size(request)
        entries, token = await self.store.filtered(request.consumer, size, request.page_token)
        return pb.ListFilteredResponse(entries=entries, next_page_token=token)

    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        return await self.store.groups(request, _group(request), _page_size(request))

    async def ReadSessions(
        self, request: pb.ReadSessionsRequest, context: Context
    ) -> AsyncIterator[pb.ReadSessionsResponse]:
        arrays, since = not request.without_arrays, request.closed_from_unix_ms
        consumer = None
        if request.consumer:
            if not arrays:
                raise InvalidFieldError("without_arrays", "is set; leave it out with consumer")
            consumer = await self.store.consumer(request.consumer)
        if request.session_id:
            session = await self.store.session(request.session_id, arrays=arrays)
            late = await self._late(session) if arrays else {}
            if (kept := kept_of(consumer, session)) is not None:
                yield pb.ReadSessionsResponse(session=kept, **late)
            return
        group, token = _group(request), request.resume_token
        while page := await self.store.sessions_after(token, _READ_PAGE, group):
            for token, session_id in page:
                try:
                    session = await self.store.session(session_id, arrays=arrays and not since)
                    if session.closed_unix_ms < since:
                        continue
                    if arrays and since:
                        session = await self.store.session(session_id, arrays=True)
                except SessionUnknownError:  # removed since the page was read
                    continue
                except SessionDamagedError:
                    yield pb.ReadSessionsResponse(damaged_session_id=session_id, resume_token=token)
                    continue
                late = await self._late(session) if arrays else {}
                if (kept := kept_of(consumer, session)) is not None:
                    yield pb.ReadSessionsResponse(session=kept, resume_token=token, **late)

    async def _late(self, session: session_pb2.SessionRecord) -> dict[str, Any]:
        """Returns the annotations and scores of a session, as the fields of a response."""
        found = await self.store.scores(session.session_id)
        scores = [
            pb.TrajectoryScores(
                trajectory_id=session.trajectories[at].trajectory_id,
                scores=trajectory_pb2.TeacherScores.FromString(data),
            )
            for at, data in found
        ]
        return {"annotations": await self.store.annotations(session.session_id), "scores": scores}

    async def ReadChanges(
        self, request: pb.ReadChangesRequest, context: Context
    ) -> AsyncIterator[pb.ReadChangesResponse]:
        token = request.resume_token
        while page := await self.store.changes_after(token, _READ_PAGE):
            for token, session_id in page:
                try:
                    session = await self.store.session(session_id, arrays=False)
                except (SessionUnknownError, SessionDamagedError):  # as since the page was read
                    continue
                late = await self._late(session)
                yield pb.ReadChangesResponse(session=session, resume_token=token, **late)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        stats = await self.store.counts()
        stats.duplicates = self._duplicates
        for consumer in self.subscriptions.consumers:
            name = consumer.settings.name
            with suppress(ConsumerUnknownError):  # deleted since
                one = await self.store.standing(name)
                steps = await self.store.steps(name, WINDOW)
                one.leased, one.streams = len(consumer.leased), len(consumer.streams)
                one.unscored = len(consumer.unscored)
                one.ready = max(one.ready - one.leased, 0)
                if steps:
                    one.step = steps[-1].step
                    one.alarms.extend(alarms_of(steps))
                stats.consumers.append(one)
        return stats

    async def _export_alarms(self) -> None:
        """Exports the alarms of all consumers until cancelled: any collector may take a step."""
        while True:
            found: list[tuple[str, str]] = []
            with suppress(RollmeshError):  # the store is away
                for name in [one.settings.name for one in self.subscriptions.consumers]:
                    with suppress(ConsumerUnknownError):  # deleted since
                        steps = await self.store.steps(name, WINDOW)
                        found += [(one.name, name) for one in alarms_of(steps)]
                show_alarms(found)
            await asyncio.sleep(_ALARMS_S)

    async def _once(
        self, request: Message, work: Callable[[], Coroutine[Any, Any, _Answer]]
    ) -> _Answer:
        """Does the work of a request once for its id, to the end even if the caller leaves."""
        return await begun(self.subscriptions.tasks, self._repeats.once(request, work))

    async def _ingest(self, sessions: Sequence[session_pb2.SessionRecord]) -> list[bool]:
        """Stores sessions and returns for each whether it was a repeat."""
        await faults.reach("collector-mid-ingest")
        arrivals = list(map(Arrival, sessions))
        try:
            if self._scoring is not None:
                to_score = [one for one in arrivals if wants_score(one.record)]
                for one in to_score:
                    one.hold_ms = self._config.scorer_hold_ms
                self._scoring.check_room(len(to_score))
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
        for arrival, duplicate in zip(arrivals, duplicates, strict=True):
            session = arrival.record
            if self._scoring is not None and arrival.hold_ms is not None and not duplicate:
                self._scoring.add(session.session_id)
            if session.HasField("reward") and not duplicate:
                metrics.observe_reward(session, session.reward)
        return duplicates

    async def _set_rewards(self, request: pb.SetRewardsRequest) -> bool:
        """Stores rewards and returns whether the request was a repeat."""
        if not request.HasField("rewards"):
            raise InvalidFieldError("rewards", "is missing; give at least one reward")
        duplicate = await self.store.set_rewards(
            request.session_id, request.rewards, request.request_id, clock.steady_unix_ms()
        )
        if not duplicate:
            self.subscriptions.announce()
            if request.rewards.HasField("reward"):
                session = await self.store.session(request.session_id, arrays=False)
                metrics.observe_reward(session, request.rewards.reward)
        return duplicate


def _check_position(field: str, position: pb.Position) -> None:
    place = position.WhichOneof("place")
    if place is None or (place == "end" and position.end == pb.LOG_END_UNSPECIFIED):
        raise InvalidFieldError(field, "is not set; give an end, a time or a delivery id")


def _group(request: pb.ListGroupsRequest | pb.ReadSessionsRequest) -> str:
    """Returns the key of the only wanted group. Empty if any is."""
    if request.run_id and not request.group_id:
        raise InvalidFieldError("group_id", "is empty; give it with run_id")
    return key_of(request.run_id, request.group_id) if request.group_id else ""


def _page_size(
    request: pb.ListConsumersRequest
    | pb.ListFilteredRequest
    | pb.ListGroupsRequest
    | pb.ListStepsRequest,
) -> int:
    size = request.page_size if request.HasField("page_size") else _DEFAULT_PAGE
    if not 0 < size <= _MAX_PAGE:
        raise InvalidFieldError("page_size", f"is {size}; give 1 to {_MAX_PAGE}")
    return size


# Work beside the RPCs: deadlines, changes by other collectors, retention.

_RETAIN_EVERY_S = 2.0
_AFTER_ERROR_S = 1.0
_ATTEND_EVERY_MS = 60_000.0
_PATIENCE_MS = 3_600_000


async def maintain(
    store: Store, subscriptions: Subscriptions, tick_ms: int, consumer_ttl_ms: int
) -> None:
    """Runs until cancelled. Errors are logged and counted, and the work is retried."""

    async def tick() -> None:
        if await store.tick(clock.steady_unix_ms()):
            subscriptions.announce()

    async def listen() -> None:
        for name in await store.changed():
            await subscriptions.moved(name)
        await subscriptions.refresh()
        subscriptions.announce()

    async def retain() -> None:
        metrics.REMOVED.inc(await store.retain(clock.steady_unix_ms()))

    # Consumers get time to reconnect before the time without a collector counts against them.
    patient_until = clock.monotonic_ms() + min(consumer_ttl_ms, _PATIENCE_MS)

    async def attend() -> None:
        expires = consumer_ttl_ms and clock.monotonic_ms() >= patient_until
        await subscriptions.attend(consumer_ttl_ms if expires else None)

    attend_ms = min(consumer_ttl_ms / 4, _ATTEND_EVERY_MS) if consumer_ttl_ms else _ATTEND_EVERY_MS
    async with asyncio.TaskGroup() as group:
        for work, pause_s in (
            (tick, tick_ms / 1000),
            (subscriptions.expire, tick_ms / 1000),
            (listen, 0.0),
            (retain, _RETAIN_EVERY_S),
            (attend, attend_ms / 1000),
        ):
            group.create_task(_for_ever(work, pause_s))


async def _for_ever(work: Callable[[], Awaitable[None]], pause_s: float) -> None:
    while True:
        try:
            await work()
            await asyncio.sleep(pause_s)
        except RollmeshError as error:
            metrics.STORE_ERRORS.labels(error.reason).inc()
            _log.warning(
                "store failed, will retry", extra=fields(reason=error.reason, error=str(error))
            )
            await asyncio.sleep(_AFTER_ERROR_S)
        except Exception as error:  # one bad row must not stop the rest
            metrics.STORE_ERRORS.labels(RollmeshError.reason).inc()
            _log.error("maintenance failed, will retry", exc_info=error)
            await asyncio.sleep(_AFTER_ERROR_S)
