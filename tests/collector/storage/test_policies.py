"""Consumers that change their group policy, in every store."""

from typing import Any

import pytest

from rollmesh.collector import Store
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.collectors import GROUP
from tests.collector.stores import Reader, fill, group

ONE, TWO = pb.GroupPolicy(samples=1), pb.GroupPolicy(samples=2)
NONE = pb.GroupPolicy()


async def test_a_group_that_was_settled_under_another_policy_counts_once_where_it_is_dropped(
    store: Store,
) -> None:
    await fill(store, group("g", 0))
    first = pb.GroupPolicy(deadline_ms=10, min_samples=1)
    reader = await Reader.open(store, unit=GROUP, groups=first)
    assert await store.tick(10)
    assert await reader.take_all() == ["g"]
    await Reader.open(store, unit=GROUP)
    later = pb.GroupPolicy(deadline_ms=50, min_samples=2)
    again = await Reader.open(store, unit=GROUP, groups=later, now_ms=20)
    assert await store.tick(50)
    assert await again.fetch() == []
    await fill(store, group("h", 0, 1, 2), now_ms=60)
    await store.tick(60)
    assert (await store.standing("c")).ready == 1


async def test_deadlines_hold_for_groups_that_come_after_a_clock_was_set_back(
    store: Store,
) -> None:
    await fill(store, group("g", 0), now_ms=1000)
    policy = pb.GroupPolicy(deadline_ms=10, min_samples=1)
    reader = await Reader.open(store, unit=GROUP, groups=policy, now_ms=1000)
    assert await store.tick(1010)
    await fill(store, group("h", 0), now_ms=500)
    assert not await store.tick(500)
    assert await store.tick(510)
    assert await reader.take_all(now_ms=510) == ["g", "h"]


@pytest.mark.parametrize(
    ("before", "after", "sessions"),
    [
        pytest.param(NONE, TWO, ["g0", "g1"], id="none-then-two"),
        pytest.param(TWO, NONE, ["g0", "g1", "g2"], id="two-then-none"),
        pytest.param(ONE, TWO, ["g0", "g1"], id="one-then-two"),
        pytest.param(TWO, ONE, ["g0"], id="two-then-one"),
    ],
)
async def test_a_new_policy_decides_deliveries_without_acknowledgement(
    store: Store, before: pb.GroupPolicy, after: pb.GroupPolicy, sessions: list[str]
) -> None:
    await fill(store, [*group("f", 0, 1, 2), *group("g", 0, 1, 2)])
    reader = await Reader.open(store, unit=GROUP, groups=before)
    assert [unit_id for unit_id, _, _ in await reader.take()] == ["f", "g"]
    assert await reader.settle("f") == ["f"]
    again = await Reader.open(store, unit=GROUP, groups=after)
    assert await again.settle("g") == []  # of what the policy before decided
    assert await again.take() == [("g", 1, sessions)]
    assert await again.settle("g") == ["g"]
    standing = await store.standing("c")
    assert (standing.acknowledged, standing.ready) == (2, 0)


@pytest.mark.parametrize("after", [pytest.param(NONE, id="none"), pytest.param(TWO, id="two")])
async def test_a_new_policy_after_a_seek_delivers_the_units_that_the_seek_left_open(
    store: Store, after: pb.GroupPolicy
) -> None:
    await fill(store, [one for name in "abcd" for one in group(name, 0, 1, 2)])
    await Reader.open(store, unit=GROUP, groups=ONE)
    await store.seek("c", pb.Position(delivery_id="c"), 0)
    again = await Reader.open(store, unit=GROUP, groups=after)
    assert (await store.standing("c")).ready == 2
    assert await again.take_all() == ["c", "d"]


async def test_a_seek_after_a_new_policy_redelivers_units_acknowledged_before_it(
    store: Store,
) -> None:
    await fill(store, [one for name in "abc" for one in group(name, 0, 1, 2)])
    reader = await Reader.open(store, unit=GROUP)
    await reader.take_all()
    again = await Reader.open(store, unit=GROUP, groups=ONE, now_ms=99)
    assert (await store.seek("c", pb.Position(delivery_id="b"), 99)).again == 2
    assert [unit_id for unit_id, _, _ in await again.take()] == ["b", "c"]


@pytest.mark.parametrize("created", [0, 99], ids=["before", "after"])
@pytest.mark.parametrize("policy", [NONE, TWO], ids=["shared", "own"])
async def test_a_seek_by_time_finds_groups_by_when_they_were_complete(
    store: Store, created: int, policy: pb.GroupPolicy
) -> None:
    async def open_at(now_ms: int) -> Any:
        if now_ms == created:
            await Reader.open(store, unit=GROUP, groups=policy, now_ms=now_ms)

    await open_at(0)
    for at, name in enumerate("abc"):
        await fill(store, group(name, 0, 1, size=2), now_ms=10 * (at + 1))
    await open_at(99)
    sought = await store.seek("c", pb.Position(unix_ms=20), 99)
    assert (sought.again, sought.skipped) == (0, 1)
    reader = Reader(store, await store.consumer("c"))
    assert await reader.take_all() == ["b", "c"]


async def test_units_listed_by_a_former_policy_stay_listed_once(store: Store) -> None:
    await fill(store, group("g", 0, 1, 2))
    reader = await Reader.open(store, unit=GROUP, groups=TWO)
    await reader.take_all()
    for policy in (NONE, TWO):
        await Reader.open(store, unit=GROUP, groups=policy)
        entries, _ = await store.filtered("c", 10, "")
        assert [(entry.reason, entry.session_id) for entry in entries] == [
            (pb.FILTER_REASON_SURPLUS, "g2")
        ]
        (count,) = (await store.standing("c")).filtered
        assert count.units == 1
