"""Real stores for tests, and a reader."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.collector.delivery.filters import judge
from rollmesh.collector.delivery.loads import Loaded
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.settings import created
from rollmesh.collector.delivery.units import Arrival, Settlement, Unit
from rollmesh.collector.storage.sqlite.store import open_store
from rollmesh.collector.storage.store import Store
from rollmesh.runtime.errors import ConsumerExistsError
from rollmesh.v1 import collector_pb2 as pb, session_pb2, trajectory_pb2
from tests.collector.records import record

KEEP = Retention(settled_ms=10**12, max_bytes=2**30)
MAIN_ONLY = pb.DeliveryFilter(lineages=[trajectory_pb2.LINEAGE_MAIN])


@asynccontextmanager
async def sqlite_store(folder: Path, retention: Retention = KEEP) -> AsyncIterator[Store]:
    async with open_store(folder, retention) as store:
        yield store


@asynccontextmanager
async def postgres_store(
    url: str, retention: Retention = KEEP, **limits: int
) -> AsyncIterator[Store]:
    from rollmesh.collector.storage.postgres.store import open_store as open_  # noqa: PLC0415
    from rollmesh.runtime.postgres.connection import Limits  # noqa: PLC0415

    async with open_(url, retention, Limits(**limits)) as store:
        yield store


class Reader:
    """A consumer that reads a store as a collector does."""

    def __init__(self, store: Store, settings: pb.Consumer) -> None:
        self.store = store
        self.settings = settings
        self.name = settings.name
        self.cursor = 0

    @classmethod
    async def open(
        cls,
        store: Store,
        name: str = "c",
        unit: pb.DeliveryUnit.ValueType = pb.DELIVERY_UNIT_SESSION,
        now_ms: int = 0,
        *,
        start: pb.Position | None = None,
        **settings: Any,
    ) -> "Reader":
        """Creates a consumer, or gives a known one these settings."""
        empty = {"groups": pb.GroupPolicy(), "filter": pb.DeliveryFilter()}
        consumer = pb.Consumer(name=name, unit=unit, **(empty | settings))
        try:
            await store.create_consumer(created(consumer), start, now_ms)
        except ConsumerExistsError:
            await store.update_consumer(consumer, now_ms)
        return cls(store, await store.consumer(name))

    async def fetch(self, limit: int = 100) -> list[Unit]:
        units: list[Unit] = []
        while len(units) < limit:
            page = await self.store.fetch(self.name, self.cursor, limit - len(units))
            self.cursor = page.cursor
            units += page.units
            if not page.more:
                break
        return units

    async def ids(self, limit: int = 100) -> list[str]:
        return [unit.unit_id for unit in await self.fetch(limit)]

    async def load(self, unit: Unit, version: int | None = None, now_ms: int = 0) -> Loaded | None:
        rules = partial(judge, self.settings.filter, version)
        (loaded,) = await self.store.load(self.name, [unit], rules, now_ms)
        return loaded

    async def take(self, limit: int = 100) -> list[tuple[str, int, list[str]]]:
        """Delivers what is open: unit, attempt, sessions."""
        taken: list[tuple[str, int, list[str]]] = []
        for unit in await self.fetch(limit):
            loaded = await self.load(unit)
            assert loaded is not None
            sessions = [head.session_id for head in loaded.heads]
            taken.append((unit.unit_id, loaded.attempt, sessions))
        return taken

    async def settle(self, *ids: str, now_ms: int = 0) -> list[str]:
        return await self.store.settle(self.name, [Settlement(id_) for id_ in ids], now_ms)

    async def take_all(self, now_ms: int = 0) -> list[str]:
        """Delivers and acknowledges what is open."""
        ids = [unit_id for unit_id, _, _ in await self.take()]
        assert await self.settle(*ids, now_ms=now_ms) == ids
        return ids

    async def restart(self) -> None:
        """Releases all units it holds, as a collector does when its last stream ends."""
        self.cursor = 0
        await self.store.release(self.name)


def sessions_of(loaded: Loaded | None) -> list[session_pb2.SessionRecord]:
    """The sessions of a unit as its consumer gets them."""
    return list(loaded.response().delivery.sessions) if loaded else []


async def ingest(
    store: Store, session: session_pb2.SessionRecord, now_ms: int, hold_ms: int | None = None
) -> bool:
    (duplicate,) = await store.ingest([Arrival(session, hold_ms)], now_ms)
    return duplicate


async def fill(
    store: Store, sessions: Sequence[session_pb2.SessionRecord], now_ms: int = 0
) -> None:
    for session in sessions:
        assert not await ingest(store, session, now_ms)


def group(name: str, *samples: int, size: int = 3) -> list[session_pb2.SessionRecord]:
    return [record(f"{name}{at}", name, at, size) for at in samples]


def auxiliary(session_id: str, **options: Any) -> session_pb2.SessionRecord:
    """A session whose only trajectory is not of the main lineage."""
    made = record(session_id, **options)
    made.trajectories[0].lineage = trajectory_pb2.LINEAGE_AUXILIARY
    return made
