"""Journals in PostgreSQL: one gateway at a time writes to each, and all of them end."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from rollmesh.gateway import (
    VERSION,
    Journal,
    ModelFiles,
    SessionKeys,
    SessionSpec,
    Transaction,
    read_closes,
    read_open,
    sweep,
)
from rollmesh.runtime.errors import (
    JournalMovedError,
    RollmeshError,
    SessionKeyWrongError,
    StoreAwayError,
    StoreInDoubtError,
)
from tests.collector.postgres_server import Database, postgres_database
from tests.gateway.closing import mark_delivered, new_tree, write_open, write_small
from tests.gateway.journals import MODEL, postgres_journals
from tests.gateway.worlds import World, said, user
from tests.waiting import until

if TYPE_CHECKING:
    from rollmesh.gateway import PostgresJournals

SHORT_MS = 1000
FREE = "UPDATE journals SET owner = '' WHERE journal = '{}'"
TABLES = """
SELECT table_name, column_name, data_type, is_nullable, collation_name
FROM information_schema.columns WHERE table_schema = 'rollmesh_gateway' ORDER BY 1, 2
"""
EXPIRE = "UPDATE journals SET alive_until = now() - interval '{}'"


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    async with postgres_database() as database:
        yield database


@pytest.fixture
async def gateways(
    database: Database,
) -> "AsyncIterator[tuple[PostgresJournals, PostgresJournals]]":
    """Two gateways of one model."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(postgres_journals(database.url)) for _ in range(2)
        ]
        database.sql("SELECT 1")
        yield first, second


def write(name: str, turns: int = 2) -> Any:
    """Returns a work that stores an open session."""
    world = World()
    for _ in range(turns):
        world.turn((user("x"),), said("A"))
    return lambda tx: write_open(tx, SessionSpec(name, 0, request_id=f"r-{name}"), world.tree)


async def names(opened: Journal) -> list[str]:
    sessions, damaged = await opened.read(partial(read_open, new_tree=new_tree))
    assert not damaged
    return [one.spec.session_id for one in sessions]


async def old_enough(database: Database) -> None:
    """Waits until the server has been up for longer than the short lease."""
    started = "SELECT clock_timestamp() - pg_postmaster_start_time() > interval '2 seconds'"
    await until(lambda: database.sql(started) == "t")


async def test_a_journal_is_held_until_its_lease_is_over_and_then_by_one_other(
    database: Database, gateways: "tuple[PostgresJournals, PostgresJournals]"
) -> None:
    first, second = gateways
    mine = await first.create()
    await mine.run(write("s"))
    assert await second.take() is None
    await first.renew()
    database.sql(EXPIRE.format("1 second"))
    await old_enough(database)
    async with postgres_journals(database.url, lease_ms=SHORT_MS) as third:
        taken = [one for one in await asyncio.gather(third.take(), third.take()) if one]
        assert [(one.journal_id, one.epoch) for one in taken] == [(mine.journal_id, 2)]
        assert taken[0].secret == mine.secret  # keys of sessions stay valid
        assert await names(taken[0]) == ["s"]
        with pytest.raises(JournalMovedError):
            await mine.run(write("late"))
        assert await names(taken[0]) == ["s"]
        await taken[0].run(write("more"))
    assert (await mine.lost()).reason == "JOURNAL_MOVED"


async def test_whoever_renews_hears_that_a_journal_is_anothers(
    database: Database, gateways: "tuple[PostgresJournals, PostgresJournals]"
) -> None:
    first, second = gateways
    mine, other = await first.create(), await first.create()
    database.sql(FREE.format(mine.journal_id))
    taken = await second.take()
    assert taken is not None
    await first.renew()
    assert (await mine.lost()).reason == "JOURNAL_MOVED"
    await other.run(write("s"))


