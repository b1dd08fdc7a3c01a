"""Sessions that change after they may have been delivered, in every store."""

import pytest

from rollmesh.collector import Store
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, session_pb2
from tests.collector.records import record
from tests.collector.storage.test_annotations import annotation
from tests.collector.stores import KEEP, Reader, fill

REWARDS = session_pb2.SessionRewards(reward=5.0)


async def changed(store: Store, after: str = "") -> list[str]:
    return [session_id for _, session_id in await store.changes_after(after, 10)]


async def test_a_session_is_listed_once_in_the_order_of_the_last_changes(store: Store) -> None:
    await fill(store, [record(name) for name in "abc"])
    assert await changed(store) == []
    await store.set_rewards("b", REWARDS, "1", 0)
    await store.annotate("a", [annotation("x")])
    ((token, first),) = await store.changes_after("", 1)
    assert first == "b"
    assert await changed(store, token) == ["a"]
    await store.set_rewards("b", REWARDS, "1", 0)  # a repeat
    assert await changed(store) == ["b", "a"]
    await store.set_rewards("b", REWARDS, "2", 0)
    assert await changed(store, token) == ["a", "b"]


async def test_scores_of_a_teacher_are_a_change_and_a_refusal_is_none(store: Store) -> None:
    await fill(store, [record("a"), record("b")])
    await store.add_scores(pb.Teacher(model="t", top_k=2), ("a", 0), b"")
    await store.add_scores(pb.Teacher(model="t"), ("b", 0), b"scores")
    await store.add_scores(pb.Teacher(model="s"), ("b", 0), b"others")
    assert await changed(store) == ["b"]
    assert await store.scores("a") == []
    assert await store.scores("b") == [(0, b"others"), (0, b"scores")]


async def test_rewards_that_a_session_waits_for_are_no_change(store: Store) -> None:
    waiting = record("a")
    waiting.reward_timeout_ms = 10**9
    await fill(store, [waiting])
    await store.set_rewards("a", REWARDS, "1", 0)
    assert await changed(store) == []


async def test_a_token_of_another_store_begins(store: Store) -> None:
    await fill(store, [record("a")])
    await store.annotate("a", [annotation("x")])
    assert await changed(store, f"{'0' * 32}-999") == ["a"]
    with pytest.raises(InvalidFieldError, match="resume_token"):
        await changed(store, f"{store.store_id}-x")


async def test_a_removed_session_has_no_changes(store: Store) -> None:
    reader = await Reader.open(store)
    await fill(store, [record("a")])
    await store.annotate("a", [annotation("x")])
    await reader.take_all(now_ms=1)
    assert await store.retain(KEEP.settled_ms + 1) == 1
    assert await changed(store) == []
