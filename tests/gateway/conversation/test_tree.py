import dataclasses

import numpy as np
from hypothesis import given, strategies as st

from rollmesh.chat import Message, ToolCall, make_context
from rollmesh.gateway import Tree, blobs_of, export_turns, path_bytes, serialize
from rollmesh.mesh import Tops
from rollmesh.runtime.codec import unpack_ids
from rollmesh.v1 import chat_pb2, collector_pb2, sampling_pb2, session_pb2, trajectory_pb2
from tests.gateway.worlds import BARE, END, TOOLS, World, mask_of, random_world, said, user


def test_a_continued_conversation_is_one_trajectory() -> None:
    world = World()
    world.turn((user("first"),), said("FIRST"))
    world.turn((user("first"), said("FIRST"), user("next")), said("SECOND"))
    (trajectory,) = world.export()
    assert (trajectory.turns, trajectory.lineage) == (2, trajectory_pb2.LINEAGE_MAIN)
    assert trajectory.reasons == [trajectory_pb2.FIDELITY_REASON_EXACT]
    world.check()


def test_the_same_prompt_three_times_then_an_older_sibling_continued() -> None:
    world = World()
    for reply in ("A", "OLDER", "C"):
        world.turn((user("same"),), said(reply))
    node = world.turn((user("same"), said("OLDER"), user("more")), said("NEXT"))
    assert [n.messages[0].content for n in node.path()] == ["same", "OLDER", "more", "NEXT"]
    lineages = {t.leaf_node_id: t.lineage for t in world.export()}
    assert sorted(lineages.values()) == [
        trajectory_pb2.LINEAGE_MAIN,
        trajectory_pb2.LINEAGE_SIBLING,
        trajectory_pb2.LINEAGE_SIBLING,
    ]
    world.check()


def test_a_sub_agent_and_a_return_to_main_keep_their_own_roots() -> None:
    world = World()
    main, sub = Message("system", "A"), Message("system", "B")
    world.turn((main, user("q")), said("Mango"))
    world.turn((sub, user("q")), said("Blue"))
    world.turn((main, user("q"), said("Mango"), user("go on")), said("Apple"))
    assert [t.lineage for t in world.export()] == [
        trajectory_pb2.LINEAGE_SUB_AGENT,
        trajectory_pb2.LINEAGE_MAIN,
    ]
    world.check()


def test_a_turn_at_a_time_every_token_is_trained_once_too() -> None:
    world = World()
    world.turn((user("q"),), said("A"))
    world.turn((user("q"), said("A"), user("x")), said("X"))
    world.turn((user("q"), said("A"), user("y")), said("Y"))
    head = session_pb2.SessionRecord(trajectories=list(export_turns(world.tree, "s")))
    sent = collector_pb2.IngestRequest.FromString(serialize(head, blobs_of(world.tree)))
    turns = sent.sessions[0].trajectories
    assert [trajectory.turns for trajectory in turns] == [1, 2, 2]
    assert [int(mask_of(trajectory).sum()) for trajectory in turns] == [4, 4, 4]
    assert [trajectory.lineage for trajectory in turns[1:]] == [
        trajectory_pb2.LINEAGE_MAIN,
        trajectory_pb2.LINEAGE_BRANCH,
    ]
    for trajectory in turns[1:]:
        first, last = [segment for segment in trajectory.segments if segment.sampled]
        assert (first.trained, last.trained) == (False, True)
        assert trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX in first.reasons


def test_an_edit_of_an_early_message_branches_there_and_shares_the_prefix() -> None:
    world = World()
    world.turn((user("q"),), said("A"))
    world.turn((user("q"), said("A"), user("x")), said("X"))
    world.turn((user("q"), said("A"), user("y")), said("Y"))
    first, second = world.export()
    assert second.lineage == trajectory_pb2.LINEAGE_BRANCH
    assert second.reasons == [trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX]
    assert mask_of(first).sum() == 8
    assert mask_of(second).sum() == 4
    world.check()


def test_other_tools_begin_a_new_root_and_say_why() -> None:
    world = World()
    world.turn((user("q"),), said("A"))
    world.turn((user("q"),), said("B"), context=TOOLS)
    assert world.export()[1].reasons == [trajectory_pb2.FIDELITY_REASON_TOOLS_CHANGED]
    world.check()


def test_a_rewritten_answer_is_the_agents_text_and_the_sampled_one_stays_a_leaf() -> None:
    world = World()
    world.turn((user("q"),), said("sampled"))
    world.turn((user("q"), said("rewritten"), user("more")), said("B"))
    kept, other = world.export()
    assert (kept.turns, other.turns) == (1, 1)
    assert [s.role for s in other.segments if not s.sampled][:2] == [
        chat_pb2.ROLE_USER,
        chat_pb2.ROLE_ASSISTANT,
    ]
    world.check()


def test_a_cut_turn_is_closed_with_the_end_of_turn_untrained() -> None:
    world = World()
    world.turn((user("q"),), said("A"), finish=sampling_pb2.FINISH_REASON_LENGTH)
    world.turn((user("q"), said("A"), user("go on")), said("B"))
    (trajectory,) = world.export()
    cut = next(s for s in trajectory.segments if s.sampled)
    assert unpack_ids(trajectory.tokens.token_ids_u32le, "token_ids_u32le")[cut.end] == END
    assert not mask_of(trajectory)[cut.end]
    assert trajectory.reasons == [trajectory_pb2.FIDELITY_REASON_LENGTH_CUT]
    world.check()


