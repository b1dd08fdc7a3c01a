"""Checkpoints of consumers: what a restored trainer gets again. The same for every store."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rollmesh.collector import Retention, Settlement, Store
from rollmesh.runtime.errors import (
    CheckpointUnknownError,
    ConsumerUnknownError,
    InvalidFieldError,
    StoreFullError,
    TooManyCheckpointsError,
)
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record
from tests.collector.stores import KEEP, Reader, fill, group, postgres_store, sqlite_store

GROUP = pb.DELIVERY_UNIT_GROUP
EVENTS = ["arrive", "train", "save", "restore", "release"]
AT_ONCE = Retention(settled_ms=0, max_bytes=2**30)
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


async def checkpoint(reader: Reader, checkpoint_id: str, *untrained: str, **more: Any) -> Any:
    request = pb.CreateCheckpointRequest(
        consumer=reader.name,
        checkpoint_id=checkpoint_id,
        untrained_delivery_ids=untrained,
        **more,
    )
    return await reader.store.create_checkpoint(request, 0)


async def restore(reader: Reader, checkpoint_id: str) -> int:
    request = pb.RestoreCheckpointRequest(consumer=reader.name, checkpoint_id=checkpoint_id)
    again = await reader.store.restore_checkpoint(request)
    await reader.restart()
    return again


async def test_a_restored_consumer_gets_the_later_acknowledged_units_and_none_before(
    opened: Opener,
) -> None:
    async with opened(KEEP) as store:
        await fill(store, [record(name) for name in "abcdef"])
        reader = await Reader.open(store)
        await reader.take(5)
        await reader.settle("c", "a")  # in any order
        assert (await checkpoint(reader, "1")).units == 0
        await reader.settle("e", "b")
        assert [one.units for one in await store.checkpoints("c")] == [2]
        assert await restore(reader, "1") == 2
        assert await reader.take() == [(one, 1, [one]) for one in "bdef"]
        assert (await store.standing("c")).ready == 4
        await reader.settle("b")
        assert await restore(reader, "1") == 1  # as often as wanted
        assert await reader.ids() == list("bdef")


async def test_acknowledged_and_untrained_units_are_delivered_again(opened: Opener) -> None:
    async with opened(KEEP) as store:
        await fill(store, [record(name) for name in "abc"])
        reader = await Reader.open(store)
        await reader.take(3)
        await reader.settle("a", "b")
        assert (await checkpoint(reader, "1", "b", "c")).units == 1
        await checkpoint(reader, "2")
        assert await restore(reader, "2") == 0  # trained by then
        assert await reader.ids() == ["c"]
        assert await restore(reader, "1") == 1
        assert await reader.ids() == ["b", "c"]
        with pytest.raises(CheckpointUnknownError, match="released, by a restore of an older"):
            await restore(reader, "2")


async def test_an_untrained_delivery_that_was_removed_is_refused(opened: Opener) -> None:
    async with opened(AT_ONCE) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        await reader.take_all()
        assert await store.retain(1) == 1
        with pytest.raises(InvalidFieldError, match="'a' is not stored any more"):
            await checkpoint(reader, "1", "a")
        assert await store.checkpoints("c") == []


async def test_a_dropped_unit_is_judged_anew_with_the_version_of_the_checkpoint(
    opened: Opener,
) -> None:
    async with opened(KEEP) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store, policy_version=3)
        assert (await checkpoint(reader, "1")).policy_version == 3
        await store.update_consumer(pb.Consumer(name="c", policy_version=9), 0)
        await reader.fetch()
        dropped = Settlement("a", pb.FILTER_REASON_POLICY_LAG)
        assert await store.settle("c", [dropped], 0) == ["a"]
        assert await restore(reader, "1") == 1
        assert (await store.consumer("c")).policy_version == 3
        assert await reader.ids() == ["a"]


async def test_a_checkpoint_from_before_the_first_version_is_restored_under_a_later_filter(
    opened: Opener,
) -> None:
    async with opened(KEEP) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        await checkpoint(reader, "1")
        await reader.take_all()
        rules = pb.DeliveryFilter(max_policy_lag=2)
        await store.update_consumer(pb.Consumer(name="c", filter=rules, policy_version=9), 0)
        assert await restore(reader, "1") == 1
        assert (await store.consumer("c")).policy_version == 0
        assert await reader.ids() == ["a"]


async def test_a_repeat_with_the_same_id_changes_nothing(opened: Opener) -> None:
    async with opened(KEEP) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        first = await checkpoint(reader, "1")
        await reader.take_all()
        first.units = 1
        assert await checkpoint(reader, "1", keep=1) == first
        assert await restore(reader, "1") == 1


async def test_sessions_are_kept_until_their_checkpoints_are_released(opened: Opener) -> None:
    async with opened(AT_ONCE) as store:
        reader = await Reader.open(store)
        await fill(store, [record("a"), record("b")])
        await reader.take(1)
        await reader.settle("a")
        await checkpoint(reader, "1")
        await reader.take_all()
        await checkpoint(reader, "2")
        assert await store.retain(1) == 1  # only the one before both
        await store.release_checkpoint("c", "2")
        assert await store.retain(1) == 0
        await store.release_checkpoint("c", "1")
        await store.release_checkpoint("c", "1")  # a repeat
        assert await store.retain(1) == 1
        assert await store.checkpoints("c") == []
        with pytest.raises(ConsumerUnknownError):
            await store.release_checkpoint("d", "1")


async def test_a_full_store_says_that_checkpoints_keep_sessions(opened: Opener) -> None:
    async with opened(Retention(settled_ms=0, max_bytes=1)) as store:
        store.retention = AT_ONCE
        reader = await Reader.open(store)
        await fill(store, [record("a")])
        await checkpoint(reader, "1")
        await reader.take_all()
        store.retention = Retention(settled_ms=0, max_bytes=1)
        with pytest.raises(StoreFullError, match="1 of its units are kept for checkpoints"):
            await fill(store, [record("b")])
        await store.release_checkpoint("c", "1")
        await store.retain(1)
        store.retention = AT_ONCE
        await fill(store, [record("b")])


async def test_the_number_of_checkpoints_is_bounded(opened: Opener) -> None:
    async with opened(KEEP) as store:
        await fill(store, [record("a")])
        reader = await Reader.open(store)
        for at in range(64):
            await checkpoint(reader, str(at))
        with pytest.raises(TooManyCheckpointsError, match=r"'c' has 64 checkpoints; release some"):
            await checkpoint(reader, "64")
        await reader.take_all()
        await checkpoint(reader, "64", keep=2)
        left = [(one.checkpoint_id, one.units) for one in await store.checkpoints("c")]
        assert left == [("63", 1), ("64", 0)]
        await checkpoint(reader, "65", keep=1)
        assert [one.checkpoint_id for one in await store.checkpoints("c")] == ["65"]


async def test_a_seek_and_the_end_of_its_consumer_release_a_checkpoint(opened: Opener) -> None:
    async with opened(AT_ONCE) as store:
        await fill(store, [record("a")])
        reader, other = await Reader.open(store), await Reader.open(store, "other")
        for one in (reader, other):
            await checkpoint(one, "1")
            await one.take_all()
        await store.seek("c", pb.Position(end=pb.LOG_END_LATEST), 0)
        with pytest.raises(CheckpointUnknownError):
            await restore(reader, "1")
        assert await store.retain(1) == 0  # the other one's is left
        await store.delete_consumer("other")
        assert await store.retain(1) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_the_books_of_a_trainer_that_is_restored_at_random(opened: Opener, seed: int) -> None:
    choose = random.Random(seed)
    policy = pb.GroupPolicy(min_samples=1) if seed % 2 else pb.GroupPolicy()
    async with opened(AT_ONCE) as store:
        reader = await Reader.open(store, unit=GROUP, groups=policy)
        known: list[str] = []
        trained: set[str] = set()  # in the trainer's lineage
        taken: set[str] = set()  # and acknowledged, but not trained yet
        await checkpoint(reader, "0")  # from which on nothing is removed that may be needed
        saved: dict[str, set[str]] = {"0": set()}  # by checkpoint, in order
        for step in range(1, 150):
            match choose.choices(EVENTS, [5, 8, 3, 1, 1])[0]:
                case "arrive":
                    name = f"g{len(known)}"
                    await fill(store, group(name, 0, 1, size=2))
                    known.append(name)
                case "train":
                    got = [unit_id for unit_id, _, _ in await reader.take(3)]
                    done = choose.sample(got, choose.randint(0, len(got)))
                    assert set(await reader.settle(*done)) == set(done)
                    taken |= set(done)
                    now = set(choose.sample(sorted(taken), choose.randint(0, len(taken))))
                    trained, taken = trained | now, taken - now
                    await reader.restart()
                case "save":
                    await checkpoint(reader, str(step), *taken)
                    saved[str(step)] = set(trained)
                case "restore":
                    checkpoint_id = choose.choice(list(saved))
                    await restore(reader, checkpoint_id)
                    trained, taken = set(saved[checkpoint_id]), set()
                    saved = {one: of for one, of in saved.items() if int(one) <= int(checkpoint_id)}
                    assert await reader.ids(1000) == [one for one in known if one not in trained]
                    await reader.restart()
                case "release" if len(saved) > 1:
                    released = choose.choice(list(saved))
                    await store.release_checkpoint("c", released)
                    del saved[released]
            await store.retain(step + 1)
        for checkpoint_id in saved:
            await store.release_checkpoint("c", checkpoint_id)
        await store.retain(1000)
        counts = await store.counts()
        assert counts.removed_sessions == 2 * len(trained | taken) > 0
        assert counts.sessions == 2 * len(known) - counts.removed_sessions
