"""What leaves a store, and when. The same for every store."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from rollmesh.collector import Retention, Settlement, Store, Unit
from rollmesh.runtime.errors import SessionUnknownError, StoreFullError
from rollmesh.v1 import collector_pb2 as pb, session_pb2
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record, trajectory
from tests.collector.stores import (
    Reader,
    fill,
    ingest,
    postgres_store,
    sqlite_store,
)

GROUP = pb.DELIVERY_UNIT_GROUP
PAGE_BYTES = 16_384
HOUR = Retention(settled_ms=3_600_000, max_bytes=2**30)
Opener: TypeAlias = Callable[[Retention], AbstractAsyncContextManager[Store]]


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    @asynccontextmanager
    async def open_(retention: Retention) -> AsyncIterator[Store]:
        if request.param == "sqlite":
            async with sqlite_store(tmp_path, retention) as store:
                yield store
        else:
            async with (
                postgres_database() as database,
                postgres_store(database.url, retention) as store,
            ):
                yield store

    return open_


async def test_a_session_leaves_when_all_have_settled_it_and_its_time_is_over(
    opened: Opener,
) -> None:
    async with opened(HOUR) as store:
        await fill(store, [record("a"), record("b")])
        assert await store.retain(10**9) == 0  # nobody has taken anything
        one, other = await Reader.open(store, "one"), await Reader.open(store, "other", GROUP)
        await one.take_all(now_ms=1000)
        assert await store.retain(10**9) == 0  # the other one has not
        await other.take(1)
        await other.settle("a", now_ms=2000)
        assert await store.retain(3_600_000 + 1999) == 0
        assert await store.retain(3_600_000 + 2000) == 1
        with pytest.raises(SessionUnknownError):
            await store.session("a", arrays=False)
        counts = await store.counts()
        assert (counts.sessions, counts.trajectories, counts.removed_sessions) == (1, 1, 1)
        assert (await store.standing("one")).ready == 0
        assert (await store.standing("other")).ready == 1


async def test_a_repeat_of_a_removed_session_is_still_a_repeat(opened: Opener) -> None:
    async with opened(HOUR) as store:
        reader = await Reader.open(store)
        await fill(store, [record("a")])
        await reader.take_all()
        assert await store.retain(10**9) == 1
        assert await ingest(store, record("a"), 10**9)
        assert await reader.fetch() == []
        late = await Reader.open(store, "late")
        assert await late.fetch() == []
        assert (await store.standing("late")).ready == 0


async def test_a_group_leaves_as_a_whole_and_later_sessions_are_surplus(opened: Opener) -> None:
    async with opened(HOUR) as store:
        sessions = await Reader.open(store, "sessions")
        groups = await Reader.open(store, "groups", GROUP)
        await fill(store, [record("g0", "g", 0, 2)])
        await sessions.take_all()
        assert await store.retain(10**9) == 0  # its group waits
        await fill(store, [record("g1", "g", 1, 2)])
        await sessions.take_all()
        await groups.take_all()
        assert await store.retain(10**9) == 2
        await fill(store, [record("late", "g", 1, 2)])
        assert await groups.fetch() == []
        entries, _ = await store.filtered("groups", 10, "")
        assert [entry.session_id for entry in entries] == ["late"]
        assert await sessions.take_all() == ["late"]
        assert await store.retain(10**9) == 1


async def test_a_group_with_the_id_of_a_session_leaves_without_it(opened: Opener) -> None:
    async with opened(HOUR) as store:
        sessions = await Reader.open(store, "sessions")
        waiting = record("g", "x", 0, 2)
        await fill(store, [waiting, record("a", "g")])
        dropped = [Settlement(id_, pb.FILTER_REASON_TURNS) for id_ in await sessions.ids()]
        await store.settle("sessions", dropped[:1], 0)
        await sessions.load(Unit(2, "a", ("a",)))
        await sessions.settle("a")
        await (await Reader.open(store, "groups", GROUP)).take_all()
        (listed,), _ = await store.filtered("sessions", 10, "")
        assert listed.delivery_id == "g"
        assert await store.retain(10**9) == 1
        assert (await store.standing("sessions")).ready == 0
        assert (await store.filtered("sessions", 10, ""))[0] == [listed]


async def test_units_held_by_a_deleted_consumer_may_leave(opened: Opener) -> None:
    async with opened(HOUR) as store:
        one, _ = await Reader.open(store, "one"), await Reader.open(store, "gone")
        await fill(store, [record("a")])
        await one.take_all()
        assert await store.retain(10**9) == 0
        await store.delete_consumer("gone")
        assert await store.retain(10**9) == 1


async def test_units_that_a_consumer_skipped_do_not_hold_the_log(opened: Opener) -> None:
    async with opened(HOUR) as store:
        await fill(store, [record("a")])
        await Reader.open(store, "late", start=pb.Position(end=pb.LOG_END_LATEST))
        assert await store.retain(10**9) == 1


async def test_near_its_limit_a_store_gives_up_settled_sessions_and_never_others(
    opened: Opener,
) -> None:
    most = 1_500_000
    async with opened(Retention(settled_ms=10**12, max_bytes=most)) as store:
        reader = await Reader.open(store)
        taken = 0
        for at in range(200):  # ten times what fits
            try:
                assert not await ingest(store, large(f"s{at}"), at)
            except StoreFullError:
                assert (await store.counts()).sessions > 5  # it was full, of open sessions
                taken += len(await reader.take_all(now_ms=at))
                assert await store.retain(at)
                assert not await ingest(store, large(f"s{at}"), at)
            # SQLite's file grows by whole pages, the last of which need not be full.
            assert (await store.counts()).stored_bytes <= most + PAGE_BYTES
        taken += len(await reader.take_all(now_ms=200))
        assert taken == 200


async def test_a_full_store_of_open_sessions_keeps_them(opened: Opener) -> None:
    async with opened(Retention(settled_ms=0, max_bytes=1)) as store:
        with pytest.raises(StoreFullError):
            await ingest(store, record("a"), 0)
    async with opened(Retention(settled_ms=0, max_bytes=2**30)) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        await reader.take()
        assert await store.retain(10**9) == 0


async def test_the_file_of_a_store_does_not_grow_with_what_passed_through(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path, Retention(settled_ms=0, max_bytes=2**30)) as store:
        reader = await Reader.open(store)
        sizes: list[int] = []
        for turn in range(10):
            for at in range(20):
                await ingest(store, large(f"{turn}-{at}"), turn)
            assert len(await reader.take_all(now_ms=turn)) == 20
            assert await store.retain(turn + 1) == 20
            sizes.append((tmp_path / "collector.sqlite").stat().st_size)
    assert sizes[-1] <= sizes[2] * 1.1


def large(session_id: str, tokens: int = 10_000) -> session_pb2.SessionRecord:
    """A session that is made for one call: the store takes the arrays out of it."""
    made = record(session_id)
    made.trajectories[0].CopyFrom(trajectory(session_id, tokens))
    return made