@given(seed=st.integers(0, 2**32), turns=st.integers(1, 25))
def test_any_tree_exports_every_sampled_token_once(seed: int, turns: int) -> None:
    random_world(seed, turns).check()


def test_a_detached_turn_leaves_no_trace() -> None:
    world = World()
    world.turn((user("q"),), said("A"))
    before = repr(world.tree)
    node = world.turn((user("q"), said("A"), user("x")), said("X"))
    for one in (node, node.parent):
        assert one is not None
        world.tree.detach(one)
        world.seen.pop(one.node_id, None)
    assert repr(world.tree) == before
    world.check()


def test_no_request_starts_from_a_node_that_was_taken_back() -> None:
    world = World()
    node = world.turn((user("q"),), said("A"))
    groups = [(user("q"),), (said("A"),), (user("x"),)]
    _, bookmark = world.tree.search(world.tree.start(BARE, groups), groups)
    world.tree.keep(BARE, b"earlier", bookmark)
    assert world.tree.start(BARE, groups, b"earlier").match.node is node
    world.tree.detach(node)
    assert world.tree.start(BARE, groups, b"earlier").match.node.parent is None


def test_a_turn_whose_beginning_was_taken_back_meanwhile_puts_it_back() -> None:
    world = World()
    failed = world.turn((user("q"),), said("A"))
    asked = failed.parent
    assert asked is not None
    for one in (failed, asked):
        world.tree.detach(one)
    world.seen.clear()
    world.tree.reattach(asked)
    again = world.turn((user("q"),), said("B"))
    assert again.parent is asked
    world.check()


def test_an_answer_ends_its_turn_unless_it_was_cut() -> None:
    world = World()
    whole = world.turn((user("q"),), said("A"))
    cut = world.turn((user("q"),), said("B"), finish=sampling_pb2.FINISH_REASON_LENGTH)
    assert whole.parent is not None
    assert [node.ends_turn for node in (whole.parent, whole, cut)] == [True, True, False]


def counted(tree: Tree) -> tuple[int, int, int]:
    """Tokens, and the bytes of a record by leaf and by turn, counted anew."""
    row = path_bytes(0, 0)
    turns = [node for node in tree.nodes.values() if node.sample is not None]
    return (
        sum(len(node.token_ids) for node in tree.nodes.values()),
        sum(node.record_bytes + row for node in tree.leaves()),
        sum(node.record_bytes + row for node in turns),
    )


@given(seed=st.integers(0, 2**32), turns=st.integers(1, 12), kept=st.integers(0, 12))
def test_a_trees_counts_equal_its_nodes_after_every_detach(
    seed: int, turns: int, kept: int
) -> None:
    tree = random_world(seed, turns).tree
    assert (tree.tokens, tree.leaf_bytes, tree.turn_bytes) == counted(tree)
    for node in list(tree.nodes.values())[kept:][::-1]:
        tree.detach(node)
        assert (tree.tokens, tree.leaf_bytes, tree.turn_bytes) == counted(tree)
    assert len(tree.nodes) <= kept
    assert bool(tree.tokens) == bool(tree.text_bytes) == bool(tree.nodes)


def test_the_text_that_a_tree_holds_is_counted_with_reasoning_calls_and_alternatives() -> None:
    world = World()
    call = ToolCall("c", "f", '{"a": 1}')
    node = world.turn((user("four"),), Message("assistant", "A", (call,), "", "why"))
    assert world.tree.text_bytes == len("four") + len("A") + len("why") + len(call.arguments)
    assert node.sample is not None
    assert node.parent is not None
    tops = Tops(np.zeros((4, 2), np.uint32), np.zeros((4, 2), np.float32))
    sample = dataclasses.replace(node.sample, tops=tops)
    before = world.tree.text_bytes
    world.tree.add_sample(node.parent, said("B"), world.ids(1), sample, frozenset())
    assert world.tree.text_bytes - before == len("B") + 2 * 4 * 4 * 2


def test_tools_and_options_of_a_conversation_count_as_text_of_its_tree() -> None:
    tools, options = b'[{"type": "function", "function": {"name": "f"}}]', b'{"thinking": true}'
    world = World()
    node = world.turn((user("q"),), said("A"), context=make_context(tools, options))
    assert world.tree.text_bytes == len("q") + len("A") + len(tools) + len(options)
    asked = node.parent
    assert asked is not None
    for one in (node, asked):
        world.tree.detach(one)
    assert world.tree.text_bytes == 0


def test_the_parent_of_a_first_message_has_an_id_that_no_message_has() -> None:
    world = World()
    world.turn((user("q"),), said("A"))
    world.turn((user("q"),), said("B"), context=TOOLS)
    first = [node for node in world.tree.nodes.values() if len(node.path()) == 1]
    assert [node.parent.node_id for node in first if node.parent] == [0, 0]
    assert 0 not in world.tree.nodes


def test_a_node_that_is_stored_or_continued_stays() -> None:
    world = World()
    first = world.turn((user("q"),), said("A"))
    last = world.turn((user("q"), said("A"), user("x")), said("B"))
    last.stored = True
    for node in (first, last):
        world.tree.detach(node)
        assert world.tree.nodes[node.node_id] is node
    world.check()