async def test_a_journal_that_is_lost_during_a_renewal_ends_no_other_one(
    database: Database, gateways: "tuple[PostgresJournals, PostgresJournals]"
) -> None:
    first, _ = gateways
    mine, other = await first.create(), await first.create()

    async def lose() -> Journal | None:
        mine.end(StoreInDoubtError("lost in a commit"))
        return await first.take()

    _, again = await asyncio.gather(first.renew(), lose())
    assert again is not None
    assert (again.journal_id, again.epoch) == (mine.journal_id, 2)
    await again.run(write("s"))
    await other.run(write("t"))


async def test_a_gateway_that_stops_within_a_transaction_loses_it_and_the_journal(
    database: Database,
) -> None:
    go_on, loop = threading.Event(), asyncio.get_running_loop()
    await old_enough(database)
    async with (
        postgres_journals(database.url, lease_ms=SHORT_MS) as stopped,
        postgres_journals(database.url, lease_ms=SHORT_MS) as other,
    ):
        mine = await stopped.create()
        in_it = loop.create_future()

        def stop(tx: Transaction) -> None:
            write("s")(tx)
            loop.call_soon_threadsafe(in_it.set_result, None)
            assert go_on.wait(60)

        writing = asyncio.ensure_future(mine.run(stop))
        await in_it
        try:
            taken = await until(other.take, 20)  # before the gateway could break its connection
        finally:
            go_on.set()
        with pytest.raises(StoreAwayError):
            await writing
        assert taken is not None
        with pytest.raises((JournalMovedError, StoreInDoubtError)):
            await mine.run(write("s"))
        assert await names(taken) == []


async def test_the_fence_holds_for_every_journal_of_a_shared_transaction(
    gateways: "tuple[PostgresJournals, PostgresJournals]", database: Database
) -> None:
    first, second = gateways
    lost, kept = await first.create(), await first.create()
    database.sql(FREE.format(lost.journal_id))
    assert await second.take()
    found = await asyncio.gather(
        *(one.run(write(f"{at}")) for at, one in enumerate([kept, lost] * 8)),
        return_exceptions=True,
    )
    assert [isinstance(one, JournalMovedError) for one in found] == [False, True] * 8
    assert sorted(await names(kept), key=int) == [str(at) for at in range(0, 16, 2)]


async def test_released_journals_are_free_at_once_and_other_models_journals_stay(
    database: Database, gateways: "tuple[PostgresJournals, PostgresJournals]"
) -> None:
    first, second = gateways
    mine = await first.create()
    await mine.run(write("s"))
    await mine.release()
    with pytest.raises(JournalMovedError):
        await mine.run(write("late"))
    for model, files in (("judge", MODEL), ("policy", ModelFiles("other", "template"))):
        async with postgres_journals(database.url, model=model, files=files) as others:
            assert await others.take() is None
    taken = await second.take()
    assert taken is not None
    assert await names(taken) == ["s"]


async def test_an_unreachable_server_proves_no_gateway_dead(
    database: Database,
) -> None:
    async with (
        postgres_journals(database.url, lease_ms=60_000) as first,
        postgres_journals(database.url, lease_ms=60_000) as second,
    ):
        mine = await first.create()
        await database.kill()
        with pytest.raises(StoreAwayError):
            await mine.run(write("s"))
        await database.start()
        database.sql(EXPIRE.format("1 hour"))
        assert await second.take() is None  # whoever lives has time to say so
        await first.renew()
        await mine.run(write("s"))
        assert await names(mine) == ["s"]


