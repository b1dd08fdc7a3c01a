import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat.canonical import make_context
from rollmesh.chat.messages import Message, ToolCall
from rollmesh.gateway.conversation.reasons import Fidelity
from rollmesh.gateway.conversation.tree import Tree, path_bytes
from rollmesh.gateway.export.trajectories import export_turns
from rollmesh.mesh.generations.sampled import Tops
from rollmesh.runtime.codec.arrays import unpack_ids
from rollmesh.v1 import chat_pb2, sampling_pb2, trajectory_pb2
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
    turns = list(export_turns(world.tree, "s"))
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


def test_an_edit_of_an_early_message_branches_there_and_shares_what_is_before() -> None:
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


CALL = ToolCall("call_1", "f", '{"a": 6,  "b":7.0, "note": "caf\\u00e9 "}')


@pytest.mark.parametrize(
    ("sampled", "echo", "reason"),
    [
        pytest.param(said(" A \n"), said(" A \n"), trajectory_pb2.FIDELITY_REASON_EXACT, id="same"),
        pytest.param(
            said(" A \n"), said("A"), trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO, id="stripped"
        ),
        pytest.param(
            said("", CALL),
            said("", ToolCall("other", "f", '{"note":"caf\u00e9 ","a":6,"b":7.0}')),
            trajectory_pb2.FIDELITY_REASON_EXACT,
            id="arguments-re-serialised-and-ids-renamed",
        ),
        pytest.param(
            said("", ToolCall("call_1", "f", '{"a": 6, "b": ')),
            said("", ToolCall("call_1", "f", '{"a": 6}')),
            trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO,
            id="broken-arguments-mended",
        ),
        pytest.param(
            said("", ToolCall("c", "f", "")),
            said("", ToolCall("c", "f", "{}")),
            trajectory_pb2.FIDELITY_REASON_EXACT,
            id="empty-arguments",
        ),
        pytest.param(
            Message("assistant", "A", (), "", "thought"),
            said("A"),
            trajectory_pb2.FIDELITY_REASON_EXACT,
            id="reasoning-dropped",
        ),
        pytest.param(
            said(" A"),
            Message("assistant", " A", name="worker"),
            trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO,
            id="name-of-the-agent-added",
        ),
    ],
)
def test_an_echo_keeps_the_sampled_tokens(
    sampled: Message, echo: Message, reason: Fidelity
) -> None:
    world = World()
    world.turn((user("q"),), sampled)
    world.turn((user("q"), echo, user("more")), said("B"))
    (trajectory,) = world.export()
    assert trajectory.turns == 2
    assert trajectory.reasons == [reason]
    world.check()


RENAMED = ToolCall("other", CALL.name, CALL.arguments)


@pytest.mark.parametrize("printed", [True, False], ids=["printed", "ignored"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((said("", CALL),), (said("", RENAMED),), id="call"),
        pytest.param(
            (said("", CALL), Message("tool", "r", tool_call_id="call_1")),
            (said("", CALL), Message("tool", "r", tool_call_id="other")),
            id="result",
        ),
    ],
)
def test_ids_of_calls_count_only_where_the_template_prints_them(
    before: tuple[Message, ...], after: tuple[Message, ...], *, printed: bool
) -> None:
    world = World(Tree(frozenset({END}), call_ids=printed))
    world.turn((user("q"),), before[0])
    world.turn((user("q"), *before, user("more")), said("A"))
    node = world.turn((user("q"), *after, user("more"), said("A"), user("on")), said("B"))
    assert len(node.path()) == (5 if len(before) == 1 else 6) + 1
    assert (trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX in world.export()[-1].reasons) == (
        printed and len(before) == 2
    )
    assert len(world.export()) == (2 if printed else 1)
    world.check()


def test_another_reasoning_of_the_agents_own_is_another_message() -> None:
    world = World()
    first = Message("assistant", "A", reasoning="one")
    for message in (first, Message("assistant", "A", reasoning="two")):
        world.turn((user("q"), message, user("x")), said("B"))
    assert len(world.export()) == 2
    world.check()


