"""A collector whose disk is full: refused with a delay, counted, and gone on from there."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from rollmesh.runtime import Database
from rollmesh.runtime.errors import StoreFullError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.collectors import TIMEOUT_S, ingest_all, stub_at, subscribing
from tests.collector.records import record, trajectory


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Database]:
    """The databases that collectors open."""
    found: list[Database] = []

    class Noted(Database):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            found.append(self)

    monkeypatch.setattr("rollmesh.collector.sqlite.Database", Noted)
    return found


async def set_most_pages(database: Database, pages: int) -> None:
    """Leaves so much room. 1 means no more than is taken."""
    await database.run(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").close())


def refused() -> float:
    name = "rollmesh_collector_store_errors_total"
    return REGISTRY.get_sample_value(name, {"reason": "STORE_FULL"}) or 0.0


async def test_a_full_disk_is_told_and_counted_and_nothing_is_lost(
    tmp_path: Path, opened: list[Database]
) -> None:
    large = record("large")
    large.trajectories[0].CopyFrom(trajectory("large", tokens=10_000))
    request = pb.IngestRequest(sessions=[large])
    async with stub_at(tmp_path) as stub:
        await ingest_all(stub, "a")
        before = refused()
        await set_most_pages(opened[0], 1)
        with pytest.raises(StoreFullError) as caught, typed_errors():
            await stub.Ingest(request, timeout=TIMEOUT_S)
        assert caught.value.retry_delay_ms
        assert refused() == before + 1
        assert (await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)).sessions == 1
        await set_most_pages(opened[0], 2**30)
        assert not (await stub.Ingest(request, timeout=TIMEOUT_S)).duplicates[0]
        async with subscribing(stub, credits_=2) as stream:
            assert await stream.delivered(2) == ["a", "large"]
            await stream.acknowledge("a", "large")
            assert await stream.acknowledged() == {"a", "large"}