async def test_a_commit_in_doubt_ends_the_journal_and_its_gateway_takes_it_again(
    gateways: "tuple[PostgresJournals, PostgresJournals]", monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gateways
    mine = await first.create()
    execute = "rollmesh.runtime.postgres.Connection._execute"
    commit = type(mine._writer._connection)._execute  # noqa: SLF001

    def lost_answer(connection: Any, sql: str) -> None:
        commit(connection, sql)
        if sql == "COMMIT":
            connection._connection.close()  # noqa: SLF001
            commit(connection, "SELECT 1")

    with monkeypatch.context() as patch:
        patch.setattr(execute, lost_answer)
        with pytest.raises(StoreInDoubtError):
            await mine.run(write("s"))
    assert (await mine.lost()).reason == "STORE_IN_DOUBT"
    with pytest.raises(RollmeshError):
        await mine.run(write("t"))
    assert await second.take() is None
    again = await first.take()
    assert again is not None
    assert (again.journal_id, again.epoch) == (mine.journal_id, 2)
    assert await names(again) == ["s"]


@pytest.mark.parametrize("version", [15, 16, 17])
async def test_two_gateways_bring_the_tables_of_a_former_release_to_this_one(
    database: Database, version: int
) -> None:
    async with postgres_journals(database.url) as journals:
        mine = await journals.create()
        await mine.run(write("s"))
        await mine.release()
    tables = database.sql(TABLES)
    added = (
        "ALTER TABLE nodes DROP COLUMN sampling",
        "ALTER TABLE nodes DROP COLUMN token_columns",
        "DROP TABLE facts",
    )
    former = "; ".join((*added[version - 15 :], f"UPDATE version SET version = {version:d}"))
    await asyncio.to_thread(database.sql, former)
    assert database.sql(TABLES) != tables
    async with AsyncExitStack() as stack:
        opening = [stack.enter_async_context(postgres_journals(database.url)) for _ in range(2)]
        first, second = await asyncio.gather(*opening)
        assert database.sql(TABLES) == tables
        assert database.sql("SELECT version FROM version") == str(VERSION)
        taken = [one for one in (await first.take(), await second.take()) if one is not None]
        assert [await names(one) for one in taken] == [["s"]]
        await taken[0].run(write("t"))
        assert await names(taken[0]) == ["s", "t"]


async def test_a_journal_without_sessions_can_be_removed_and_leaves_nothing(
    database: Database, gateways: "tuple[PostgresJournals, PostgresJournals]"
) -> None:
    first, _ = gateways
    mine, other = await first.create(), await first.create()
    await other.run(partial(write_small, names=["t"]))
    await mine.run(partial(write_small, names=["s"]))
    assert not await mine.remove()
    await mine.run(lambda tx: mark_delivered(tx, ["s"]))
    assert not await mine.run(sweep)
    assert await mine.run(read_closes) == {"s"}
    assert await mine.remove()
    assert (await mine.lost()).reason == "JOURNAL_MOVED"
    tables = ("sessions", "nodes", "contexts", "session_contexts", "sent", "outbox", "closes")
    counts = {name: database.sql(f"SELECT count(*) FROM {name}") for name in tables}
    assert counts["sessions"] == counts["contexts"] == counts["closes"] == "1"
    assert database.sql("SELECT count(*) FROM journals") == "1"
    assert await other.run(read_closes) == {"t"}


async def test_an_empty_journal_without_a_holder_for_a_day_is_removed(
    database: Database, gateways: "tuple[PostgresJournals, PostgresJournals]"
) -> None:
    first, second = gateways
    full, empty, fresh = [await first.create() for _ in range(3)]
    await full.run(write("s"))
    database.sql(f"{EXPIRE.format('2 days')} WHERE journal <> '{fresh.journal_id}'")
    assert await second.remove_abandoned() == 1
    await first.renew()
    assert (await empty.lost()).reason == "JOURNAL_MOVED"
    assert await names(full) == ["s"]


async def test_an_ended_key_stays_ended_at_the_gateway_that_takes_over(
    gateways: "tuple[PostgresJournals, PostgresJournals]",
) -> None:
    first, second = gateways
    mine = await first.create()
    await mine.run(write("s"))
    async with asyncio.TaskGroup() as tasks:
        keys = SessionKeys(mine, tasks)
        ended = keys.key("s")
        current = await keys.revoke("s", ended, "")
        await mine.release()
        taken = await second.take()
        assert taken is not None
        theirs = SessionKeys(taken, tasks)
        await theirs.restore()
    theirs.check("s", current)
    with pytest.raises(SessionKeyWrongError):
        theirs.check("s", ended)
