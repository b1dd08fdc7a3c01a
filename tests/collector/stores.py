"""Real stores for tests, and a reader."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollmesh.collector import (
    Arrival,
    Loaded,
    Retention,
    Settlement,
    Store,
    Unit,
    created,
    open_sqlite,
)
from rollmesh.runtime.errors import ConsumerExistsError
from rollmesh.v1 import collector_pb2 as pb, session_pb2, trajectory_pb2
from tests.collector.records import record

KEEP = Retention(settled_ms=10**12, max_bytes=2**30)
MAIN_ONLY = pb.DeliveryFilter(lineages=[trajectory_pb2.LINEAGE_MAIN])


@asynccontextmanager
async def sqlite_store(folder: Path, retention: Retention = KEEP) -> AsyncIterator[Store]:
    async with open_sqlite(folder, retention) as store:
        yield store


@asynccontextmanager
async def postgres_store(
    url: str, retention: Retention = KEEP, **limits: int
) -> AsyncIterator[Store]:
    from rollmesh.collector import open_postgres as open_
    from rollmesh.runtime import Limits

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

    async def fetch(self, limit: int = 100, now_ms: int = 0) -> list[Unit]:
        units: list[Unit] = []
        while len(units) < limit:
            page = await self.store.fetch(self.name, self.cursor, limit - len(units), now_ms)
            self.cursor = page.cursor
            units += page.units
            if not page.more:
                break
        return units

    async def ids(self, limit: int = 100) -> list[str]:
        return [unit.unit_id for unit in await self.fetch(limit)]

    async def load(self, unit: Unit, version: int | None = None, now_ms: int = 0) -> Loaded | None:
        settings = pb.Consumer()
        settings.CopyFrom(self.settings)
        if version is not None:
            settings.policy_version = version
        settings.filter.ungrouped = True
        (loaded,) = await self.store.load(settings, [unit], now_ms)
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
    response = loaded.response() if loaded else None
    return list(response.delivery.sessions) if response else []


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
