from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import Store
from tests.collector.collectors import stub_at
from tests.collector.postgres_server import Database, postgres_database
from tests.collector.stores import postgres_store, sqlite_store


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    """Of a collector in this process, on a real port, over a real store."""
    async with stub_at(tmp_path) as stub:
        yield stub


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    """A PostgreSQL database without a store."""
    async with postgres_database() as database:
        yield database


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """Of each kind, empty."""
    if request.param == "sqlite":
        async with sqlite_store(tmp_path) as store:
            yield store
    else:
        async with postgres_database() as database, postgres_store(database.url) as store:
            yield store