@pytest.mark.parametrize(
    ("sampled", "other"),
    [
        pytest.param(said("A"), said("B"), id="text"),
        pytest.param(said("", CALL), said("", ToolCall("call_1", "g", CALL.arguments)), id="name"),
        pytest.param(said("", CALL), said("", ToolCall("call_1", "f", '{"a": 7}')), id="arguments"),
        pytest.param(said("", CALL), said("", CALL, CALL), id="one-more-call"),
        pytest.param(said("A"), Message("assistant", "A", (), "", "other thought"), id="reasoning"),
        pytest.param(
            Message("assistant", " A", reasoning="thought"),
            Message("assistant", "A", reasoning="other thought"),
            id="stripped-with-other-reasoning",
        ),
    ],
)
def test_what_is_no_echo_is_not_taken_for_one(sampled: Message, other: Message) -> None:
    world = World()
    world.turn((user("q"),), sampled)
    world.turn((user("q"), other, user("more")), said("B"))
    assert sorted(t.turns for t in world.export()) == [1, 1]
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


def attempt(call_id: str, arguments: str = '{"a": 6}') -> tuple[Message, Message]:
    """A call and its result."""
    call = said("", ToolCall(call_id, "f", arguments))
    return call, Message("tool", "r", tool_call_id=call_id)


@pytest.mark.parametrize("first_goes_on", [0, 1, 2])
@pytest.mark.parametrize("named_by", ["call and result", "call", "result"])
def test_the_ids_of_an_echo_say_which_of_equal_samples_goes_on(
    first_goes_on: int, named_by: str
) -> None:
    world = World()
    (one, result_one), (two, result_two) = attempt("one"), attempt("two")
    nodes = [world.turn((user("q"),), call) for call in (one, two)]
    history: tuple[Message, ...] = (user("q"), one, result_one)
    for at in range(first_goes_on):
        assert world.turn(history, said(f"A{at}")).path()[1] is nodes[0]
        history = (*history, said(f"A{at}"), user("on"))
    echo = two if "call" in named_by else said("", ToolCall("", "f", '{"a": 6}'))
    result = result_two if "result" in named_by else Message("tool", "r")
    last = world.turn((user("q"), echo, result), said("B"))
    assert last.path()[1] is nodes[1]
    again = world.turn((user("q"), echo, result, said("B"), user("more")), said("C"))
    assert last in again.path()
    world.check()


def test_an_echo_without_its_blanks_is_still_told_by_its_ids() -> None:
    world = World()
    first = world.turn((user("q"),), said(" now ", ToolCall("one", "f", "{}")))
    world.turn((user("q"),), said("now", ToolCall("two", "f", "{}")))
    echo = said("now", ToolCall("one", "f", "{}"))
    last = world.turn((user("q"), echo, Message("tool", "r", tool_call_id="one")), said("A"))
    assert first in last.path()
    world.check()


def test_ids_that_an_agent_made_up_part_nothing() -> None:
    world = World()
    (one, result_one), (other, result_other) = attempt("one"), attempt("other")
    world.turn((user("q"),), one)
    world.turn((user("q"),), attempt("two")[0])
    first = world.turn((user("q"), one, result_one), said("A"))
    last = world.turn((user("q"), other, result_other, said("A"), user("more")), said("B"))
    assert first in last.path()
    world.check()


def test_an_echo_of_one_sample_goes_before_one_that_mends_another() -> None:
    world = World()
    echoed = world.turn((user("q"),), said(" now", ToolCall("", "f", "{}")))
    world.turn((user("q"),), said("now", ToolCall("", "f", '{"a": ')))
    last = world.turn(
        (user("q"), said("now", ToolCall("", "f", "{}")), Message("tool", "r")), said("A")
    )
    assert echoed in last.path()
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
def test_a_trees_counts_are_those_of_its_nodes_whatever_is_detached(
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
