"""What every store does, against the real ones."""

import asyncio
from typing import Any

import pytest

from rollmesh.collector import LOAD_BYTES, Arrival, Store
from rollmesh.runtime.errors import ConsumerUnknownError, InvalidFieldError, SessionUnknownError
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.collectors import GROUP
from tests.collector.records import record, trajectory, with_images
from tests.collector.stores import MAIN_ONLY, Reader, auxiliary, fill, group, ingest, sessions_of

EARLIEST = pb.Position(end=pb.LOG_END_EARLIEST)
LATEST = pb.Position(end=pb.LOG_END_LATEST)


async def test_a_session_comes_back_as_it_was_and_a_repeat_changes_nothing(store: Store) -> None:
    assert not await ingest(store, record("a"), 1)
    assert await ingest(store, record("a"), 2)
    assert await store.session("a", arrays=True) == record("a")
    head = await store.session("a", arrays=False)
    assert head.trajectories[0].segments == record("a").trajectories[0].segments
    assert not head.trajectories[0].HasField("tokens")
    counts = await store.counts()
    assert (counts.sessions, counts.trajectories, counts.complete_groups) == (1, 1, 1)
    assert counts.stored_bytes
    with pytest.raises(SessionUnknownError):
        await store.session("b", arrays=True)


async def test_images_come_back_beside_the_arrays_and_count(store: Store) -> None:
    session = with_images(record("a"), b"cat" * 1000, b"dog")
    await ingest(store, with_images(record("a"), b"cat" * 1000, b"dog"), 1)
    assert await store.session("a", arrays=True) == session
    head = await store.session("a", arrays=False)
    assert [(one.data, one.data_bytes) for one in head.images] == [(b"", 3000), (b"", 3)]
    assert (await store.counts()).stored_bytes > 3000
    reader = await Reader.open(store)
    (unit,) = await reader.fetch()
    loaded = await reader.load(unit)
    assert sessions_of(loaded) == [session]


async def test_images_of_filtered_trajectories_are_not_delivered(store: Store) -> None:
    session = with_images(auxiliary("a"), b"title")
    session.trajectories.add().CopyFrom(trajectory("a"))
    session.trajectories[1].trajectory_id = "a-2"
    expected = record("a")
    expected.trajectories[0].trajectory_id = "a-2"
    await ingest(store, session, 1)
    reader = await Reader.open(store, filter=MAIN_ONLY)
    (unit,) = await reader.fetch()
    loaded = await reader.load(unit)
    assert sessions_of(loaded) == [expected]


async def test_sessions_of_one_call_are_stored_in_order_and_make_their_groups_whole(
    store: Store,
) -> None:
    sessions = [record("g0", "g", 0, 2), record("a"), record("g1", "g", 1, 2), record("a")]
    arrivals = [Arrival(session) for session in sessions]
    assert await store.ingest(arrivals, 0) == [False, False, False, True]
    assert await store.ingest(arrivals, 0) == [True] * 4
    groups = await Reader.open(store, unit=GROUP)
    assert sorted(await groups.take()) == [("a", 1, ["a"]), ("g", 1, ["g0", "g1"])]
    assert [id_ for _, id_ in await store.sessions_after("", 10)] == ["g0", "a", "g1"]


async def test_an_id_like_that_of_a_removed_group_takes_no_session_out_of_its_group(
    store: Store,
) -> None:
    arrivals = [Arrival(record(id_, "x", at, 2)) for at, id_ in enumerate(("g:x", "b"))]
    assert await store.ingest(arrivals, 0) == [False, False]
    groups = await Reader.open(store, unit=GROUP)
    assert await groups.take() == [("x", 1, ["g:x", "b"])]


