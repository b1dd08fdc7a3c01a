"""A collector whose host's clock is set while it runs: nothing is given up, removed or stalled."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rollmesh.collector import Store
from rollmesh.runtime import clock
from rollmesh.v1 import collector_pb2, session_pb2
from tests.collector.collectors import GROUP, SESSION, TIMEOUT_S, Stream, stub_at, subscribing
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record
from tests.collector.stores import Reader, fill, postgres_store, sqlite_store
from tests.waiting import until

Jump: TypeAlias = Callable[[int], None]

HOUR_MS = 3_600_000
SOON_MS = 1_000
AHEAD, BACK = 2, -2
IN_AN_HOUR = collector_pb2.GroupPolicy(deadline_ms=HOUR_MS, min_samples=1)
SOON = collector_pb2.GroupPolicy(deadline_ms=SOON_MS, min_samples=1)


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Jump:
    """Moves the clock of this host ahead by a number of hours."""
    host = time.time_ns

    def set_(hours: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: host() + hours * HOUR_MS * 1_000_000)

    return set_


@pytest.fixture(params=["sqlite", "postgres"])
async def settings(request: pytest.FixtureRequest) -> AsyncIterator[dict[str, Any]]:
    """Of collectors on a store of each kind."""
    if request.param == "sqlite":
        yield {}
        return
    async with postgres_database() as database:
        yield {"store": database.url}


@pytest.fixture
async def stub(settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[Any]:
    """Of a collector in this process, whose clock `jump` sets."""
    async with stub_at(tmp_path, retain_settled_ms=HOUR_MS, **settings) as stub:
        yield stub


async def ingest(stub: Any, *sessions: session_pb2.SessionRecord) -> None:
    await stub.Ingest(collector_pb2.IngestRequest(sessions=sessions), timeout=TIMEOUT_S)


async def counted(stub: Any) -> collector_pb2.GetStatsResponse:
    request = collector_pb2.GetStatsRequest()
    return await stub.GetStats(request, timeout=TIMEOUT_S)  # type: ignore[no-any-return]


async def taken(stream: Stream) -> tuple[str, list[str], bool]:
    """The next delivery, which is the first of its unit: id, sessions, whether some are missing."""
    (delivery,) = await stream.deliveries(1)
    assert delivery.attempt == 1
    ids = [session.session_id for session in delivery.sessions]
    return delivery.delivery_id, ids, delivery.partial


async def test_a_jump_ahead_gives_up_no_group_before_its_time(stub: Any, jump: Jump) -> None:
    async with (
        subscribing(stub, "patient", GROUP, credits_=4, groups=IN_AN_HOUR) as patient,
        subscribing(stub, "hasty", GROUP, credits_=4, groups=SOON) as hasty,
    ):
        await asyncio.gather(patient.opened(), hasty.opened())
        await ingest(stub, record("a0", "a", 0, 2))
        jump(AHEAD)
        await ingest(stub, record("b0", "b", 0, 2))
        for group in "ab":  # deadlines were looked at since the jump
            assert await taken(hasty) == (group, [f"{group}0"], True)
        await ingest(stub, record("a1", "a", 1, 2), record("b1", "b", 1, 2))
        for group in "ab":
            assert await taken(patient) == (group, [f"{group}0", f"{group}1"], False)


async def test_a_jump_back_holds_no_group_beyond_its_time(stub: Any, jump: Jump) -> None:
    async with subscribing(stub, unit=GROUP, credits_=4, groups=SOON) as stream:
        await stream.opened()
        await ingest(stub, record("a0", "a", 0, 2))
        jump(BACK)
        await ingest(stub, record("b0", "b", 0, 2))
        assert await taken(stream) == ("a", ["a0"], True)
        assert await taken(stream) == ("b", ["b0"], True)


def rewarded_within(session_id: str, timeout_ms: int) -> session_pb2.SessionRecord:
    session = record(session_id)
    session.reward_timeout_ms = timeout_ms
    return session


async def test_a_jump_ahead_ends_no_wait_for_rewards(stub: Any, jump: Jump) -> None:
    async with subscribing(stub, credits_=4) as stream:
        await ingest(stub, rewarded_within("patient", HOUR_MS))
        jump(AHEAD)
        await ingest(stub, rewarded_within("hasty", SOON_MS))
        assert (await taken(stream))[0] == "hasty"
        rewards = collector_pb2.SetRewardsRequest(
            session_id="patient", request_id="r", rewards=session_pb2.SessionRewards(reward=1.0)
        )
        await stub.SetRewards(rewards, timeout=TIMEOUT_S)
        assert (await taken(stream))[0] == "patient"
        assert (await counted(stub)).reward_timeouts == 1


async def test_a_jump_back_ends_a_wait_for_rewards_in_its_time(stub: Any, jump: Jump) -> None:
    async with subscribing(stub, credits_=4) as stream:
        await ingest(stub, rewarded_within("hasty", SOON_MS))
        jump(BACK)
        assert (await taken(stream))[0] == "hasty"


async def test_a_jump_ends_no_lease(stub: Any, jump: Jump) -> None:
    async with (
        subscribing(stub, credits_=1, lease_ms=HOUR_MS) as holder,
        subscribing(stub, lease_ms=HOUR_MS) as other,
    ):
        await ingest(stub, record("a"))
        assert (await taken(holder))[0] == "a"
        await other.grant(3)
        for hours, name in ((AHEAD, "b"), (BACK, "c")):
            jump(hours)
            await ingest(stub, record(name))
            assert (await taken(other))[0] == name  # and not "a", which is older
        await holder.acknowledge("a")
        assert await holder.acknowledged() == {"a"}


async def test_jumps_lose_and_double_nothing_and_keep_the_order(stub: Any, jump: Jump) -> None:
    names = [f"s{at}" for at in range(12)]
    async with subscribing(stub, credits_=len(names) + 1) as stream:
        for at, name in enumerate(names):
            jump((0, AHEAD, BACK)[at % 3])
            await ingest(stub, record(name))
            await ingest(stub, record(name))  # a repeat
            assert (await taken(stream))[0] == name
            await stream.acknowledge(name)
            assert await stream.acknowledged() == {name}
    async with subscribing(stub, credits_=1) as stream:
        await ingest(stub, record("last"))
        assert (await taken(stream))[0] == "last"
    stats = await counted(stub)
    assert (stats.sessions, stats.duplicates) == (len(names) + 1, len(names))


@pytest.mark.parametrize(
    ("hours", "given_up"),
    [
        pytest.param(AHEAD, False, id="was-ahead"),  # the group has three hours to go
        pytest.param(BACK, True, id="was-behind"),  # its hour seems to be over
    ],
)
async def test_a_restart_with_the_clock_set_right_waits_longer_or_not_and_loses_nothing(
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
    given_up: object,
) -> None:
    options: dict[str, Any] = {"unit": GROUP, "credits_": 4, "groups": IN_AN_HOUR}
    right = clock.steady_unix_ms
    with monkeypatch.context() as wrong:
        wrong.setattr(clock, "steady_unix_ms", lambda: right() + hours * HOUR_MS)
        async with stub_at(tmp_path, **settings) as stub:
            async with subscribing(stub, **options) as stream:
                await stream.opened()
                await ingest(stub, record("a0", "a", 0, 2))
    async with stub_at(tmp_path, **settings) as stub, subscribing(stub, **options) as stream:
        if given_up:
            assert await taken(stream) == ("a", ["a0"], True)
        await ingest(stub, record("a1", "a", 1, 2), record("b", "b", 0, 1))
        if not given_up:
            assert await taken(stream) == ("a", ["a0", "a1"], False)
        assert await taken(stream) == ("b", ["b"], False)
        assert (await counted(stub)).sessions == 3


async def settled_long_ago(store: Store) -> None:
    """Leaves a session that the trainer settled two hours ago, and an auditor did not."""
    now_ms = clock.steady_unix_ms() - 2 * HOUR_MS
    trainer = await Reader.open(store, "trainer", SESSION, now_ms)
    await Reader.open(store, "auditor", SESSION, now_ms)
    await fill(store, [record("old")])
    assert await trainer.take_all(now_ms=now_ms) == ["old"]


async def test_a_jump_ahead_removes_nothing_before_its_time(
    settings: dict[str, Any], tmp_path: Path, jump: Jump
) -> None:
    async with AsyncExitStack() as stack:
        if url := settings.get("store", ""):
            store = await stack.enter_async_context(postgres_store(url))
        else:
            store = await stack.enter_async_context(sqlite_store(tmp_path))
        await settled_long_ago(store)
    async with stub_at(tmp_path, retain_settled_ms=HOUR_MS, **settings) as stub:
        async with subscribing(stub, credits_=1) as stream:
            await ingest(stub, record("new"))
            assert (await taken(stream))[0] == "new"
            await stream.acknowledge("new")
            assert await stream.acknowledged() == {"new"}
        jump(AHEAD)
        auditor = collector_pb2.DeleteConsumerRequest(consumer="auditor")
        await stub.DeleteConsumer(auditor, timeout=TIMEOUT_S)

        async def some_are_removed() -> Any:
            found = await counted(stub)
            return found if found.removed_sessions else None

        removed = await until(some_are_removed)
        assert (removed.removed_sessions, removed.sessions) == (1, 1)
        read = stub.ReadSessions(collector_pb2.ReadSessionsRequest(session_id="new"))
        assert (await read.read()).session == record("new")
