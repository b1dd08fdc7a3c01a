"""Round trips of the Redis store, and the state that others find if it stops between two."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from redis import asyncio as redis
from redis.asyncio.connection import AbstractConnection

from rollmesh.collector.delivery.filters import judge
from rollmesh.collector.delivery.units import Arrival, Settlement
from rollmesh.collector.storage.redis.client import Command, RedisClient, Value, connected
from rollmesh.collector.storage.redis.store import RedisStore
from rollmesh.runtime.errors import StoreAwayError
from rollmesh.v1 import collector_pb2 as pb, session_pb2
from tests.collector.collectors import GROUP
from tests.collector.records import record
from tests.collector.redis_server import redis_server
from tests.collector.stores import KEEP, MAIN_ONLY, Reader, auxiliary, group, ingest

_INGEST_TRIPS = 4
_OPEN_TRIPS = 14
_FEW, _MANY = 2, 64
FIRST_ONE = pb.GroupPolicy(samples=1)
Hook: TypeAlias = Callable[[], Awaitable[None]]


class Watched(RedisClient):
    """A client at whose trips something happens."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.trips = 0
        self.before: Mapping[int, Hook] = {}
        self.after: Mapping[int, Hook] = {}

    async def run(self, command: str, *arguments: Value) -> Any:
        return await self._trip(partial(super().run, command, *arguments))

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        return list(await self._trip(partial(super().run_all, commands))) if commands else []

    async def run_at_once(self, commands: Sequence[Command]) -> list[Any]:
        return list(await self._trip(partial(super().run_at_once, commands))) if commands else []

    async def _trip(self, work: Callable[[], Awaitable[Any]]) -> Any:
        at, self.trips = self.trips, self.trips + 1
        if at in self.before:
            await self.before[at]()
        found = await work()
        if at in self.after:
            await self.after[at]()
        return found


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[Watched]:
    connection = redis.Redis.from_url(url, protocol=2)
    try:
        yield Watched(connection)
    finally:
        await connection.aclose()


@asynccontextmanager
async def two_collectors(folder: Path) -> AsyncIterator[tuple[Watched, RedisStore, RedisStore]]:
    """Two stores on one Redis; the client is the first one's."""
    async with (
        redis_server(folder) as server,
        watched(server.url) as client,
        connected(server.url) as another,
    ):
        yield client, RedisStore(client, KEEP), RedisStore(another, KEEP)


async def _lost() -> None:
    raise StoreAwayError("gone")


def _arrivals(*sessions: session_pb2.SessionRecord) -> list[Arrival]:
    return [Arrival(session) for session in sessions]


async def _listed(store: RedisStore, consumer: str) -> list[tuple[str, str, int]]:
    entries, _ = await store.filtered(consumer, 100, "")
    return [(entry.delivery_id, entry.session_id, entry.reason) for entry in entries]


@pytest.mark.parametrize("answer", [False, True], ids=["its way", "its answer"])
@pytest.mark.parametrize("trip", range(_INGEST_TRIPS))
async def test_an_ingest_that_loses_any_trip_on_its_way_is_finished_by_its_repeat(
    tmp_path: Path, trip: int, *, answer: bool
) -> None:
    def arrivals() -> list[Arrival]:  # new for each call, because the store removes their arrays
        return _arrivals(
            record("a"),
            *group("g", 0, 1, size=2),
            *(auxiliary(f"h{at}", group="h", index=at, size=2) for at in (0, 1)),
        )

    async with redis_server(tmp_path) as server, watched(server.url) as client:
        store = RedisStore(client, KEEP)
        sessions = await Reader.open(store, "sessions")
        groups = await Reader.open(store, "groups", GROUP)
        first = await Reader.open(store, "first", GROUP, groups=FIRST_ONE, filter=MAIN_ONLY)
        client.trips = 0
        client.before, client.after = ({}, {trip: _lost}) if answer else ({trip: _lost}, {})
        with pytest.raises(StoreAwayError):
            await store.ingest(arrivals(), 0)
        client.before, client.after = {}, {}
        for _ in range(2):
            await store.ingest(arrivals(), 0)
        assert await store.ingest(arrivals(), 0) == [True] * 5
        assert await sessions.ids() == ["a", "g0", "g1", "h0", "h1"]
        assert await groups.take() == [
            ("a", 1, ["a"]),
            ("g", 1, ["g0", "g1"]),
            ("h", 1, ["h0", "h1"]),
        ]
        assert await first.take() == [("a", 1, ["a"]), ("g", 1, ["g0"])]
        assert await _listed(store, "groups") == []
        assert await _listed(store, "first") == [
            ("g", "g1", pb.FILTER_REASON_SURPLUS),
            ("h", "", pb.FILTER_REASON_INCOMPLETE_GROUP),
        ]
        assert [one.units for one in (await store.standing("first")).filtered] == [1, 1]


