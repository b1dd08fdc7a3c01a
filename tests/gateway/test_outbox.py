"""The outbox against a real server: nothing is lost, and nobody waits for another's error."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.gateway import journal
from rollmesh.gateway.outbox import Outbox
from rollmesh.runtime.database import Database
from rollmesh.runtime.errors import InvalidFieldError, StoreFullError
from rollmesh.runtime.interceptors import RpcInterceptor
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, types_pb2

pytestmark = pytest.mark.timeout(60)


class Collector(collector_pb2_grpc.CollectorServiceServicer):
    """Keeps what it takes, call by call."""

    def __init__(self, check: Callable[[list[str]], None]) -> None:
        """Takes what raises where a call is refused."""
        self.check = check
        self.taken: list[list[str]] = []
        self.came = asyncio.Condition()

    async def Ingest(self, request: pb.IngestRequest, context: Any) -> pb.IngestResponse:
        ids = [session.session_id for session in request.sessions]
        self.check(ids)
        async with self.came:
            self.taken.append(ids)
            self.came.notify_all()
        return pb.IngestResponse(duplicates=[False] * len(ids))

    async def has(self, ids: set[str]) -> None:
        async with self.came:
            await self.came.wait_for(lambda: {id_ for call in self.taken for id_ in call} == ids)


def close(names: list[str], size: int = 10) -> Callable[[Any], None]:
    """Returns a work that puts closed sessions into the journal."""
    rows = [
        (name, types_pb2.SessionRecord(session_id=name, group_id="x" * size).SerializeToString())
        for name in names
    ]
    return lambda db: db.executemany("INSERT INTO outbox VALUES (?, ?)", rows).close()


@asynccontextmanager
async def delivering(
    folder: Path, names: list[str], check: Callable[[list[str]], None] = lambda _: None, **size: int
) -> AsyncIterator[tuple[Collector, Outbox, Database]]:
    """Runs an outbox over a journal that has sessions."""
    collector = Collector(check)  # type: ignore[abstract]
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    collector_pb2_grpc.add_CollectorServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    path = folder / "gateway.sqlite"
    async with Database(path, journal.SCHEMA, journal.SCHEMA_VERSION) as database:
        await database.run(close(names, **size))
        outbox = Outbox(database, f"127.0.0.1:{port}", 1000)
        async with asyncio.TaskGroup() as group, asyncio.timeout(30):
            running = group.create_task(outbox.run())
            yield collector, outbox, database
            running.cancel()
        await outbox.close()
    await server.stop(None)


async def forgotten(database: Database) -> None:
    """Returns once the journal holds no closed session."""
    while await database.run(journal.count_undelivered):  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


async def test_sessions_go_once_in_order_and_several_in_a_call(tmp_path: Path) -> None:
    names = [f"s{at}" for at in range(100)]
    async with delivering(tmp_path, names) as (collector, outbox, database):
        await collector.has(set(names))
        await forgotten(database)
        assert all(call == names[names.index(call[0]) :][: len(call)] for call in collector.taken)
        assert sorted(name for call in collector.taken for name in call) == sorted(names)
        assert len(collector.taken) < len(names) / 10
        await database.run(close(["later"]))  # its place in the journal was another's before
        outbox.added()
        await collector.has({*names, "later"})
        await forgotten(database)
        assert outbox.undelivered == 0


async def test_large_sessions_share_a_call_up_to_a_size(tmp_path: Path) -> None:
    async with delivering(tmp_path, list("abcde"), size=1_500_000) as (collector, _, _):
        await collector.has(set("abcde"))
        assert sorted(collector.taken) == [["a", "b"], ["c", "d"], ["e"]]


async def test_no_more_is_read_the_more_was_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, limits = journal.undelivered, []

    def noted(db: sqlite3.Connection, limit: int) -> Any:
        limits.append(limit)
        return read(db, limit)

    monkeypatch.setattr(journal, "undelivered", noted)
    names = [f"s{at}" for at in range(1000)]
    async with delivering(tmp_path, names) as (collector, _, database):
        await collector.has(set(names))
        await forgotten(database)
    assert len(limits) > 10
    assert max(limits) <= 3 * 64  # two calls of 64 that are under way, and the next one


async def test_a_session_that_is_refused_holds_up_no_other_and_is_sent_again(
    tmp_path: Path,
) -> None:
    names, wrong = [f"s{at}" for at in range(200)], {"s3", "s4", "s5", "s70"}

    def check(ids: list[str]) -> None:
        if wrong.intersection(ids):
            raise InvalidFieldError("group_size", "is another")

    async with delivering(tmp_path, names, check) as (collector, _, database):
        await collector.has(set(names) - wrong)
        wrong.clear()
        await collector.has(set(names))
        await forgotten(database)
        taken = [name for call in collector.taken for name in call]
        assert sorted(taken) == sorted(names)


async def test_a_full_collector_gets_everything_once_it_has_room(tmp_path: Path) -> None:
    names, calls = [f"s{at}" for at in range(1000)], 0

    def check(ids: list[str]) -> None:
        nonlocal calls
        calls += 1
        if calls < 6:
            raise StoreFullError("full", retry_delay_ms=1)

    async with delivering(tmp_path, names, check) as (collector, _, database):
        await collector.has(set(names))
        await forgotten(database)
        assert sorted(name for call in collector.taken for name in call) == sorted(names)
        assert sum(len(call) == 1 for call in collector.taken) <= 128  # what was tried, alone


async def test_a_journal_that_cannot_write_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, times = journal.delete_delivered, 0

    def full_at_first(db: sqlite3.Connection, session_ids: list[str]) -> None:
        nonlocal times
        times += 1
        if times <= 2:
            raise sqlite3.OperationalError("database or disk is full")
        delete(db, session_ids)

    monkeypatch.setattr(journal, "delete_delivered", full_at_first)
    async with delivering(tmp_path, ["a"]) as (collector, outbox, database):
        await forgotten(database)
        await database.run(close(["b"]))
        outbox.added()
        await collector.has({"a", "b"})
        await forgotten(database)
    assert collector.taken == [["a"], ["b"]]