async def test_units_are_loaded_together_up_to_a_size(store: Store) -> None:
    large = record("large")
    large.trajectories[0].CopyFrom(trajectory("large", tokens=LOAD_BYTES // 9 + 1))
    await fill(store, [large, record("a"), record("b")])
    reader = await Reader.open(store)
    units = await reader.fetch()
    (first,) = await store.load(reader.settings, units, 0)
    rest = await store.load(reader.settings, units[1:], 0)
    loaded = [session.session_id for one in (first, *rest) for session in sessions_of(one)]
    assert loaded == ["large", "a", "b"]


async def test_concurrent_ingests_of_one_group_make_it_whole_once(store: Store) -> None:
    sessions = group("g", *range(8), size=8)
    await asyncio.gather(*(ingest(store, one, 0) for one in sessions for _ in range(3)))
    reader = await Reader.open(store, unit=GROUP)
    assert await reader.take() == [("g", 1, [one.session_id for one in sessions])]


async def test_pages_hold_everything_once_and_in_order(store: Store) -> None:
    await fill(store, [record(f"s{at}") for at in range(7)])
    reader = await Reader.open(store)
    assert [await reader.ids(3) for _ in range(4)] == [
        ["s0", "s1", "s2"],
        ["s3", "s4", "s5"],
        ["s6"],
        [],
    ]
    await fill(store, [record("s7")])
    assert await reader.ids() == ["s7"]


async def test_open_units_are_redelivered_with_their_attempt(store: Store) -> None:
    await fill(store, [record("a"), record("b"), record("c")])
    reader = await Reader.open(store)
    assert [attempt for _, attempt, _ in await reader.take()] == [1, 1, 1]
    assert await reader.settle("b", "unknown") == ["b"]
    assert await reader.settle("b") == []
    await reader.restart()
    assert await reader.take() == [("a", 2, ["a"]), ("c", 2, ["c"])]
    standing = await store.standing("c")
    assert (standing.acknowledged, standing.ready) == (1, 2)


async def test_a_unit_that_was_never_delivered_cannot_be_acknowledged(store: Store) -> None:
    await fill(store, [record("a")])
    reader = await Reader.open(store)
    assert await reader.settle("a") == []
    assert await reader.take_all() == ["a"]


async def test_names_get_everything_each(store: Store) -> None:
    await fill(store, [record("a"), record("b")])
    one, other = await Reader.open(store, "one"), await Reader.open(store, "other")
    assert await one.take_all() == ["a", "b"]
    assert await other.take_all() == ["a", "b"]
    assert [consumer.name for consumer in (await store.consumers(9, ""))[0]] == ["one", "other"]


async def test_a_name_keeps_its_unit(store: Store) -> None:
    await Reader.open(store)
    with pytest.raises(InvalidFieldError, match="unit"):
        await Reader.open(store, unit=GROUP)


async def test_a_late_sample_does_not_change_a_group_that_was_whole(store: Store) -> None:
    await fill(store, group("g", 0, 1, size=2))
    reader = await Reader.open(store, unit=GROUP)
    assert await reader.take() == [("g", 1, ["g0", "g1"])]
    await fill(store, [record("late", "g", 1, 2)])
    await reader.restart()
    assert await reader.take() == [("g", 2, ["g0", "g1"])]
    (entry,), token = await store.filtered("c", 10, "")
    assert (entry.delivery_id, entry.session_id, token) == ("g", "late", "")
    assert entry.reason == pb.FILTER_REASON_SURPLUS
    (count,) = (await store.standing("c")).filtered
    assert (count.reason, count.units) == (pb.FILTER_REASON_SURPLUS, 1)


async def test_a_seat_that_two_sessions_take_is_delivered_and_counted_once(store: Store) -> None:
    reader = await Reader.open(store, unit=GROUP)
    await fill(store, [record("first", "g", 0, 2), record("second", "g", 0, 2)])
    assert await reader.fetch() == []
    await fill(store, [record("other", "g", 1, 2)])
    assert await reader.take() == [("g", 1, ["first", "other"])]
    (entry,), _ = await store.filtered("c", 10, "")
    assert (entry.delivery_id, entry.session_id) == ("g", "second")
    assert entry.reason == pb.FILTER_REASON_DUPLICATE_SEAT
    (count,) = (await store.standing("c")).filtered
    assert (count.reason, count.units) == (pb.FILTER_REASON_DUPLICATE_SEAT, 1)


async def test_a_group_of_another_size_is_refused(store: Store) -> None:
    await fill(store, group("g", 0, size=2))
    with pytest.raises(InvalidFieldError, match="group_size"):
        await ingest(store, record("x", "g", 1, 3), 0)


@pytest.mark.parametrize(
    ("samples", "min_samples", "expected"),
    [
        pytest.param([0, 2], 2, [("g", 1, ["g0", "g2"])], id="enough"),
        pytest.param([2], 2, [], id="too few"),
        pytest.param([2], None, [], id="dropped by default"),
    ],
)
async def test_at_its_deadline_a_group_goes_out_in_part_or_is_dropped(
    store: Store, samples: list[int], min_samples: int | None, expected: list[Any]
) -> None:
    policy = pb.GroupPolicy(deadline_ms=50, min_samples=min_samples)
    reader = await Reader.open(store, unit=GROUP, groups=policy)
    await fill(store, group("g", *samples), now_ms=100)
    assert not await store.tick(149)
    assert await reader.fetch() == []
    assert await store.tick(150)
    taken = await reader.take()
    assert taken == expected
    await fill(store, group("g", 1), now_ms=200)
    assert await reader.take() == []
    entries, _ = await store.filtered("c", 10, "")
    whole = [] if expected else [pb.FILTER_REASON_INCOMPLETE_GROUP]
    assert [entry.reason for entry in entries] == [*whole, pb.FILTER_REASON_SURPLUS]
    standing = await store.standing("c")
    assert standing.ready == len(expected)


async def test_a_partial_group_says_so(store: Store) -> None:
    policy = pb.GroupPolicy(deadline_ms=1, min_samples=1)
    reader = await Reader.open(store, unit=GROUP, groups=policy)
    await fill(store, [*group("g", 0), *group("h", 0, 1, 2)])
    await store.tick(1)
    assert {unit.unit_id: unit.partial for unit in await reader.fetch()} == {"g": True, "h": False}


async def test_an_over_sampled_group_goes_out_with_its_first_usable_samples(store: Store) -> None:
    policy = pb.GroupPolicy(samples=2)
    reader = await Reader.open(store, unit=GROUP, groups=policy, filter=MAIN_ONLY)
    other = await Reader.open(store, "all", GROUP)
    await fill(store, [record("g3", "g", 3, 4), auxiliary("g0", group="g", index=0, size=4)])
    assert await reader.fetch() == []
    await fill(store, [record("g1", "g", 1, 4)])
    assert await reader.take() == [("g", 1, ["g1", "g3"])]
    await fill(store, [record("g2", "g", 2, 4)])
    await reader.restart()
    assert await reader.take() == [("g", 2, ["g1", "g3"])]
    entries, _ = await store.filtered("c", 10, "")
    assert [entry.session_id for entry in entries] == ["g0", "g2"]
    assert await other.take() == [("g", 1, ["g0", "g1", "g2", "g3"])]


async def test_a_later_policy_decides_about_stored_sessions(store: Store) -> None:
    await fill(store, [*group("g", 0, 1), *group("h", 0, 1, 2), *group("i", 0)], now_ms=10)
    plain = await Reader.open(store, unit=GROUP)
    assert await plain.take_all() == ["h"]
    policy = pb.GroupPolicy(samples=2, deadline_ms=50, min_samples=1)
    changed = await Reader.open(store, unit=GROUP, groups=policy, now_ms=20)
    assert await changed.take_all() == ["g"]  # h was acknowledged under the other policy
    await store.tick(60)
    assert await changed.take_all() == ["i"]
    back = await Reader.open(store, unit=GROUP)
    assert await back.fetch() == []
    await fill(store, group("g", 2))
    assert await back.fetch() == []  # it was acknowledged, in part
    standing = await store.standing("c")
    assert (standing.acknowledged, standing.ready) == (3, 0)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param(None, ["a", "b", "c", "d"], id="by default from the oldest"),
        pytest.param(EARLIEST, ["a", "b", "c", "d"], id="earliest"),
        pytest.param(LATEST, ["d"], id="latest"),
        pytest.param(pb.Position(unix_ms=20), ["b", "c", "d"], id="at a time"),
        pytest.param(pb.Position(unix_ms=21), ["c", "d"], id="after a time"),
        pytest.param(pb.Position(unix_ms=99), ["d"], id="a time to come"),
        pytest.param(pb.Position(delivery_id="c"), ["c", "d"], id="at a unit"),
    ],
)
@pytest.mark.parametrize("unit", [pb.DELIVERY_UNIT_SESSION, GROUP], ids=["sessions", "groups"])
@pytest.mark.parametrize("policy", [None, pb.GroupPolicy(samples=1)], ids=["shared", "own"])
async def test_a_new_name_begins_where_it_asks(
    store: Store,
    start: pb.Position | None,
    expected: list[str],
    unit: pb.DeliveryUnit.ValueType,
    policy: pb.GroupPolicy | None,
) -> None:
    if policy and unit != GROUP:
        return
    for at, name in enumerate("abc"):
        await fill(store, [record(name)], now_ms=10 * (at + 1))
    reader = await Reader.open(store, unit=unit, start=start, groups=policy, now_ms=30)
    await fill(store, [record("d")], now_ms=40)
    await store.tick(40)
    assert (await store.standing("c")).ready == len(expected)
    assert await reader.take_all() == expected
    assert (await store.standing("c")).ready == 0
    again = await Reader.open(store, unit=unit, start=EARLIEST, groups=policy)
    assert await again.fetch() == []  # a known name goes on


