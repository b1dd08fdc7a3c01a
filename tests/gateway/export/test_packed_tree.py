"""The exported tree as the client reads it, against the trajectories of its leaves."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import Message
from rollmesh.client import SessionResult, TrajectoryTree
from rollmesh.gateway import Session, SessionSpec, check_close, exported_lineages
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2
from tests.gateway.closing import write_record
from tests.gateway.worlds import TOOLS, World, random_world, said, user

CLOSE = gateway_pb2.CloseSessionRequest(outcome=session_pb2.SESSION_OUTCOME_COMPLETED)


def record_of(
    world: World,
    mode: gateway_pb2.ExportMode.ValueType,
    close: gateway_pb2.CloseSessionRequest = CLOSE,
) -> session_pb2.SessionRecord:
    spec = SessionSpec("s", 0, export_mode=mode)
    return write_record(spec, world.tree, close, 1)


def tree_of(world: World) -> TrajectoryTree:
    tree = SessionResult.from_proto(record_of(world, gateway_pb2.EXPORT_MODE_TREE)).tree
    assert tree is not None
    return tree


@given(seed=st.integers(0, 2**32), turns=st.integers(0, 25))
def test_each_path_of_the_tree_is_the_trajectory_of_its_leaf(seed: int, turns: int) -> None:
    world = random_world(seed, turns)
    tree = tree_of(world)
    trajectories = SessionResult.from_proto(
        record_of(world, gateway_pb2.EXPORT_MODE_LEAVES)
    ).trajectories
    paths = tree.paths()
    assert len(paths) == len(trajectories)
    trained = np.zeros(len(tree.token_ids), np.int64)
    for path, trajectory in zip(paths, trajectories, strict=True):
        for name in ("token_ids", "logprobs", "policy_versions"):
            one, other = getattr(tree, name)[path], getattr(trajectory, name)
            np.testing.assert_array_equal(one, other, err_msg=name)
        assert tree.position_ids[path].tolist() == list(range(len(path)))
        trained[path] += trajectory.loss_mask
    assert trained.tolist() == tree.loss_mask.tolist()  # what is trained anywhere, once


@given(seed=st.integers(0, 2**32), turns=st.integers(0, 12))
def test_a_token_sees_its_own_path_up_to_itself(seed: int, turns: int) -> None:
    tree = tree_of(random_world(seed, turns))
    seen = np.zeros((len(tree.token_ids),) * 2, np.bool_)
    for path in tree.paths():
        for at, token in enumerate(path):
            seen[token, path[: at + 1]] = True
    np.testing.assert_array_equal(tree.attention_mask(), seen)


@given(seed=st.integers(0, 2**32), turns=st.integers(1, 25))
def test_every_sampled_token_is_in_the_tree_once_and_trained_or_excused(
    seed: int, turns: int
) -> None:
    world = random_world(seed, turns)
    tree = tree_of(world)
    found = {}
    for at, node in enumerate(tree.nodes):
        start = node.start + node.scaffold_tokens
        assert set(tree.loss_mask[node.start : start].tolist()) <= {False}
        assert (tree.node_index[node.start : node.end] == at).all()
        if node.sampled:
            context = tree.token_ids[tree.path(at)]
            end = len(context) - (node.end - start)
            found[node.node_id] = (context[:end].tolist(), context[end:].tolist())
            assert tree.loss_mask[start : node.end].all() == node.trained
            assert node.trained or trajectory_pb2.FIDELITY_REASON_AUXILIARY in node.reasons
    assert found == world.seen


@given(seed=st.integers(0, 2**32), turns=st.integers(1, 25), data=st.data())
def test_rewards_of_turns_are_on_their_nodes_and_nowhere_else(
    seed: int, turns: int, data: st.DataObject
) -> None:
    world = random_world(seed, turns)
    sampled = [node_id for node_id, node in world.tree.nodes.items() if node.sample is not None]
    given_ = data.draw(st.dictionaries(st.sampled_from(sampled), st.floats(-9, 9)))
    close = gateway_pb2.CloseSessionRequest(rewards=session_pb2.SessionRewards(turn_rewards=given_))
    tree = SessionResult.from_proto(record_of(world, gateway_pb2.EXPORT_MODE_TREE, close)).tree
    assert tree is not None
    expected = [given_.get(node.node_id, np.nan) for node in tree.nodes]
    np.testing.assert_array_equal(tree.turn_rewards, np.array(expected, np.float64))


@given(seed=st.integers(0, 2**32), turns=st.integers(0, 25))
def test_the_record_has_exactly_the_trajectories_that_can_be_rewarded(
    seed: int, turns: int
) -> None:
    world = random_world(seed, turns)
    for mode in (gateway_pb2.EXPORT_MODE_LEAVES, gateway_pb2.EXPORT_MODE_TURNS):
        session = Session(SessionSpec("s", 0, export_mode=mode), world.tree)
        found = [one.leaf_node_id for one in record_of(world, mode).trajectories]
        assert check_close(session, session_pb2.SessionRewards()) == found


def test_a_packed_tree_describes_its_nodes() -> None:
    world = World()
    system = Message("system", "main")
    world.turn(
        (system, user("q")),
        said("A"),
        context=TOOLS,
        finish=sampling_pb2.FINISH_REASON_LENGTH,
        version=1,
    )
    world.turn((system, user("q")), said("B"), context=TOOLS, version=2)
    world.turn((Message("system", "make a title"), user("q")), said("Title"))
    record = record_of(world, gateway_pb2.EXPORT_MODE_TREE)
    assert sorted(exported_lineages(record)) == ["auxiliary", "main", "sibling"]
    cut, whole, title = [node for node in record.tree.nodes if node.sampled]
    assert cut.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert list(cut.reasons) == [trajectory_pb2.FIDELITY_REASON_LENGTH_CUT]
    assert (cut.trained, whole.trained, title.trained) == (True, True, False)
    assert tree_of(world).reasons == ("LENGTH_CUT", "MIXED_VERSIONS", "AUXILIARY")


def test_a_context_that_no_turn_continues_is_on_no_path() -> None:
    record = record_of(random_world(1, 6), gateway_pb2.EXPORT_MODE_TREE)
    paths = TrajectoryTree.from_proto(record.tree).paths()
    tokens, end = record.tree.tokens, record.tree.nodes[-1].end
    record.tree.nodes.add(node_id=99, start=end, end=end + 1, scaffold_tokens=1)
    tokens.token_ids_u32le += bytes(4)
    tokens.logprobs_f32le += bytes(4)
    tokens.loss_mask_u8 += bytes(1)
    tree = TrajectoryTree.from_proto(record.tree)
    assert [one.tolist() for one in tree.paths()] == [one.tolist() for one in paths]
    assert len(tree.leaves()) == len(paths) + 1


def test_a_session_without_a_turn_is_an_empty_tree() -> None:
    tree = tree_of(World())
    assert (len(tree.token_ids), tree.paths(), tree.reasons) == (0, [], ("EXACT",))
    assert tree.attention_mask().shape == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"tokens": {"token_ids_u32le": bytes(32)}}, "by the mask", id="arrays"),
        pytest.param({"tokens": {}}, "cover", id="arrays-missing"),
        pytest.param({"nodes": []}, "cover", id="nodes-missing"),
        pytest.param({"nodes": [{"end": 8, "parent_index": 0}]}, "before its parent", id="order"),
        pytest.param({"nodes": [{"end": 9}, {"start": 9, "end": 8}]}, "cover", id="backwards"),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    fields = {
        "nodes": [{"end": 8}],
        "tokens": {
            "token_ids_u32le": bytes(32),
            "logprobs_f32le": bytes(32),
            "loss_mask_u8": bytes(8),
        },
    }
    TrajectoryTree.from_proto(trajectory_pb2.TrajectoryTree(**fields))  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match=message):
        TrajectoryTree.from_proto(trajectory_pb2.TrajectoryTree(**{**fields, **change}))  # type: ignore[arg-type]
