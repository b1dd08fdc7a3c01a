"""Numbers that a trainer writes back for the tokens of a session, in every store."""

import numpy as np
import pytest

from rollmesh.collector import Retention, Store
from rollmesh.runtime.errors import InvalidFieldError, SessionUnknownError, StoreFullError
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.records import record, trajectory
from tests.collector.stores import KEEP, Reader, fill

TOKENS = len(trajectory("a").tokens.loss_mask_u8)


def annotation(
    name: str, value: float = 1.0, of: str = "a-1", count: int = TOKENS
) -> pb.Annotation:
    values = np.full(count, value, "<f4").tobytes()
    return pb.Annotation(name=name, trajectory_id=of, values_f32le=values)


async def test_a_later_array_of_a_name_replaces_the_earlier_one(store: Store) -> None:
    await fill(store, [record("a"), record("b")])
    await store.annotate("a", [annotation("advantages"), annotation("entropy", 2.0)])
    await store.annotate("a", [annotation("advantages", float("nan"))])
    advantages, entropy = await store.annotations("a")
    assert np.isnan(np.frombuffer(advantages.values_f32le, "<f4")).all()
    assert entropy == annotation("entropy", 2.0)
    assert await store.annotations("b") == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (annotation("x", of="b-1"), r"annotations\[1\]\.trajectory_id"),
        (annotation("x", of=""), r"annotations\[1\]\.trajectory_id"),
        (annotation("x", count=TOKENS + 1), r"annotations\[1\]\.values_f32le"),
    ],
)
async def test_an_array_that_does_not_fit_changes_nothing(
    store: Store, wrong: pb.Annotation, field: str
) -> None:
    await fill(store, [record("a")])
    with pytest.raises(InvalidFieldError, match=field):
        await store.annotate("a", [annotation("y"), wrong])
    assert await store.annotations("a") == []


async def test_a_trajectory_has_a_limited_number_of_names(store: Store) -> None:
    await fill(store, [record("a")])
    await store.annotate("a", [annotation(f"n{at}") for at in range(16)])
    with pytest.raises(InvalidFieldError, match="at most 16"):
        await store.annotate("a", [annotation("one more")])
    await store.annotate("a", [annotation("n0", 2.0)])
    assert len(await store.annotations("a")) == 16


async def test_annotations_are_removed_with_the_session(store: Store) -> None:
    reader = await Reader.open(store)
    await fill(store, [record("a")])
    before = (await store.counts()).stored_bytes
    await store.annotate("a", [annotation("x")])
    await reader.take_all(now_ms=1)
    assert await store.retain(KEEP.settled_ms + 1) == 1
    with pytest.raises(SessionUnknownError):
        await store.annotate("a", [annotation("x")])
    assert await store.annotations("a") == []
    assert (await store.counts()).stored_bytes <= before


async def test_a_store_that_is_full_of_sessions_takes_the_scores_that_these_wait_for(
    store: Store,
) -> None:
    await fill(store, [record("a"), record("b")])
    used, teacher = (await store.counts()).stored_bytes, pb.Teacher(model="t")
    store.retention = Retention(settled_ms=10**12, max_bytes=used)
    with pytest.raises(StoreFullError):
        await fill(store, [record("c")])
    await store.add_scores(teacher, ("a", 0), b"scores")
    assert await store.scores("a") == [(0, b"scores")]
    with pytest.raises(StoreFullError):  # a tenth is the most
        await store.add_scores(teacher, ("b", 0), bytes(used))


async def test_annotations_leave_room_for_sessions(store: Store) -> None:
    await fill(store, [record(name) for name in "acdefghijklmnopqrstuvwxyz"])
    used = (await store.counts()).stored_bytes
    store.retention = Retention(settled_ms=10**12, max_bytes=used * 100 // 92)
    with pytest.raises(StoreFullError):
        await store.annotate("a", [annotation("x")])
    await fill(store, [record("b")])
    assert (await store.counts()).sessions == 26
