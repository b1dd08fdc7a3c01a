"""The outbox against a real server: nothing is lost, and errors delay no other session."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from rollmesh.gateway import (
    MOST_FAILURES,
    Journal,
    Outbox,
    SessionSpec,
    Transaction,
    export as export_module,
    journal,
    outbox as outbox_module,
)
from rollmesh.mesh import CollectorDirectory
from rollmesh.runtime.errors import (
    InvalidFieldError,
    SessionUnknownError,
    StoreAwayError,
    StoreFullError,
)
from rollmesh.runtime.rpc import RpcInterceptor
from rollmesh.v1 import (
    collector_pb2 as pb,
    collector_pb2_grpc,
    gateway_admin_pb2,
    gateway_pb2,
    session_pb2,
)
from tests.gateway.closing import (
    COMPLETED,
    new_tree,
    write_closed,
    write_open,
    write_record,
    write_small,
)
from tests.gateway.journals import Opened
from tests.gateway.worlds import World, random_world, said, user
from tests.waiting import until

_LIMIT_S = 120


class Collector(collector_pb2_grpc.CollectorServiceServicer):
    """Records the sessions of each call."""

    def __init__(self, check: Callable[[list[str]], None]) -> None:
        """Takes what raises where a call is refused."""
        self.check = check
        self.stuck: set[str] = set()
        """Sessions whose calls are never answered."""
        self.hung = 0
        """Number of such calls."""
        self.taken: list[list[str]] = []
        self.records: dict[str, session_pb2.SessionRecord] = {}
        self.limits_s: list[float] = []
        """Time that each call has left."""
        self.came = asyncio.Condition()

    async def Ingest(self, request: pb.IngestRequest, context: Any) -> pb.IngestResponse:
        ids = [session.session_id for session in request.sessions]
        self.check(ids)
        if self.stuck.intersection(ids):
            self.hung += 1
            await asyncio.Event().wait()
        async with self.came:
            self.limits_s.append(context.time_remaining())
            self.taken.append(ids)
            self.records |= {session.session_id: session for session in request.sessions}
            self.came.notify_all()
        return pb.IngestResponse(duplicates=[False] * len(ids))

    async def has(self, ids: set[str]) -> None:
        async with self.came:
            await self.came.wait_for(lambda: {id_ for call in self.taken for id_ in call} == ids)


def close(names: list[str], size: int | None = None) -> Callable[[Any], None]:
    """Returns a work that puts closed sessions into the journal."""
    return lambda tx: write_small(tx, names, size)


@asynccontextmanager
async def delivering(
    opened: Opened,
    names: list[str],
    check: Callable[[list[str]], None] = lambda _: None,
    **size: int,
) -> AsyncIterator[tuple[Collector, Outbox, Journal]]:
    """Runs an outbox over a journal that has sessions."""
    collector = Collector(check)  # type: ignore[abstract]
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    collector_pb2_grpc.add_CollectorServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with opened() as database:
        await database.run(close(names, **size))
        collectors = CollectorDirectory("", f"127.0.0.1:{port}")
        outbox = Outbox(
            database,
            collectors,
            remembered=10,
        )
        await outbox.restore()
        async with asyncio.TaskGroup() as group, asyncio.timeout(_LIMIT_S):
            running = group.create_task(outbox.run())
            yield collector, outbox, database
            running.cancel()
        await collectors.aclose()
    await server.stop(None)


async def forgotten(database: Journal) -> None:
    """Returns once the journal holds no closed session."""

    async def look() -> bool:
        return await database.run(all_rows) == 0

    await until(look)


def all_rows(tx: Transaction) -> int:
    """How many rows closed sessions still have, whatever is remembered of them."""
    tables = ("sessions", "nodes", "contexts", "session_contexts", "sent", "outbox")
    return sum(tx.db.value(f"SELECT count(*) FROM {name}") for name in tables)


async def test_sessions_go_once_in_order_and_several_in_a_call(opened: Opened) -> None:
    names = [f"s{at}" for at in range(100)]
    async with delivering(opened, names) as (collector, outbox, database):
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


async def test_large_sessions_share_a_call_up_to_a_size(opened: Opened) -> None:
    async with delivering(opened, list("abcde"), size=1_500_000) as (collector, _, _):
        await collector.has(set("abcde"))
        assert sorted(collector.taken) == [["a", "b"], ["c", "d"], ["e"]]


async def test_a_session_has_the_time_that_a_slow_link_takes_for_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_SLOWEST_LINK", 1)
    async with delivering(opened, ["a"]) as (collector, _, _):
        await collector.has({"a"})
    (limit_s,) = collector.limits_s
    assert limit_s > collector.records["a"].ByteSize()


async def test_no_more_is_read_the_more_was_delivered(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, limits = outbox_module.undelivered, []

    def noted(tx: Transaction, limit: int) -> Any:
        limits.append(limit)
        return read(tx, limit)

    monkeypatch.setattr(outbox_module, "undelivered", noted)
    names = [f"s{at}" for at in range(500)]
    async with delivering(opened, names) as (collector, _, database):
        await collector.has(set(names))
        await forgotten(database)
    assert len(limits) >= len(names) / 64
    assert max(limits) <= 3 * 64  # two calls of 64 that are under way, and the next one


async def test_a_session_that_is_refused_for_good_is_set_aside_and_can_be_tried_again_or_given_up(
    opened: Opened,
) -> None:
    names, wrong = [f"s{at}" for at in range(200)], {"s3", "s4", "s5", "s70"}

    def check(ids: list[str]) -> None:
        if wrong.intersection(ids):
            raise InvalidFieldError("group_size", "is another")

    async with delivering(opened, names, check) as (collector, outbox, database):
        await collector.has(set(names) - wrong)
        await until(lambda: len(outbox.dead) >= len(wrong))
        await until(lambda: not outbox.undelivered)
        assert not outbox.retried
        found = await outbox.list_dead_letters("", 100)
        assert [one.session_id for one in found] == sorted(wrong)
        assert {one.reason for one in found} == {gateway_admin_pb2.DEAD_LETTER_REASON_REFUSED}
        assert all("group_size" in one.message for one in found)
        dropped, *tried = sorted(wrong)
        await outbox.revive(tried[0], new_tree)
        await until(lambda: not outbox.undelivered)
        assert outbox.dead == wrong
        wrong.clear()
        await outbox.drop(dropped)
        for session_id in tried:
            await outbox.revive(session_id, new_tree)
        await collector.has(set(names) - {dropped})
        await forgotten(database)
        taken = [name for call in collector.taken for name in call]
        assert sorted(taken) == sorted({*names} - {dropped})
        assert (outbox.dead, outbox.undelivered) == (set(), 0)
        with pytest.raises(SessionUnknownError, match="not a dead letter"):
            await outbox.drop(dropped)


async def test_a_full_collector_gets_everything_once_it_has_room(opened: Opened) -> None:
    names, calls = [f"s{at}" for at in range(500)], 0

    def check(ids: list[str]) -> None:
        nonlocal calls
        calls += 1
        if calls < 6:
            raise StoreFullError("full", retry_delay_ms=1)

    async with delivering(opened, names, check) as (collector, outbox, database):
        await collector.has(set(names))
        await forgotten(database)
        assert sorted(name for call in collector.taken for name in call) == sorted(names)
        tried = 2 * 64 + 3  # two calls of several sessions, then each with one
        assert sum(len(call) == 1 for call in collector.taken) <= tried
        assert not outbox.dead


@pytest.mark.parametrize("bad", [2, 12])
async def test_sessions_that_the_collector_fails_on_let_others_pass_and_become_dead_letters(
    opened: Opened, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_LONGEST_RETRY_S", 0.05)  # otherwise it takes half a minute
    names = [f"s{at:02}" for at in range(40)]
    wrong, alone = set(names[:bad]), dict.fromkeys(names, 0)

    def check(ids: list[str]) -> None:
        if len(ids) == 1:
            alone[ids[0]] += 1
        if wrong.intersection(ids):
            raise RuntimeError("a division by zero in the collector")

    async with delivering(opened, names[:bad], check) as (collector, outbox, database):
        await until(lambda: all(alone[name] for name in wrong))
        await database.run(close(names[bad:]))
        outbox.added(len(names) - bad)
        await collector.has(set(names) - wrong)
        await until(lambda: outbox.dead == wrong and not outbox.undelivered)
        assert {alone[name] for name in wrong} == {MOST_FAILURES}
        found = await outbox.list_dead_letters("", 100)
        assert {one.reason for one in found} == {gateway_admin_pb2.DEAD_LETTER_REASON_FAILED}
        assert not outbox.retried


async def test_a_session_whose_record_takes_too_long_lets_others_pass_and_is_a_dead_letter(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_WRITE_S", 0.2)
    monkeypatch.setattr(outbox_module, "_LONGEST_WRITE_S", 0.4)
    names, slow = [f"s{at:02}" for at in range(20)], {"s00", "s01", "s02"}
    export, tried = export_module.export_tree, list[str]()

    def endless(tree: Any, session_id: str, new: Any) -> Iterator[Any]:
        if session_id not in slow:
            yield from export(tree, session_id, new)
            return
        tried.append(session_id)
        while True:
            sum(range(10_000))
            yield

    monkeypatch.setattr(export_module, "export_tree", endless)
    async with delivering(opened, names) as (collector, outbox, database):
        await collector.has(set(names) - slow)
        await until(lambda: outbox.dead == slow and not outbox.undelivered)
        letters = await outbox.list_dead_letters("", 100)
        assert {one.reason for one in letters} == {
            gateway_admin_pb2.DEAD_LETTER_REASON_UNEXPORTABLE
        }
        assert all("was not written in 0.4 s" in one.message for one in letters)
        assert sorted(tried) == sorted([*slow] * 3)  # at the close, with others, then alone
        collectors = CollectorDirectory("", "127.0.0.1:1")
        again = Outbox(database, collectors, remembered=10)  # as after a restart
        await again.restore()
        assert (again.dead, again.undelivered) == (slow, 0)


async def test_a_session_that_hangs_in_the_collector_lets_others_pass_and_is_no_dead_letter(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_INGEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(outbox_module, "_LONGEST_RETRY_S", 0.1)
    async with delivering(opened, []) as (collector, outbox, database):
        collector.stuck = {"a", "b", "c"}
        await database.run(close(sorted(collector.stuck)))
        outbox.added(3)
        await until(lambda: collector.hung > 5)
        names = [f"s{at:02}" for at in range(40)]
        await database.run(close(names))
        outbox.added(len(names))
        await collector.has({*names})
        await until(lambda: collector.hung > 4 * MOST_FAILURES)
        assert not outbox.dead
        collector.stuck.clear()
        await collector.has({*names, "a", "b", "c"})


async def test_a_journal_that_cannot_write_for_a_while_ends_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, times = outbox_module.sweep, 0

    def full_at_first(tx: Transaction) -> bool:
        nonlocal times
        times += 1
        if times <= 2:
            raise StoreFullError("the disk is full")
        return sweep(tx)

    monkeypatch.setattr(outbox_module, "sweep", full_at_first)
    async with delivering(opened, ["a"]) as (collector, outbox, database):
        await forgotten(database)
        await database.run(close(["b"]))
        outbox.added()
        await collector.has({"a", "b"})
        await forgotten(database)
    assert collector.taken == [["a"], ["b"]]


async def test_a_journal_that_is_away_as_the_delivery_begins_delays_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with delivering(opened, ["a", "b"]) as (collector, outbox, database):
        run, times = database.run, 0

        async def away_at_first(work: Callable[[Transaction], Any]) -> Any:
            nonlocal times
            times += 1
            if times <= 2:
                raise StoreAwayError("the server is away")
            return await run(work)

        monkeypatch.setattr(database, "run", away_at_first)  # before the outbox has run
        assert outbox.undelivered == 2
        await collector.has({"a", "b"})
        monkeypatch.undo()
        await forgotten(database)
        assert (times > 2, outbox.undelivered) == (True, 0)


@pytest.mark.parametrize("with_head", [True, False], ids=["head-at-close", "written-when-sent"])
@pytest.mark.parametrize("mode", gateway_pb2.ExportMode.values()[1:])
async def test_the_sent_record_is_that_of_the_tree_and_within_its_estimated_size(
    opened: Opened, mode: gateway_pb2.ExportMode.ValueType, *, with_head: bool
) -> None:
    worlds = {f"s{seed}": random_world(seed, 12) for seed in range(20)}
    specs = {name: SessionSpec(name, 0, export_mode=mode) for name in worlds}

    def write(tx: Transaction) -> None:
        for name, world in worlds.items():
            write_closed(tx, specs[name], world.tree, with_head=with_head)

    async with delivering(opened, []) as (collector, outbox, database):
        await database.run(write)
        sizes: dict[str, int] = dict(
            await database.run(lambda tx: outbox_module.undelivered(tx, 100))
        )
        outbox.added(len(worlds))
        await collector.has(set(worlds))
        await forgotten(database)
    for name, world in worlds.items():
        record = write_record(specs[name], world.tree, COMPLETED, 1)
        assert collector.records[name] == record
        assert record.ByteSize() <= sizes[name] + 512


async def test_a_large_session_is_read_and_removed_in_pieces_between_the_commits_of_others(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.gateway.outbox.PIECE_NODES", 64)
    world = World()
    for _ in range(192):
        world.turn((user("x"),), said("A"))
    counts: list[int] = []
    read = journal.read_nodes

    def noted(*arguments: Any, **more: Any) -> Any:
        rows = read(*arguments, **more)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(journal, "read_nodes", noted)
    monkeypatch.setattr("rollmesh.gateway.outbox.read_nodes", noted)
    async with delivering(opened, []) as (collector, outbox, database):
        await database.run(lambda tx: write_closed(tx, SessionSpec("s", 0), world.tree))
        outbox.added()
        await collector.has({"s"})
        await forgotten(database)
    assert sum(counts) == len(world.tree.nodes)
    assert max(counts) == 64
    assert len(collector.records["s"].trajectories) == 192


@pytest.mark.parametrize("with_head", [True, False], ids=["head-at-close", "written-when-sent"])
async def test_a_closed_session_that_is_damaged_is_set_aside_and_the_others_go(
    opened: Opened, *, with_head: bool
) -> None:
    def damage(tx: Transaction) -> None:
        write_small(tx, ["a", "b", "c", "d"], with_head=with_head)
        if with_head:
            tx.db.run("UPDATE nodes SET logprobs = ?1 WHERE session_id = 'b'", b"cut")
            tx.db.run("UPDATE outbox SET request = ?1 WHERE session_id = 'c'", b"\0\xff")
        else:
            tx.db.run("UPDATE nodes SET sample = '[' WHERE session_id = 'b' AND sample IS NOT NULL")
            tx.db.run("UPDATE sessions SET spec = '{}' WHERE session_id = 'c'")

    failures = [StoreFullError("full", retry_delay_ms=1)] * 2

    def check(ids: list[str]) -> None:
        if failures:
            raise failures.pop()

    async with delivering(opened, [], check) as (collector, outbox, database):
        await database.run(damage)
        outbox.added(4)
        await collector.has({"a", "d"})
        await until(lambda: not outbox.undelivered)
        assert outbox.dead == {"b", "c"}
        assert not outbox.retried  # which a session that is never sent again would stay
        contexts = await database.run(lambda tx: tx.db.rows("SELECT * FROM contexts"))
        assert len(contexts) == 1  # of the sessions that were set aside


async def test_frames_go_with_the_last_session_that_has_them(opened: Opened) -> None:
    world = World()
    world.turn((user("x"),), said("A"))
    async with delivering(opened, ["a"]) as (collector, outbox, database):
        await database.run(lambda tx: write_open(tx, SessionSpec("open", 0), world.tree))
        await collector.has({"a"})
        await until(lambda: not outbox.undelivered)
        (stored,), damaged = await database.run(lambda tx: journal.read_open(tx, new_tree))
        assert (len(stored.tree.nodes), damaged) == (len(world.tree.nodes), {})


async def test_the_newest_closes_and_waiting_closes_are_remembered(opened: Opened) -> None:
    names, wrong = [f"s{at}" for at in range(40)], {"s0"}

    def check(ids: list[str]) -> None:
        if wrong.intersection(ids):
            raise StoreFullError("full", retry_delay_ms=1)

    gone: list[str] = []
    async with delivering(opened, [], check) as (collector, outbox, database):
        outbox.forgotten = gone.extend
        for name in names:
            await database.run(close([name]))
            outbox.added()
            if name not in wrong:
                await collector.has(set(names[1 : names.index(name) + 1]))
        await until(lambda: outbox.undelivered <= 1 and len(gone) >= 29)
        kept = await database.run(outbox_module.read_closes)
        assert kept == {"s0", *names[30:]}
        wrong.clear()
        await collector.has(set(names))
        await forgotten(database)
        assert await database.run(outbox_module.read_closes) == set(names[30:])
