"""Calls to PostgreSQL that break off, meet those of another collector, or are about many things."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
import pytest

from rollmesh.collector import Arrival, Settlement, Store
from rollmesh.runtime import Connection
from rollmesh.runtime.errors import StoreAwayError, StoreFullError
from rollmesh.v1 import collector_pb2 as pb, session_pb2
from tests.collector.collectors import GROUP
from tests.collector.postgres_server import Database
from tests.collector.records import record
from tests.collector.stores import (
    KEEP,
    MAIN_ONLY,
    Reader,
    auxiliary,
    fill,
    group,
    ingest,
    postgres_store,
)

FEW, MANY = 2, 64
FIRST_ONE = pb.GroupPolicy(samples=1)
Hook: TypeAlias = Callable[[], Awaitable[None]]


def arrivals(*sessions: session_pb2.SessionRecord) -> list[Arrival]:
    return [Arrival(session) for session in sessions]


async def listed(store: Store, consumer: str) -> list[tuple[str, str, int]]:
    entries, _ = await store.filtered(consumer, 100, "")
    return [(entry.delivery_id, entry.session_id, entry.reason) for entry in entries]


class Losing:
    """A cursor that loses its connection at statements of one kind, or their answers."""

    def __init__(self, inner: Any, connection: Any, statement: str, *, answer: bool) -> None:
        self._inner, self._connection = inner, connection
        self._statement, self._answer = statement.encode(), answer

    def execute(self, sql: bytes, *arguments: Any, **options: Any) -> Any:
        return self._lose(sql, lambda: self._inner.execute(sql, *arguments, **options))

    def executemany(self, sql: bytes, parameters: Any) -> Any:
        return self._lose(sql, lambda: self._inner.executemany(sql, parameters))

    def _lose(self, sql: bytes, run: Callable[[], Any]) -> Any:
        if not sql.startswith(self._statement):
            return run()
        if self._answer:
            run()
        self._connection.close()
        raise psycopg.OperationalError("the connection is lost")


@contextmanager
def losing(statement: str, *, answer: bool) -> Iterator[None]:
    """Loses the connection at statements of one kind, or with their answers."""
    cursor = Connection.cursor

    def lossy(self: Any) -> Any:
        return Losing(cursor(self), self._connection, statement, answer=answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "cursor", lossy)
        yield


LOSSES = [
    pytest.param("INSERT INTO sessions", False, id="in the middle"),
    pytest.param("COMMIT", False, id="before the commit"),
    pytest.param("COMMIT", True, id="after the commit"),
]


@pytest.mark.parametrize(("statement", "answer"), LOSSES)
async def test_an_ingest_that_breaks_off_is_finished_by_its_repeat(
    database: Database, statement: str, *, answer: bool
) -> None:
    def sent() -> list[Arrival]:  # new for each call, because the store removes their arrays
        return arrivals(
            record("a"),
            *group("g", 0, 1, size=2),
            *(auxiliary(f"h{at}", group="h", index=at, size=2) for at in (0, 1)),
        )

    async with postgres_store(database.url) as store:
        sessions = await Reader.open(store, "sessions")
        groups = await Reader.open(store, "groups", GROUP)
        first = await Reader.open(store, "first", GROUP, groups=FIRST_ONE, filter=MAIN_ONLY)
        with losing(statement, answer=answer), pytest.raises(StoreAwayError):
            await store.ingest(sent(), 0)
        assert await store.ingest(sent(), 0) == [answer] * 5
        assert await store.ingest(sent(), 0) == [True] * 5
        assert await sessions.ids() == ["a", "g0", "g1", "h0", "h1"]
        assert await groups.take() == [
            ("a", 1, ["a"]),
            ("g", 1, ["g0", "g1"]),
            ("h", 1, ["h0", "h1"]),
        ]
        assert await first.take() == [("a", 1, ["a"]), ("g", 1, ["g0"])]
        assert await listed(store, "groups") == []
        assert await listed(store, "first") == [
            ("g", "g1", pb.FILTER_REASON_SURPLUS),
            ("h", "", pb.FILTER_REASON_INCOMPLETE_GROUP),
        ]
        assert [one.units for one in (await store.standing("first")).filtered] == [1, 1]


@pytest.mark.parametrize(("statement", "answer"), [("COMMIT", False), ("COMMIT", True)])
async def test_a_consumer_whose_opening_breaks_off_gets_everything_when_it_is_opened_again(
    database: Database, statement: str, *, answer: bool
) -> None:
    async with postgres_store(database.url) as store:
        await store.ingest(arrivals(record("a"), record("b"), *group("g", 0, 1, size=2)), 0)
        start = pb.Position(delivery_id="b")
        with losing(statement, answer=answer), pytest.raises(StoreAwayError):
            await Reader.open(store, "c", GROUP, groups=FIRST_ONE, start=start)
        reader = await Reader.open(store, "c", GROUP, groups=FIRST_ONE, start=start)
        assert await reader.take() == [("b", 1, ["b"]), ("g", 1, ["g0"])]
        assert await listed(store, "c") == [("g", "g1", pb.FILTER_REASON_SURPLUS)]


async def test_a_session_that_is_stored_while_its_group_is_removed_is_delivered(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres_store(database.url) as store, postgres_store(database.url) as other:
        reader = await Reader.open(other)
        await ingest(other, record("early", "g"), 0)
        await reader.take_all()
        reading = store.read

        async def found(work: Any) -> Any:
            cursor, keys = await reading(work)
            if keys:
                await ingest(other, record("late", "g"), 0)
            return cursor, keys

        monkeypatch.setattr(store, "read", found)
        assert await store.retain(2 * KEEP.settled_ms) == 0
        monkeypatch.undo()
        assert await reader.take() == [("late", 1, ["late"])]
        await reader.settle("late")
        assert await store.retain(2 * KEEP.settled_ms) == 2


async def test_a_server_without_room_pushes_back_and_still_delivers(database: Database) -> None:
    async with postgres_store(database.url) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        database.sql(
            "CREATE FUNCTION full_() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = 'disk_full'; END $$;"
            "CREATE TRIGGER full_ BEFORE INSERT ON sessions EXECUTE FUNCTION full_()"
        )
        with pytest.raises(StoreFullError) as caught:
            await ingest(store, record("b"), 0)
        assert caught.value.retry_delay_ms
        assert await reader.take_all() == ["a"]
        database.sql("DROP TRIGGER full_ ON sessions")
        assert not await ingest(store, record("b"), 0)
        assert await reader.take_all() == ["b"]


async def _ingested(store: Store, count: int) -> Hook:
    """An over-sampled group and a late session of every group, in two logs."""
    sent = arrivals(*(one for at in range(count) for one in group(f"g{count}-{at}-", 0, 1, size=2)))

    async def work() -> None:
        await store.ingest(sent, 0)

    return work


async def _timed_out(store: Store, count: int) -> Hook:
    """Sessions that waited for rewards, each the first of its group."""
    await store.ingest([Arrival(record(f"t{count}-{at}"), 10) for at in range(count)], 0)

    async def work() -> None:
        assert await store.tick(10)

    return work


async def _overdue(store: Store, count: int) -> Hook:
    """Groups that are delivered in part at their deadline."""
    await Reader.open(store, "part", GROUP, groups=pb.GroupPolicy(deadline_ms=5, min_samples=1))
    await store.ingest(
        arrivals(*(record(f"d{count}-{at}", f"d{count}-{at}g", 0, 2) for at in range(count))), 20
    )

    async def work() -> None:
        assert await store.tick(25)

    return work


async def _loaded_and_dropped(store: Store, count: int) -> Hook:
    """Units that a filter takes something out of, and that are then dropped."""
    sessions = [auxiliary(f"f{count}-{at}") for at in range(count)]
    for session in sessions:
        session.trajectories.add().CopyFrom(record("x").trajectories[0])
    await store.ingest(arrivals(*sessions), 0)
    reader = await Reader.open(store, "filtering", filter=MAIN_ONLY)
    units = [unit for unit in await reader.fetch() if unit.unit_id.startswith(f"f{count}-")]

    async def work() -> None:
        loaded = await store.load(reader.settings, units, 0)
        assert [one and one.attempt for one in loaded] == [1] * count
        reason = pb.FILTER_REASON_NOTHING_LEFT
        assert await store.settle(
            "filtering", [Settlement(one.unit_id, reason) for one in units], 0
        )

    return work


async def _left(store: Store, count: int) -> Hook:
    """Settled sessions whose time is over."""
    reader = await Reader.open(store, "first", GROUP, groups=FIRST_ONE)
    await reader.take_all()
    await store.ingest(arrivals(*(record(f"r{count}-{at}") for at in range(count))), 0)
    await reader.take_all()

    async def work() -> None:
        assert await store.retain(2 * KEEP.settled_ms) >= count

    return work


async def _sought(store: Store, count: int) -> Hook:
    """A consumer that is moved back over what it settled."""
    await store.ingest(arrivals(*(record(f"b{count}-{at}") for at in range(count))), 0)
    reader = await Reader.open(store, f"back-{count}")
    await reader.take_all()

    async def work() -> None:
        assert (
            await store.seek(reader.name, pb.Position(end=pb.LOG_END_EARLIEST), 0)
        ).again >= count

    return work


async def _turned(store: Store, count: int) -> Hook:
    """A consumer that settled much and takes another log."""
    await store.ingest(arrivals(*(record(f"p{count}-{at}") for at in range(count))), 0)
    reader = await Reader.open(store, f"policy-{count}", GROUP, groups=FIRST_ONE)
    await reader.take_all()

    async def work() -> None:
        await Reader.open(store, reader.name, GROUP)

    return work


async def _opened(store: Store, count: int) -> Hook:
    """A consumer whose log is made from what is stored."""
    await store.ingest(arrivals(*(record(f"o{count}-{at}") for at in range(count))), 0)

    async def work() -> None:
        await Reader.open(store, f"own-{count}", GROUP, groups=FIRST_ONE)

    return work


@pytest.mark.parametrize(
    "prepared",
    [
        pytest.param(_ingested, id="ingest"),
        pytest.param(_timed_out, id="waits that are over"),
        pytest.param(_overdue, id="deadlines"),
        pytest.param(_loaded_and_dropped, id="load and settle"),
        pytest.param(_opened, id="a log of its own"),
        pytest.param(_turned, id="another log"),
        pytest.param(_sought, id="seek"),
        pytest.param(_left, id="retention"),
    ],
)
async def test_the_statements_of_a_call_do_not_grow_with_its_sessions(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    prepared: Callable[[Store, int], Awaitable[Hook]],
) -> None:
    sent = 0
    cursor = Connection.cursor

    def counting(self: Any) -> Any:
        nonlocal sent
        sent += 1
        return cursor(self)

    monkeypatch.setattr(Connection, "cursor", counting)
    async with postgres_store(database.url) as store:
        await Reader.open(store, "first", GROUP, groups=FIRST_ONE)
        counts: list[int] = []
        for count in (FEW, MANY):
            work = await prepared(store, count)
            before = sent
            await work()
            counts.append(sent - before)
    assert counts[0] == counts[1]