async def test_a_start_at_an_unknown_unit_is_refused_and_leaves_no_consumer(store: Store) -> None:
    with pytest.raises(InvalidFieldError, match="delivery_id"):
        await Reader.open(store, start=pb.Position(delivery_id="x"))
    assert await store.consumers(9, "") == ([], "")


@pytest.mark.parametrize(
    ("position", "expected", "again", "skipped"),
    [
        pytest.param(EARLIEST, "abcd", 2, 0, id="to the beginning"),
        pytest.param(pb.Position(delivery_id="b"), "bcd", 1, 0, id="back to a unit"),
        pytest.param(pb.Position(unix_ms=30), "cd", 0, 0, id="to where it stands"),
        pytest.param(pb.Position(delivery_id="d"), "d", 0, 1, id="forward"),
        pytest.param(LATEST, "", 0, 2, id="to the end"),
    ],
)
async def test_a_seek_moves_a_consumer_forwards_or_back(
    store: Store, position: pb.Position, expected: str, again: int, skipped: int
) -> None:
    for at, name in enumerate("abcd"):
        await fill(store, [record(name)], now_ms=10 * (at + 1))
    reader = await Reader.open(store)
    await reader.take()
    await reader.settle("a", "b")
    assert await store.seek("c", position, 99) == pb.SeekResponse(again=again, skipped=skipped)
    await reader.restart()
    assert await reader.settle("a", "b", "c", "d") == []  # what came before the seek does not count
    assert (await store.standing("c")).ready == len(expected)
    assert await reader.take() == [(name, 1, [name]) for name in expected]
    assert await reader.settle(*expected) == list(expected)
    assert (await store.standing("c")).ready == 0


