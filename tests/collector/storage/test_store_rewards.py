"""Rewards that come later, in every store."""

from typing import Any

import pytest

from rollmesh.collector import Store
from rollmesh.runtime.errors import InvalidFieldError, RepeatConflictError, SessionUnknownError
from rollmesh.v1 import session_pb2
from tests.collector.collectors import GROUP
from tests.collector.records import record, trajectory
from tests.collector.stores import (
    Reader,
    fill,
    sessions_of,
)


def pending(session_id: str, **options: Any) -> session_pb2.SessionRecord:
    made = record(session_id, **options)
    made.ClearField("reward")
    made.reward_timeout_ms = 50
    return made


async def test_a_session_waits_for_its_rewards(store: Store) -> None:
    await fill(store, [pending("a"), record("b")])
    reader = await Reader.open(store)
    assert await reader.ids() == ["b"]
    assert (await store.counts()).waiting_for_rewards == 1
    rewards = session_pb2.SessionRewards(
        reward=0.5, trajectory_rewards={"a-1": 2.0}, turn_rewards={2: 3.0}
    )
    assert not await store.set_rewards("a", rewards, "r1", 1)
    (unit,) = await reader.fetch()
    loaded = await reader.load(unit)
    (session,) = sessions_of(loaded)
    (one,) = session.trajectories
    assert (session.reward, one.reward, one.segments[1].reward) == (0.5, 2.0, 3.0)
    assert one.tokens == trajectory("a").tokens
    assert not await store.tick(1000)
    counts = await store.counts()
    assert (counts.waiting_for_rewards, counts.reward_timeouts) == (0, 0)


async def test_a_session_whose_rewards_do_not_come_goes_out_without(store: Store) -> None:
    await fill(store, [pending("g0", group="g", size=2), record("g1", "g", 1, 2)], now_ms=100)
    reader = await Reader.open(store, unit=GROUP)
    assert not await store.tick(149)
    assert await reader.fetch() == []
    assert await store.tick(150)
    assert await reader.take() == [("g", 1, ["g0", "g1"])]
    assert not (await store.session("g0", arrays=False)).HasField("reward")
    assert (await store.counts()).reward_timeouts == 1


async def test_rewards_set_twice_by_one_request_are_set_once(store: Store) -> None:
    await fill(store, [record("a")])
    for request_id, reward, repeat in (("r1", 1.0, False), ("r2", 2.0, False), ("r1", 1.0, True)):
        rewards = session_pb2.SessionRewards(reward=reward)
        assert await store.set_rewards("a", rewards, request_id, 0) == repeat
    assert (await store.session("a", arrays=False)).reward == 2.0


@pytest.mark.parametrize("first", [{"reward": 1.0}, {"turn_rewards": {2: 3.0}}])
async def test_late_rewards_change_nothing_after_others(store: Store, first: Any) -> None:
    await fill(store, [pending("a")])
    assert not await store.set_rewards("a", session_pb2.SessionRewards(**first), "client", 1)
    before = await store.session("a", arrays=False)
    scored = session_pb2.SessionRewards(reward=0.5, turn_rewards={2: 4.0})
    assert await store.set_rewards("a", scored, "scorer", 2, is_late=True)
    assert await store.session("a", arrays=False) == before


async def test_late_rewards_are_set_where_no_others_are(store: Store) -> None:
    await fill(store, [pending("a")])
    scored = session_pb2.SessionRewards(reward=0.5)
    assert not await store.set_rewards("a", scored, "scorer", 2, is_late=True)
    assert (await store.session("a", arrays=False)).reward == 0.5


async def test_other_rewards_under_the_id_of_a_request_are_refused(store: Store) -> None:
    await fill(store, [record("a")])
    await store.set_rewards("a", session_pb2.SessionRewards(reward=1.0), "r1", 0)
    with pytest.raises(RepeatConflictError):
        await store.set_rewards("a", session_pb2.SessionRewards(reward=2.0), "r1", 0)
    assert (await store.session("a", arrays=False)).reward == 1.0


@pytest.mark.parametrize(
    ("rewards", "field"),
    [
        pytest.param({"trajectory_rewards": {"x": 1.0}}, "trajectory_rewards[x]", id="trajectory"),
        pytest.param({"turn_rewards": {7: 1.0}}, "turn_rewards[7]", id="turn"),
        pytest.param({"turn_rewards": {1: 1.0}}, "turn_rewards[1]", id="a turn not sampled"),
        pytest.param({"reward": float("nan")}, "reward", id="not a number"),
        pytest.param(
            {"trajectory_rewards": {"a-1": float("inf")}}, "trajectory_rewards[a-1]", id="infinite"
        ),
    ],
)
async def test_rewards_that_do_not_fit_name_their_field_and_change_nothing(
    store: Store, rewards: dict[str, Any], field: str
) -> None:
    await fill(store, [pending("a")])
    with pytest.raises(InvalidFieldError) as caught:
        await store.set_rewards("a", session_pb2.SessionRewards(**rewards), "r", 0)
    assert caught.value.field == f"rewards.{field}"
    assert (await store.counts()).waiting_for_rewards == 1
    good = session_pb2.SessionRewards(reward=1.0)
    assert not await store.set_rewards("a", good, "r", 0)  # the refused one is not remembered
    with pytest.raises(SessionUnknownError):
        await store.set_rewards("b", good, "r", 0)