@pytest.mark.parametrize("trip", range(1, _INGEST_TRIPS))
async def test_what_another_collector_does_between_the_trips_of_an_ingest_is_said_once(
    tmp_path: Path, trip: int
) -> None:
    async with two_collectors(tmp_path) as (client, store, other):
        groups = await Reader.open(store, "groups", GROUP)
        first = await Reader.open(store, "first", GROUP, groups=FIRST_ONE)

        async def second() -> None:
            await other.ingest(_arrivals(*group("g", 1, size=2)), 0)

        client.trips, client.before = 0, {trip: second}
        await store.ingest(_arrivals(*group("g", 0, size=2)), 0)
        (whole,) = await groups.take()
        ((_, _, taken),) = await first.take()
        assert whole == ("g", 1, ["g0", "g1"])
        (late,) = {"g0", "g1"} - set(taken)
        assert await _listed(store, "first") == [("g", late, pb.FILTER_REASON_SURPLUS)]
        assert await _listed(store, "groups") == []


async def test_a_session_that_one_collector_left_half_stored_counts_for_another_ones_group(
    tmp_path: Path,
) -> None:
    async with two_collectors(tmp_path) as (client, store, other):
        groups = await Reader.open(other, "groups", GROUP)
        client.after = {1: _lost}
        with pytest.raises(StoreAwayError):
            await ingest(store, record("g0", "g", 0, 2), 0)
        assert not await ingest(other, record("g1", "g", 1, 2), 0)
        assert await groups.take() == [("g", 1, ["g0", "g1"])]
        assert await ingest(other, record("g0", "g", 0, 2), 0)
        assert await _listed(other, "groups") == []


@pytest.mark.parametrize("trip", range(8))
async def test_a_session_that_comes_while_its_group_is_removed_is_delivered(
    tmp_path: Path, trip: int
) -> None:
    async with two_collectors(tmp_path) as (client, store, other):
        reader = await Reader.open(other)
        await ingest(other, record("early", "g"), 0)
        await reader.take_all()

        async def second() -> None:
            await ingest(other, record("late", "g"), 0)

        client.before = {trip: second}
        assert await store.retain(2 * KEEP.settled_ms) == 0
        assert client.trips > trip
        assert await reader.take() == [("late", 1, ["late"])]
        await reader.settle("late")
        assert await store.retain(2 * KEEP.settled_ms) == 2


@pytest.mark.parametrize("answer", [False, True], ids=["its way", "its answer"])
@pytest.mark.parametrize("trip", range(_OPEN_TRIPS))
async def test_a_consumer_whose_opening_breaks_off_gets_everything_when_it_comes_again(
    tmp_path: Path, trip: int, *, answer: bool
) -> None:
    async with redis_server(tmp_path) as server, watched(server.url) as client:
        store = RedisStore(client, KEEP)
        await store.ingest(_arrivals(record("a"), record("b"), *group("g", 0, 1, size=2)), 0)
        start = pb.Position(delivery_id="b")
        client.trips = 0
        client.before, client.after = ({}, {trip: _lost}) if answer else ({trip: _lost}, {})
        with pytest.raises(StoreAwayError):
            await Reader.open(store, "c", GROUP, groups=FIRST_ONE, start=start)
        client.before, client.after = {}, {}
        reader = await Reader.open(store, "c", GROUP, groups=FIRST_ONE, start=start)
        assert await reader.take() == [("b", 1, ["b"]), ("g", 1, ["g0"])]
        assert await _listed(store, "c") == [("g", "g1", pb.FILTER_REASON_SURPLUS)]


async def test_a_deadline_that_outlived_its_group_being_made_is_forgotten(tmp_path: Path) -> None:
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        store = RedisStore(client, KEEP)
        await Reader.open(store, "c", GROUP, groups=pb.GroupPolicy(deadline_ms=1))
        await ingest(store, record("a"), 0)
        await client.run("ZADD", client.key("deadlines"), 0, "c:c\0a")  # by a collector that raced
        assert [await store.tick(now_ms) for now_ms in (1, 10_000)] == [True, False]


async def test_a_log_made_from_more_groups_than_are_read_at_once_holds_them_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.collector.storage.redis.ingest._BACKFILL_BATCH", 2)
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        store = RedisStore(client, KEEP)
        await store.ingest(_arrivals(*(record(f"s{at}") for at in range(5))), 0)
        start = pb.Position(delivery_id="s3")
        reader = await Reader.open(store, "c", GROUP, groups=FIRST_ONE, start=start)
        assert await reader.ids() == ["s3", "s4"]
        every = await Reader.open(store, "every", GROUP, groups=FIRST_ONE)
        assert await every.ids() == [f"s{at}" for at in range(5)]


