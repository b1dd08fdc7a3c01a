"""Which PostgreSQL servers, addresses and names a collector takes, and what it says of others."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    InvalidFieldError,
    StoreAwayError,
    StoreError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import (
    TIMEOUT_S,
    collector_at,
    ingest_all,
)
from tests.collector.postgres_server import Database
from tests.collector.records import record
from tests.collector.stores import Reader, ingest, postgres_store
from tests.processes import running
from tests.waiting import until


async def test_a_store_of_an_earlier_release_gets_the_tables_that_it_lacks(
    database: Database,
) -> None:
    async with postgres_store(database.url) as store:
        await ingest(store, record("a"), 0)
    names = ("scores", "checkpoints", "marks", "steps", "annotations", "changes")
    tables = (f"TABLE {name}" for name in names)
    for lacking in (*tables, "INDEX groups_overdue"):
        database.sql(f"DROP {lacking}")
    database.sql("UPDATE version SET version = 3")
    async with postgres_store(database.url) as store:
        reader = await Reader.open(store)
        request = pb.CreateCheckpointRequest(consumer="c", checkpoint_id="1")
        assert (await store.create_checkpoint(request, 0)).units == 0
        assert await reader.take_all() == ["a"]
        back = pb.RestoreCheckpointRequest(consumer="c", checkpoint_id="1")
        assert await store.restore_checkpoint(back) == 1
        assert await store.steps("c", 1) == []
        assert await store.changes_after("", 9) == []
    assert database.sql("SELECT version FROM version") == "7"
    assert database.sql("SELECT to_regclass('groups_overdue') IS NULL") == "f"


async def test_a_store_of_another_version_is_refused_untouched(database: Database) -> None:
    for _ in range(2):
        async with postgres_store(database.url) as store:
            await ingest(store, record("a"), 0)
    database.sql("UPDATE version SET version = 99")
    with pytest.raises(StoreError, match=r"version 99, .* a later release: start the service"):
        async with postgres_store(database.url):
            pass
    assert database.sql("SELECT version FROM version") == "99"
    assert database.sql("SELECT count(*) FROM sessions") == "1"


async def test_a_server_that_may_lose_writes_is_refused(database: Database) -> None:
    server = database.server
    try:
        for statement in ("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"):
            server.sql(statement)

        async def refusal() -> str:
            try:
                async with postgres_store(database.url):
                    return ""
            except ConfigError as error:
                return str(error)

        assert "fsync off; give one with fsync on" in await until(refusal)
    finally:
        for statement in ("ALTER SYSTEM RESET fsync", "SELECT pg_reload_conf()"):
            server.sql(statement)


async def test_an_asynchronous_commit_is_made_a_synchronous_one(database: Database) -> None:
    async with postgres_store(f"{database.url}?options=-csynchronous_commit%3Doff") as store:
        sql = "SELECT current_setting('synchronous_commit')"
        assert await store.write(lambda tx: tx.db.value(sql)) == "on"


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(record("a\0b"), id="a session"),
        pytest.param(record("a", "g\0h", 0, 2), id="a group"),
        pytest.param(record("a", random.Random(0).randbytes(5000).hex(), 0, 2), id="a long group"),
    ],
)
async def test_a_name_that_cannot_be_stored_is_refused_and_hurts_no_other(
    database: Database, wrong: Any
) -> None:
    async with postgres_store(database.url) as store:
        done = await asyncio.gather(
            ingest(store, wrong, 0), ingest(store, record("b"), 0), return_exceptions=True
        )
        assert isinstance(done[0], InvalidFieldError)
        assert done[1] is False


async def test_an_address_that_is_none_is_refused_and_a_password_is_never_said(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.runtime.postgres._PATIENCE_MS", 0)
    with pytest.raises(ConfigError) as refused:
        async with postgres_store("postgresql://u:secret@h/d?what=is-this"):
            pass
    assert "secret" not in str(refused.value)
    with pytest.raises(StoreAwayError) as away:
        async with postgres_store("postgresql://u:secret@127.0.0.1:1/d"):
            pass
    assert "secret" not in str(away.value)
    url = database.url.replace("postgres@", "postgres:secret@")
    monkeypatch.setenv("ROLLMESH_COLLECTOR_STORE", url)  # a flag would show it to every user
    async with running("collector", tmp_path, port=0) as collector:
        async with open_channel(collector.address) as channel:
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest_all(stub, "a")
            await database.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Ingest(pb.IngestRequest(sessions=[record("b")]), timeout=TIMEOUT_S)
            assert "secret" not in str(caught.value)
            await database.start()
    written = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "store opened" in written
    assert "secret" not in written


async def test_a_full_store_says_so_over_the_wire(tmp_path: Path, database: Database) -> None:
    async with (
        collector_at(tmp_path, store=database.url, max_stored_bytes=1) as address,
        open_channel(address) as channel,
    ):
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Ingest(pb.IngestRequest(sessions=[record("a")]), timeout=TIMEOUT_S)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
