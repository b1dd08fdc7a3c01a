"""Services and their PostgreSQL server, started at the same time."""

from pathlib import Path

import pytest

from tests.collector.postgres_server import postgres_database
from tests.processes import running, started
from tests.waiting import until_says


@pytest.mark.parametrize("service", ["collector", "gateway"])
async def test_a_service_that_starts_before_its_database_waits_for_it(
    service: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        postgres_database() as database,
        running("router", tmp_path, data_dir=tmp_path / "router") as router,
    ):
        await database.kill()
        flags: dict[str, object] = {"port": 0, "router": router.address}
        if service == "collector":
            flags["store"] = database.url
        else:
            flags |= {"journal": database.url, "model_path": tokenizer_dir}
        async with started(service, tmp_path, **flags) as process:
            await until_says(tmp_path / f"{service}.log", "waiting for the database")
            await database.start()
            await process.wait_ready()