async def _ingested(store: RedisStore, count: int) -> Hook:
    """An over-sampled group and a late session of every group's, in two logs."""
    arrivals = _arrivals(
        *(one for at in range(count) for one in group(f"g{count}-{at}-", 0, 1, size=2))
    )

    async def work() -> None:
        await store.ingest(arrivals, 0)

    return work


async def _timed_out(store: RedisStore, count: int) -> Hook:
    """Sessions that waited for rewards, each the first of its group."""
    await store.ingest([Arrival(record(f"t{count}-{at}"), 10) for at in range(count)], 0)

    async def work() -> None:
        assert await store.tick(10)

    return work


async def _overdue(store: RedisStore, count: int) -> Hook:
    """Groups that go out in part at their deadline."""
    await Reader.open(store, "part", GROUP, groups=pb.GroupPolicy(deadline_ms=5, min_samples=1))
    await store.ingest(
        _arrivals(*(record(f"d{count}-{at}", f"d{count}-{at}g", 0, 2) for at in range(count))), 20
    )

    async def work() -> None:
        assert await store.tick(25)

    return work


async def _loaded_and_dropped(store: RedisStore, count: int) -> Hook:
    """Units that a filter takes something out of, and that are dropped then."""
    sessions = [auxiliary(f"f{count}-{at}") for at in range(count)]
    for session in sessions:
        session.trajectories.add().CopyFrom(record("x").trajectories[0])
    await store.ingest(_arrivals(*sessions), 0)
    reader = await Reader.open(store, "filtering", filter=MAIN_ONLY)
    units = [unit for unit in await reader.fetch() if unit.unit_id.startswith(f"f{count}-")]

    async def work() -> None:
        loaded = await store.load("filtering", units, partial(judge, MAIN_ONLY, None), 0)
        assert len(loaded) == count
        reason = pb.FILTER_REASON_NOTHING_LEFT
        assert await store.settle(
            "filtering", [Settlement(one.unit_id, reason) for one in units], 0
        )

    return work


async def _left(store: RedisStore, count: int) -> Hook:
    """Settled sessions whose time is over."""
    reader = await Reader.open(store, "first", GROUP, groups=FIRST_ONE)
    await reader.take_all()
    await store.ingest(_arrivals(*(record(f"r{count}-{at}") for at in range(count))), 0)
    await reader.take_all()

    async def work() -> None:
        assert await store.retain(2 * KEEP.settled_ms) >= count

    return work


async def _sought(store: RedisStore, count: int) -> Hook:
    """A consumer that is moved back over what it settled."""
    await store.ingest(_arrivals(*(record(f"b{count}-{at}") for at in range(count))), 0)
    reader = await Reader.open(store, f"back-{count}")
    await reader.take_all()

    async def work() -> None:
        assert (await store.seek(reader.name, pb.Position(end=pb.LOG_END_EARLIEST))).again >= count

    return work


async def _turned(store: RedisStore, count: int) -> Hook:
    """A consumer that settled much and takes another log."""
    await store.ingest(_arrivals(*(record(f"p{count}-{at}") for at in range(count))), 0)
    reader = await Reader.open(store, f"policy-{count}", GROUP, groups=FIRST_ONE)
    await reader.take_all()

    async def work() -> None:
        await Reader.open(store, reader.name, GROUP)

    return work


async def _opened(store: RedisStore, count: int) -> Hook:
    """A consumer whose log is made from what is stored."""
    await store.ingest(_arrivals(*(record(f"o{count}-{at}") for at in range(count))), 0)

    async def work() -> None:
        await Reader.open(store, f"own-{count}", GROUP, groups=FIRST_ONE)

    return work


@pytest.mark.parametrize(
    ("prepared", "most"),
    [
        pytest.param(_ingested, _INGEST_TRIPS, id="ingest"),
        pytest.param(_timed_out, 5, id="waits that are over"),
        pytest.param(_overdue, 5, id="deadlines"),
        pytest.param(_loaded_and_dropped, 5, id="load and settle"),
        pytest.param(_opened, 15, id="a log of its own"),
        pytest.param(_turned, 16, id="another log"),
        pytest.param(_sought, 18, id="seek"),
        pytest.param(_left, 12, id="retention"),
    ],
)
async def test_the_trips_of_a_call_do_not_grow_with_what_it_is_about(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepared: Callable[[RedisStore, int], Awaitable[Hook]],
    most: int,
) -> None:
    sent = 0
    send = AbstractConnection.send_packed_command

    async def counting(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal sent
        sent += 1
        await send(self, *arguments, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counting)
    async with redis_server(tmp_path) as server, connected(server.url) as client:
        store = RedisStore(client, KEEP)
        await Reader.open(store, "first", GROUP, groups=FIRST_ONE)
        trips: list[int] = []
        for count in (_FEW, _MANY):
            work = await prepared(store, count)
            before = sent
            await work()
            trips.append(sent - before)
    assert trips[0] == trips[1] <= most