async def test_a_seek_back_delivers_the_units_that_an_earlier_one_skipped(store: Store) -> None:
    await fill(store, [record("a"), record("b")])
    reader = await Reader.open(store, start=LATEST)
    assert await reader.fetch() == []
    assert await store.seek("c", EARLIEST, 0) == pb.SeekResponse(again=2)
    await reader.restart()
    assert await reader.take_all() == ["a", "b"]


async def test_a_seek_of_an_unknown_consumer_is_refused(store: Store) -> None:
    with pytest.raises(ConsumerUnknownError):
        await store.seek("nobody", EARLIEST, 0)
    with pytest.raises(ConsumerUnknownError):
        await store.filtered("nobody", 1, "")


async def test_open_groups_are_listed_in_pages(store: Store) -> None:
    await fill(store, [*group("g", 0, 2), *group("h", 1), *group("i", 0, 1, 2)], now_ms=5)

    async def page(only: str = "", **wanted: Any) -> pb.ListGroupsResponse:
        return await store.groups(pb.ListGroupsRequest(**wanted), only, 1)

    first = await page(state=pb.GROUP_STATE_OPEN)
    second = await page(state=pb.GROUP_STATE_OPEN, page_token=first.next_page_token)
    rest = await page(state=pb.GROUP_STATE_OPEN, page_token=second.next_page_token)
    assert first.groups == [
        pb.Group(group_id="g", group_size=3, samples=2, first_unix_ms=5, state=pb.GROUP_STATE_OPEN)
    ]
    assert [one.group_id for one in second.groups] == ["h"]
    assert rest == pb.ListGroupsResponse()
    (complete,) = (await page(state=pb.GROUP_STATE_COMPLETE)).groups
    assert (complete.group_id, complete.samples) == ("i", 3)
    assert complete.state == pb.GROUP_STATE_COMPLETE
    (named,) = (await page("h")).groups
    assert (named.group_id, named.samples) == ("h", 1)
    assert (await store.counts()).open_groups == 2


async def test_a_superseded_session_goes_out_alone_and_is_no_part_of_its_group(
    store: Store,
) -> None:
    failed = record("failed", "g", 0, 2)
    failed.superseded = True
    await fill(store, [failed, *group("g", 0, 1, size=2)])
    sessions, groups = await Reader.open(store), await Reader.open(store, "groups", GROUP)
    assert await sessions.take_all() == ["failed", "g0", "g1"]
    assert await groups.take() == [("g", 1, ["g0", "g1"])]
    assert await groups.settle("g") == ["g"]
    assert (await store.counts()).open_groups == 0
    assert await store.retain(10**13) == 3


async def test_a_deleted_consumer_is_forgotten(store: Store) -> None:
    await fill(store, [record("a")])
    reader = await Reader.open(store, unit=GROUP, groups=pb.GroupPolicy(samples=1))
    await reader.take_all()
    assert await store.delete_consumer("c")
    assert not await store.delete_consumer("c")
    assert await store.consumers(9, "") == ([], "")
    with pytest.raises(ConsumerUnknownError):
        await reader.fetch()
    anew = await Reader.open(store, unit=GROUP, groups=pb.GroupPolicy(samples=1))
    assert await anew.take() == [("a", 1, ["a"])]
    assert (await store.standing("c")).acknowledged == 0


async def test_sessions_are_read_in_the_order_in_which_they_came(store: Store) -> None:
    await fill(store, [record(name) for name in "cab"])
    first = await store.sessions_after("", 2)
    assert [name for _, name in first] == ["c", "a"]
    assert [name for _, name in await store.sessions_after(first[-1][0], 2)] == ["b"]
