"""The collector as a service."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc

from rollmesh.collector import metrics
from rollmesh.collector.config import CollectorConfig
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.scoring.remote import RemoteScorer
from rollmesh.collector.scoring.scoring import Scoring
from rollmesh.collector.servicer import CollectorServicer
from rollmesh.collector.storage.sqlite.store import open_store
from rollmesh.collector.storage.store import Store
from rollmesh.collector.streams.maintenance import maintain
from rollmesh.collector.streams.subscriptions import Subscriptions
from rollmesh.mesh.routers.membership import Membership
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.runtime.tasks import first_of
from rollmesh.v1 import collector_pb2_grpc, router_pb2, server_pb2


class CollectorService:
    """One collector process."""

    names = ("rollmesh.v1.CollectorService",)

    def __init__(self, config: CollectorConfig) -> None:
        """Takes the settings; `running` opens the store."""
        self._config = config
        self._servicer = CollectorServicer()
        self._store: Store | None = None
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
        """Registers the servicer."""
        collector_pb2_grpc.add_CollectorServiceServicer_to_server(self._servicer, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Opens the store and runs the stream readers, maintenance and scoring."""
        async with self._open_store() as store, asyncio.TaskGroup() as tasks:
            self._store = store
            subscriptions = Subscriptions(store, tasks)
            await subscriptions.restore()
            config = self._config
            work = maintain(store, subscriptions, config.tick_ms, config.consumer_ttl_ms)
            maintenance = tasks.create_task(work)
            async with self._scoring(subscriptions):
                self._servicer.subscriptions = subscriptions
                async with self._registered(address, store.store_id):
                    yield
            maintenance.cancel()

    @asynccontextmanager
    async def _registered(self, address: str, store_id: str) -> AsyncIterator[None]:
        """Registers with the router, if there is one."""
        if not self._config.router:
            yield
            return
        hello = router_pb2.ReplicaHello(
            replica_id=f"collector-{uuid.uuid4().hex}",
            kind=router_pb2.REPLICA_KIND_COLLECTOR,
            address=address,
            store_id=store_id,
        )
        async with Membership(self._config.router, hello, router_pb2.ReplicaLoad) as membership:
            self._membership = membership
            metrics.REGISTERED.set_function(lambda: membership.registered)
            yield

    @asynccontextmanager
    async def _scoring(self, subscriptions: Subscriptions) -> AsyncIterator[None]:
        """Scores sessions that arrive without a reward, if a scorer is configured."""
        config = self._config
        if not config.scorer:
            yield
            return
        scoring = Scoring(subscriptions.store, subscriptions.announce, config.scorer_tries)
        self._servicer.scoring, self._servicer.score_hold_ms = scoring, config.scorer_hold_ms
        async with open_channel(config.scorer) as channel, asyncio.TaskGroup() as tasks:
            scorer = RemoteScorer(channel, config.scorer_timeout_ms / 1000)
            running = tasks.create_task(scoring.run(scorer, config.scorer_concurrency))
            yield
            running.cancel()

    async def ready(self) -> None:
        """Waits until the collector is registered with the router, if there is one."""
        if self._membership is not None:
            await self._membership.wait_registered()

    async def drain(self) -> None:
        """Leaves the router and ends the consumers' streams; the consumers go on elsewhere."""
        if self._membership is not None:
            await self._membership.leave()
        self._servicer.subscriptions.end_streams()

    async def failed(self) -> str:
        """Returns once the store is lost for good, or the router refuses the collector."""
        assert self._store is not None
        waits: list[Coroutine[Any, Any, str]] = [self._store.lost()]
        if self._membership is not None:
            waits.append(self._membership.wait_refused())
        return await first_of(waits)

    @asynccontextmanager
    async def _open_store(self) -> AsyncIterator[Store]:
        config = self._config
        retention = Retention(config.retain_settled_ms, config.max_stored_bytes)
        if config.store == "sqlite":
            async with open_store(config.data_dir, retention) as store:
                yield store
        else:
            async with _postgres_store(config.store, retention) as shared:
                yield shared


@asynccontextmanager
async def _postgres_store(url: str, retention: Retention) -> AsyncIterator[Store]:
    try:  # not needed by the SQLite store
        from rollmesh.collector.storage.postgres.store import (  # noqa: PLC0415
            open_store as open_postgres,
        )
    except ImportError as error:
        raise ConfigError(
            "store: a PostgreSQL store needs the psycopg package: pip install 'rollmesh[collector]'"
        ) from error
    async with open_postgres(url, retention) as store:
        yield store
