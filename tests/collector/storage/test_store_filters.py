"""What a filter keeps back, in every store."""

import pytest

from rollmesh.collector import Settlement, Store
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, trajectory_pb2
from tests.collector.collectors import GROUP
from tests.collector.records import record, trajectory
from tests.collector.stores import MAIN_ONLY, Reader, auxiliary, fill, sessions_of


async def test_units_dropped_by_a_filter_are_settled_and_listed(store: Store) -> None:
    await fill(store, [auxiliary("a"), record("b")])
    reader = await Reader.open(store, filter=MAIN_ONLY)
    first, second = await reader.fetch()
    loaded = await reader.load(first)
    assert loaded is not None
    assert (loaded.attempt, loaded.arrays) == (0, [])
    verdict = loaded.verdict
    settlement = Settlement("a", verdict.reason, verdict.removed)
    assert await store.settle("c", [settlement], 7) == ["a"]
    assert await store.settle("c", [settlement], 8) == []
    await reader.restart()
    assert await reader.fetch() == [second]
    (entry,), _ = await store.filtered("c", 10, "")
    assert (entry.delivery_id, entry.reason, entry.unix_ms) == (
        "a",
        pb.FILTER_REASON_NOTHING_LEFT,
        7,
    )
    assert [(part.session_id, part.count) for part in entry.removed] == [("a", 1)]
    standing = await store.standing("c")
    assert (standing.acknowledged, standing.ready) == (0, 1)
    assert {count.reason: (count.units, count.trajectories) for count in standing.filtered} == {
        pb.FILTER_REASON_NOTHING_LEFT: (1, 0),
        pb.FILTER_REASON_LINEAGE: (0, 1),
    }


async def test_trajectories_that_a_filter_removes_from_a_delivery_are_listed_once(
    store: Store,
) -> None:
    mixed = record("a")
    other = trajectory("a")
    other.trajectory_id, other.lineage = "a-2", trajectory_pb2.LINEAGE_AUXILIARY
    mixed.trajectories.append(other)
    await fill(store, [mixed])
    reader = await Reader.open(store, filter=MAIN_ONLY)
    for _ in range(2):
        (unit,) = await reader.fetch()
        loaded = await reader.load(unit)
        assert sessions_of(loaded) == [record("a")]
        await reader.restart()
    (entry,), _ = await store.filtered("c", 10, "")
    assert entry.reason == pb.FILTER_REASON_UNSPECIFIED
    assert [(part.reason, part.count) for part in entry.removed] == [(pb.FILTER_REASON_LINEAGE, 1)]


async def test_a_unit_that_is_stale_at_its_redelivery_is_dropped_then(store: Store) -> None:
    await fill(store, [record("a")])
    reader = await Reader.open(store, filter=pb.DeliveryFilter(max_policy_lag=1), policy_version=0)
    (unit,) = await reader.fetch()
    first = await reader.load(unit, version=1)
    second = await reader.load(unit, version=2)
    assert first is not None
    assert second is not None
    assert first.delivers
    assert second.verdict.reason == pb.FILTER_REASON_NOTHING_LEFT


async def test_filtered_entries_come_in_pages(store: Store) -> None:
    await fill(store, [record(f"s{at}", "g", 0, 1) for at in range(6)])
    await Reader.open(store, unit=GROUP)
    seen: list[str] = []
    token = ""
    for size in (2, 2, 1):
        entries, token = await store.filtered("c", 2, token)
        assert len(entries) == size
        seen += [entry.session_id for entry in entries]
    assert (seen, token) == ([f"s{at}" for at in range(1, 6)], "")
    with pytest.raises(InvalidFieldError, match="page_token"):
        await store.filtered("c", 2, "x")
