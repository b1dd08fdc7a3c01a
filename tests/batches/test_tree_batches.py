"""Trees in one batch, against the rows of the same sessions exported as leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rollmesh.batches import (
    MissingRewardError,
    group_advantages,
    pack_trees,
    rows_of,
    to_torch,
)
from rollmesh.chat import Message
from rollmesh.client import Delivery, SessionResult
from rollmesh.gateway.session import SessionSpec
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.batches.records import linear, session
from tests.gateway.closing import write_record
from tests.gateway.worlds import TOOLS, World, random_world, said, user


def exported(
    world: World,
    name: str,
    mode: gateway_pb2.ExportMode.ValueType = gateway_pb2.EXPORT_MODE_TREE,
    *,
    reward: float | None = None,
    turn_rewards: dict[int, float] | None = None,
) -> SessionResult:
    rewards = session_pb2.SessionRewards(reward=reward, turn_rewards=turn_rewards or {})
    close = gateway_pb2.CloseSessionRequest(
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED, rewards=rewards
    )
    spec = SessionSpec(name, 0, group_id="g", export_mode=mode)
    return SessionResult.from_proto(write_record(spec, world.tree, close, 1))


def one_tree(name: str = "s", *, reward: float | None = 1.0, seed: int = 3) -> SessionResult:
    return exported(random_world(seed, 6), name, reward=reward)


@given(seeds=st.lists(st.integers(0, 2**32), max_size=4), turns=st.integers(0, 12), data=st.data())
@settings(max_examples=60)
def test_each_path_is_the_row_of_its_leaf_and_every_token_is_trained_where_a_row_trains_it(
    seeds: list[int], turns: int, data: st.DataObject
) -> None:
    trees: list[SessionResult] = []
    leaves: list[SessionResult] = []
    for at, seed in enumerate(seeds):
        world = random_world(seed, turns)
        sampled = [node_id for node_id, node in world.tree.nodes.items() if node.sample is not None]
        earned = (
            data.draw(st.dictionaries(st.sampled_from(sampled), st.floats(-9, 9, width=32)))
            if sampled
            else {}
        )
        for found, mode in (
            (trees, gateway_pb2.EXPORT_MODE_TREE),
            (leaves, gateway_pb2.EXPORT_MODE_LEAVES),
        ):
            found.append(exported(world, f"s{at}", mode, reward=0.0, turn_rewards=earned))
    batch = pack_trees(trees, untrained="keep")
    rows = rows_of(leaves, untrained="keep")
    trained = np.zeros(len(batch.token_ids), np.int64)
    rewards = np.zeros(len(batch.token_ids), np.float32)
    seen = np.zeros((len(batch.token_ids),) * 2, np.bool_)
    for path, row in zip(batch.paths(), rows, strict=True):
        for name in ("token_ids", "logprobs", "policy_versions"):
            expected = getattr(row.trajectory, name)
            np.testing.assert_array_equal(getattr(batch, name)[path], expected, err_msg=name)
        assert batch.position_ids[path].tolist() == list(range(len(path)))
        trained[path] += row.trajectory.loss_mask
        rewards[path] += row.rewards
        for place, token in enumerate(path):
            seen[token, path[: place + 1]] = True
    assert trained.tolist() == batch.loss_mask.tolist()
    np.testing.assert_array_equal(batch.rewards, rewards)
    np.testing.assert_array_equal(batch.attention_mask(), seen)


@given(seeds=st.lists(st.integers(0, 2**32), max_size=4), turns=st.integers(1, 8))
@settings(max_examples=40)
def test_offsets_say_which_tokens_are_of_which_node_and_tree(seeds: list[int], turns: int) -> None:
    trees = [one_tree(f"s{at}", seed=seed) for at, seed in enumerate(seeds)]
    batch = pack_trees(trees, untrained="keep")
    parts = [one.tree.token_ids.tolist() for one in trees if one.tree is not None]
    assert [part.tolist() for part in batch.unpack(batch.token_ids)] == parts
    assert batch.trees.num_tokens.tolist() == list(map(len, parts))
    sizes = np.diff(batch.node_offsets)
    assert np.repeat(np.arange(len(sizes)), sizes).tolist() == batch.node_index.tolist()
    assert len(batch.parents) == len(batch.turn_rewards) == len(sizes)
    assert batch.parents.dtype == batch.token_ids.dtype == np.int64
    assert not batch.advantages.any()


def test_rewards_of_turns_are_by_node_and_the_sessions_is_of_its_tree() -> None:
    world = random_world(3, 6)
    sampled = [node_id for node_id, node in world.tree.nodes.items() if node.sample is not None]
    first = exported(world, "a", reward=2.0, turn_rewards={sampled[0]: 0.5})
    batch = pack_trees([first, one_tree("b", reward=-1.0)])
    assert first.tree is not None
    at = [node.node_id for node in first.tree.nodes].index(sampled[0])
    assert np.flatnonzero(~np.isnan(batch.turn_rewards)).tolist() == [at]
    assert np.flatnonzero(batch.rewards).tolist() == [first.tree.nodes[at].end - 1]
    assert batch.trees.reward.tolist() == [2.5, -1.0]


def test_the_reward_of_a_turn_that_is_not_trained_is_by_its_node_only() -> None:
    world = World()
    world.turn((Message("system", "main"), user("q")), said("A"), context=TOOLS)
    title = world.turn((Message("system", "make a title"), user("q")), said("Title"))
    both = exported(world, "s", reward=1.0, turn_rewards={title.node_id: 4.0})
    batch = pack_trees([both])
    assert np.nanmax(batch.turn_rewards) == 4.0
    assert not batch.rewards.any()
    assert batch.trees.reward.tolist() == [1.0]
    alone = exported(world, "s", turn_rewards={title.node_id: 4.0})
    assert pack_trees([alone], missing_reward="leave_out").left_out[0].reason == "MISSING_REWARD"


def test_advantages_of_a_group_reach_the_trained_tokens_of_each_tree() -> None:
    batch = pack_trees([one_tree("a", reward=1.0), one_tree("b", reward=0.0, seed=4)])
    advantages = group_advantages(batch.trees)
    assert advantages.tolist() == [0.5, -0.5]
    batch.advantages[:] = batch.spread(advantages)
    masks = batch.unpack(batch.loss_mask)
    for values, mask, expected in zip(
        batch.unpack(batch.advantages), masks, advantages, strict=True
    ):
        assert values.tolist() == np.where(mask, expected, 0).tolist()
        assert not mask.all()


def test_deliveries_are_read_like_their_sessions_and_sessions_without_a_turn_have_no_tree() -> None:
    never = exported(World(), "never", reward=1.0)
    batch = pack_trees([Delivery("d", 1, (one_tree("a"), never, one_tree("b")))])
    assert batch.trees.session_ids == ("a", "b")
    assert (batch.trees.group_ids, batch.left_out) == (("g", "g"), ())
    empty = pack_trees([never])
    assert (len(empty.token_ids), empty.paths(), empty.unpack(empty.token_ids)) == (0, [], [])


def test_a_field_without_a_place_is_refused_by_name_or_left_out_and_counted() -> None:
    unrewarded = one_tree("unrewarded", reward=None)
    with pytest.raises(MissingRewardError, match="tree of session unrewarded: session unrewarded"):
        pack_trees([unrewarded])
    whole = one_tree("idle")
    assert whole.tree is not None
    idle = replace(whole, tree=replace(whole.tree, loss_mask=np.zeros_like(whole.tree.loss_mask)))
    failed = replace(one_tree("failed", reward=None), superseded=True)
    batch = pack_trees([unrewarded, idle, failed, one_tree("good")], missing_reward="leave_out")
    assert batch.trees.session_ids == ("good",)
    assert [(left.trajectory_id, left.reason) for left in batch.left_out] == [
        ("unrewarded", "MISSING_REWARD"),
        ("idle", "UNTRAINED"),
        ("failed", "SUPERSEDED"),
    ]
    assert batch.left_out[0].trained_tokens == batch.loss_mask.sum()


def test_each_form_refuses_sessions_of_the_other_and_names_the_form_for_them() -> None:
    with pytest.raises(InvalidFieldError, match=r"session s has turns and no tree.*rows_of"):
        pack_trees([session("s", [linear("t", 2, 3)])])
    with pytest.raises(InvalidFieldError, match=r"session s has turns.*pack_trees"):
        rows_of([one_tree()])


def test_tensors_of_trees_share_the_memory_of_the_arrays() -> None:
    batch = pack_trees([one_tree("a"), one_tree("b")])
    tensors = to_torch(batch)
    assert np.shares_memory(tensors["advantages"].numpy(), batch.advantages)
    assert tensors["tree_offsets"].tolist() == batch.tree_offsets.tolist()
    assert tensors["loss_mask"].dtype == torch.bool
    assert tensors["group_index"].tolist() == [0, 0]
