"""Consumers that change their group policy, in every store."""

from rollmesh.collector.storage.store import Store
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.collectors import GROUP
from tests.collector.stores import Reader, fill, group


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
    assert (await store.standing("c")).open == 1
