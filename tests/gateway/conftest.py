from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.collector.postgres_server import postgres_database
from tests.gateway.journals import Opened, postgres_journal, sqlite_journal
from tests.gateway.live import LiveMesh


@pytest.fixture(params=["sqlite", "postgres"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    """Opens a journal of each kind."""
    if request.param == "sqlite":
        yield partial(sqlite_journal, tmp_path)
    else:
        async with postgres_database() as database:
            yield partial(postgres_journal, database.url)


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[LiveMesh]:
    """A gateway in this process, and what it needs."""
    async with LiveMesh(tmp_path, tokenizer_dir) as running:
        yield running
