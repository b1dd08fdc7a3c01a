"""Lineage of branches: auxiliary calls of agents are stored and not trained."""

import json
from collections.abc import Callable

import pytest

from rollmesh.chat import Message, RenderContext, ToolCall, make_context
from rollmesh.gateway import RULES, Lineage, Node, new_root, pack_tree, write_nodes
from rollmesh.v1 import sampling_pb2, trajectory_pb2
from tests.gateway.worlds import BARE, TOOLS, World, mask_of, said, user

OTHER_TOOLS = make_context(b'[{"type": "function", "function": {"name": "g"}}]', b"")
SYSTEM, OTHER = Message("system", "You work."), Message("system", "Write a title.")


WORK = "Fix the failing test of the parser."
CALL = ToolCall("c", "f", "{}")
SUMMARY = "All three steps were taken, and the parser reads its input now."
LAST = "The tests of the parser pass, and its documentation is whole."


def worked(world: World, turns: int, system: Message = SYSTEM) -> tuple[Message, ...]:
    """A main conversation with tools."""
    messages: tuple[Message, ...] = (system, user("go"))
    for at in range(turns):
        reply = said(f"step {at}")
        world.turn(messages, reply, context=TOOLS)
        messages = (*messages, reply, user(f"on {at}"))
    return messages


def found(world: World) -> list[Lineage]:
    return [trajectory.lineage for trajectory in world.export()]


@pytest.mark.parametrize("first", [True, False], ids=["before", "beside"])
def test_a_title_call_is_auxiliary_wherever_it_comes(*, first: bool) -> None:
    world = World()
    if not first:
        worked(world, 2)
    world.turn((OTHER, user("<session>go</session>")), said("A title"))
    if first:
        worked(world, 2)
    title, main = sorted(world.export(), key=lambda trajectory: trajectory.turns)
    assert (title.lineage, main.lineage) == (
        trajectory_pb2.LINEAGE_AUXILIARY,
        trajectory_pb2.LINEAGE_MAIN,
    )
    assert trajectory_pb2.FIDELITY_REASON_AUXILIARY in title.reasons
    assert not mask_of(title).any()
    assert mask_of(main).sum() == 8


def test_a_probe_of_one_token_is_auxiliary() -> None:
    world = World()
    worked(world, 1)
    world.turn((user("quota"),), said("x"), finish=sampling_pb2.FINISH_REASON_LENGTH, tokens=1)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_AUXILIARY]


def test_a_conversation_under_another_system_message_is_a_sub_agent() -> None:
    world = World()
    main = worked(world, 2)
    sub = (OTHER, user("find it"))
    world.turn(sub, said("looking"), context=TOOLS)
    world.turn((*sub, said("looking"), user("and?")), said("found"), context=TOOLS)
    world.turn(main, said("thanks"), context=TOOLS)
    assert sorted(found(world)) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SUB_AGENT]


def test_a_history_begun_anew_is_a_compaction() -> None:
    world = World()
    before = worked(world, 3)
    world.turn(
        (*before, user("Summarise.")), said(f"<summary>\n{SUMMARY}\n</summary>"), context=TOOLS
    )
    summary = (SYSTEM, user(f"This is what was done so far:\n\n{SUMMARY}\nGo on."))
    world.turn(summary, said("go on"), context=TOOLS)
    world.turn((*summary, said("go on"), user("yes")), said("done"), context=TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_COMPACTION]
    assert all(mask_of(trajectory).any() for trajectory in world.export())


def test_a_history_that_another_session_began_is_compacted_as_well() -> None:
    earlier, world = World(), World()
    before = worked(earlier, 3)
    parent = new_root(TOOLS)
    for one in max(earlier.tree.leaves(), key=lambda leaf: leaf.end).path():
        sampled = frozenset({trajectory_pb2.FIDELITY_REASON_IMPORTED} if one.sample else ())
        ids, size = one.token_ids.copy(), len(one.token_ids)
        parent = Node(one.node_id, parent, TOOLS, one.messages, ids, size, reasons=sampled)
        world.tree.attach(parent)
    world.next_id = earlier.next_id
    world.turn((*before, user("Summarise.")), said(SUMMARY), context=TOOLS)
    world.turn((SYSTEM, user(f"So far: {SUMMARY}")), said("on"), context=TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_COMPACTION]
    world.check()


@pytest.mark.parametrize("summariser", ["the work", "another agent"])
@pytest.mark.parametrize("kept", [(), (user("go"),)], ids=["nothing kept", "the task kept"])
def test_an_unmarked_summary_begins_a_compaction(
    summariser: str, kept: tuple[Message, ...]
) -> None:
    world = World()
    before = worked(world, 3)
    if summariser == "the work":
        world.turn((*before, user("Summarise.")), said(SUMMARY), context=TOOLS)
    else:
        world.turn((OTHER, user("Summarise: step 0, step 1, step 2")), said(SUMMARY))
    world.turn((SYSTEM, *kept, user(f"So far: {SUMMARY}")), said("on"), context=TOOLS)
    expected = [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_COMPACTION]
    if summariser == "another agent":
        expected.insert(1, trajectory_pb2.LINEAGE_AUXILIARY)
    assert found(world) == expected


@pytest.mark.parametrize("kept", [(), (user("go"),)], ids=["nothing kept", "the task kept"])
def test_a_window_that_keeps_the_newest_messages_is_a_compaction(kept: tuple[Message, ...]) -> None:
    world = World()
    before = worked(world, 4)
    newest = (SYSTEM, *kept, *before[-3:])
    world.turn(newest, said("step 4"), context=TOOLS)
    world.turn((SYSTEM, *kept, *newest[-2:], said("step 4"), user("on")), said("5"), context=TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, *2 * [trajectory_pb2.LINEAGE_COMPACTION]]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("system", [(), (SYSTEM,)], ids=["no system message", "a system message"])
def test_a_new_question_without_the_old_history_is_a_root(
    turns: int, system: tuple[Message, ...]
) -> None:
    world = World()
    for question in ("first question", "second question", "third question"):
        messages = (*system, user(question))
        for at in range(turns):
            reply = said(f"{question}: {at}", CALL)
            world.turn(messages, reply, context=TOOLS)
            messages = (*messages, reply, Message("tool", "r", tool_call_id="c"))
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, *2 * [trajectory_pb2.LINEAGE_ROOT]]
    assert all(
        mask_of(trajectory).all() or mask_of(trajectory).any() for trajectory in world.export()
    )


def test_a_question_that_names_a_short_answer_is_a_root() -> None:
    world = World()
    worked(world, 2)
    world.turn((SYSTEM, user("Who?")), said("Marie Curie"), context=TOOLS)
    world.turn((SYSTEM, user("When was Marie Curie born?")), said("1867"), context=TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, *2 * [trajectory_pb2.LINEAGE_ROOT]]


def test_an_echo_that_the_agent_changed_is_a_branch() -> None:
    world = World()
    worked(world, 3)
    changed = (SYSTEM, user("go"), said("another step"), user("on 0"))
    world.turn(changed, said("step 1"), context=TOOLS)
    whole = (*changed, said("another step 1"), user("on 1"), said("step 2"), user("on 2"))
    world.turn(whole, said("step 3"), context=TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, *2 * [trajectory_pb2.LINEAGE_BRANCH]]


def test_echoes_that_are_changed_at_every_turn_are_branches_of_the_longest() -> None:
    world = World()
    messages: tuple[Message, ...] = (SYSTEM, user("go"))
    for at in range(4):
        world.turn(messages, said(f"step {at}"), context=TOOLS)
        messages = (*messages, said(f"I took step {at}"), user(f"on {at}"))
    assert sorted(found(world)) == [
        trajectory_pb2.LINEAGE_MAIN,
        *3 * [trajectory_pb2.LINEAGE_BRANCH],
    ]


FINAL = Message("system", "An agent got stuck. Answer for it.")


@pytest.mark.parametrize("echo", ["as sampled", "as text"])
@pytest.mark.parametrize("system", [SYSTEM, FINAL], ids=["same system", "another system message"])
def test_a_final_answer_that_is_asked_without_tools_is_the_work(system: Message, echo: str) -> None:
    world = World()
    messages: tuple[Message, ...] = (SYSTEM, user(WORK))
    for at in range(3):
        reply = said(f"step {at}", CALL)
        world.turn(messages, reply, context=TOOLS)
        result = Message("tool", f"r{at}", tool_call_id="c")
        if echo == "as text":
            reply, result = said(f"step {at}\nI called f."), user(f"r{at}")
        messages = (*messages, reply, result)
    world.turn((system, *messages[1:], user("Answer now.")), said("42"))
    final = world.export()[-1]
    assert final.lineage == trajectory_pb2.LINEAGE_MAIN
    assert mask_of(final).any()


def test_a_call_beside_the_work_that_repeats_its_history_is_auxiliary_still() -> None:
    world = World()
    call, result = said("I look.", CALL), Message("tool", "r", tool_call_id="c")
    before = (*worked(world, 2), call, result)
    world.turn(before[:-2], call, context=TOOLS)
    asked = world.turn((OTHER, *before[1:], user("A title?")), said("A title"))
    assert found(world)[-1] == trajectory_pb2.LINEAGE_MAIN, "it may be the final answer"
    world.turn(before, said("the work goes on"), context=TOOLS)
    title = next(one for one in world.export() if one.leaf_node_id == asked.node_id)
    assert title.lineage == trajectory_pb2.LINEAGE_AUXILIARY


@pytest.mark.parametrize(
    ("system", "calls", "finish", "lineage"),
    [
        pytest.param(OTHER, (), "STOP", trajectory_pb2.LINEAGE_AUXILIARY, id="answered"),
        pytest.param(OTHER, (CALL,), "STOP", trajectory_pb2.LINEAGE_MAIN, id="called"),
        pytest.param(OTHER, (), "LENGTH", trajectory_pb2.LINEAGE_MAIN, id="cut"),
        pytest.param(SYSTEM, (), "STOP", trajectory_pb2.LINEAGE_MAIN, id="same-system"),
    ],
)
@pytest.mark.parametrize("asks", ["with a changed echo", "with its echo"])
def test_a_summary_of_work_that_has_its_answer_is_a_side_call(
    system: Message, calls: tuple[ToolCall, ...], finish: str, lineage: Lineage, asks: str
) -> None:
    world = World()
    begin = (SYSTEM, user(WORK), said("I look.", CALL), Message("tool", "r", tool_call_id="c"))
    last = said("It is fixed.", *calls)
    world.turn(begin[:2], begin[2], context=TOOLS)
    reason = sampling_pb2.FinishReason.Value(f"FINISH_REASON_{finish}")
    world.turn(begin, last, context=TOOLS, finish=reason)
    echo = last if asks == "with its echo" else said(f"{last.content} I am done.")
    side = world.turn((system, *begin[1:], echo, user("A title, please.")), said("A parser"))
    (title,) = (one for one in world.export() if one.leaf_node_id == side.node_id)
    assert title.lineage == lineage
    assert mask_of(title).any() == (lineage == trajectory_pb2.LINEAGE_MAIN)
    main = next(one for one in world.export() if one.leaf_node_id != side.node_id)
    assert main.lineage == trajectory_pb2.LINEAGE_MAIN


def test_a_call_that_could_not_be_read_is_no_answer_yet() -> None:
    world = World()
    begin, last = (SYSTEM, user(WORK)), said('<tool_call>{"name": ')
    turn = world.turn(begin, last, context=TOOLS)
    turn.reasons |= {trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL}
    world.turn((FINAL, *begin[1:], last, user("Answer now.")), said("42"))
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_MAIN]


def test_work_whose_tools_change_says_so() -> None:
    world = World()
    before = worked(world, 2)
    world.turn(before, said("more"), context=OTHER_TOOLS)
    world.turn((*before, said("more"), user("on")), said("done"), context=OTHER_TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SUB_AGENT]
    first, second = world.export()
    assert first.reasons == [trajectory_pb2.FIDELITY_REASON_EXACT]
    assert second.reasons == [trajectory_pb2.FIDELITY_REASON_TOOLS_CHANGED]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param((user("Are you there?"),), id="probe"),
        pytest.param((OTHER, user(f"<session>{WORK}</session>")), id="title"),
        pytest.param((SYSTEM, user("Are you there?")), id="probe with the system message"),
        pytest.param((user(WORK),), id="task without a system message"),
    ],
)
def test_a_conversation_before_the_work_changes_no_tools(before: tuple[Message, ...]) -> None:
    world = World()
    world.turn(before, said("Yes."))
    work(world, 3)
    (main,) = [one for one in world.export() if one.lineage == trajectory_pb2.LINEAGE_MAIN]
    assert main.turns == 3
    assert main.reasons == [trajectory_pb2.FIDELITY_REASON_EXACT]


def test_a_first_answer_that_was_not_stored_changes_no_tools() -> None:
    world = World()
    lost = world.turn((user("q"),), said("A"))
    world.tree.detach(lost)
    world.seen.pop(lost.node_id)
    node = world.turn((user("q"),), said("B"), context=TOOLS)
    assert not node.reasons
    assert not world.turn((user("q"),), said("C"), context=TOOLS).reasons
    changed = world.turn((user("q"),), said("D"))
    assert changed.reasons == {trajectory_pb2.FIDELITY_REASON_TOOLS_CHANGED}


def test_a_second_conversation_of_an_agent_without_tools_is_a_root_and_trained() -> None:
    world = World()
    world.turn((user("a"),), said("A"), context=BARE)
    world.turn((user("b"),), said("B"), context=BARE)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_ROOT]
    assert all(mask_of(trajectory).any() for trajectory in world.export())


Say = Lineage | None


def work(world: World, turns: int, *, context: RenderContext = TOOLS, marked: Say = None) -> None:
    """The conversation of an agent, which calls a tool in every turn but the last."""
    messages: tuple[Message, ...] = (SYSTEM, user(WORK))
    for at in range(turns):
        reply = said("done") if at == turns - 1 else said(f"step {at}", CALL)
        world.turn(messages, reply, context=context, said=marked)
        messages = (*messages, reply, Message("tool", f"r{at}", tool_call_id="c"))


def title(world: World, *, context: RenderContext = BARE, marked: Say = None) -> None:
    asked = user(f"<session>{WORK}</session>")
    world.turn((OTHER, asked), said("A title"), context=context, said=marked)


def memory(world: World, *, context: RenderContext = TOOLS, marked: Say = None) -> None:
    """An agent of its own that reads and writes notes before the work begins."""
    messages: tuple[Message, ...] = (Message("system", "Keep notes."), user("What is known?"))
    for at in range(3):
        world.turn(messages, said(f"note {at}", CALL), context=context, said=marked)
        result = Message("tool", f"n{at}", tool_call_id="c")
        messages = (*messages, said(f"note {at}", CALL), result)


def main_of(world: World) -> list[str]:
    """What the main trajectories say at their end."""
    return [
        world.tree.nodes[one.leaf_node_id].messages[0].content
        for one in world.export()
        if one.lineage == trajectory_pb2.LINEAGE_MAIN
    ]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("order", ["title first", "title last"])
@pytest.mark.parametrize(
    ("works", "titles", "title_is"),
    [
        pytest.param(TOOLS, BARE, trajectory_pb2.LINEAGE_AUXILIARY, id="title without tools"),
        pytest.param(TOOLS, TOOLS, trajectory_pb2.LINEAGE_SUB_AGENT, id="title with the tools"),
        pytest.param(BARE, BARE, trajectory_pb2.LINEAGE_SUB_AGENT, id="nothing has tools"),
    ],
)
def test_a_title_call_is_not_the_work_and_not_auxiliary_where_that_is_not_sure(
    works: RenderContext, titles: RenderContext, title_is: Lineage, order: str, turns: int
) -> None:
    world = World()
    if order == "title first":
        title(world, context=titles)
    work(world, turns, context=works)
    if order == "title last":
        title(world, context=titles)
    assert main_of(world) == ["done"]
    assert sorted(found(world)) == sorted([trajectory_pb2.LINEAGE_MAIN, title_is])
    world_trains = {t.lineage for t in world.export() if mask_of(t).any()}
    assert (title_is in world_trains) == (title_is != trajectory_pb2.LINEAGE_AUXILIARY)


def tool(name: str, *parameters: str) -> RenderContext:
    properties = {one: {"type": "string"} for one in parameters}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    function = {"name": name, "description": "Records it.", "parameters": schema}
    return make_context(json.dumps([{"type": "function", "function": function}]).encode(), b"")


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("works", [TOOLS, BARE], ids=["tools", "no tools"])
@pytest.mark.parametrize("order", ["title first", "title last"])
@pytest.mark.parametrize(
    "form",
    [tool("set_session_title", "text"), tool("respond", "title")],
    ids=["by its name", "by its parameter"],
)
def test_a_call_whose_only_tool_takes_a_title_is_auxiliary(
    form: RenderContext, works: RenderContext, order: str, turns: int
) -> None:
    world = World()
    if order == "title first":
        title(world, context=form)
    work(world, turns, context=works)
    if order == "title last":
        title(world, context=form)
    assert main_of(world) == ["done"]
    trained = {one.lineage: mask_of(one).any() for one in world.export()}
    assert trained == {
        trajectory_pb2.LINEAGE_MAIN: True,
        trajectory_pb2.LINEAGE_AUXILIARY: False,
    }


@pytest.mark.parametrize(
    "form",
    [tool("create_issue", "title", "body"), tool("report", "finding")],
    ids=["an issue", "a report"],
)
def test_a_call_whose_only_tool_takes_more_than_a_title_is_a_sub_agent(form: RenderContext) -> None:
    world = World()
    work(world, 2, context=TOOLS)
    title(world, context=form)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SUB_AGENT]
    assert all(mask_of(one).any() for one in world.export())


BRANCHES: dict[str, tuple[RenderContext, tuple[Message, ...]]] = {
    "MAIN_PATH": (TOOLS, (SYSTEM, user("go"), said(SUMMARY), user("on"))),
    "FINAL_ANSWER": (BARE, (SYSTEM, user("go"), said(SUMMARY), user("on"))),
    "OTHER_SAMPLE": (TOOLS, (SYSTEM, user("go"))),
    "OTHER_MESSAGE": (TOOLS, (SYSTEM, user("go"), said(SUMMARY), user("no"))),
    "SHARED_MESSAGES": (TOOLS, (SYSTEM, user("go"), said("My own words."), user("on"))),
    "OWN_ROOT": (TOOLS, (SYSTEM, user("A question."))),
    "PROBE": (TOOLS, (SYSTEM, user("A question."))),
    "WITHOUT_TOOLS": (BARE, (OTHER, user("A question."))),
    "TITLE_TOOL": (tool("respond", "title"), (OTHER, user("A question."))),
    "OTHER_SYSTEM": (TOOLS, (OTHER, user("A question."))),
    "OTHER_TOOLS": (OTHER_TOOLS, (SYSTEM, user("A question."))),
    "RECENT_ANSWER": (TOOLS, (SYSTEM, said(LAST), user("on"))),
    "QUOTED_ANSWER": (TOOLS, (SYSTEM, user(f"So far: {LAST}"))),
}
"""By rule: the context and the messages of a request beside a conversation of two turns."""


def test_every_rule_has_a_branch_here() -> None:
    assert (
        {trajectory_pb2.LineageRule.Value(f"LINEAGE_RULE_{one}") for one in BRANCHES}
        == {*RULES}
        == {one for one in trajectory_pb2.LineageRule.values() if one}
    )


@pytest.mark.parametrize("rule", BRANCHES)
def test_a_branch_names_the_rule_that_labelled_it(rule: str) -> None:
    world, (context, messages) = World(), BRANCHES[rule]
    begin = (SYSTEM, user("go"))
    world.turn(begin, said(SUMMARY), context=TOOLS)
    if rule not in {"MAIN_PATH", "FINAL_ANSWER"}:
        world.turn((*begin, said(SUMMARY), user("on")), said(LAST), context=TOOLS)
    length, stop = sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_STOP
    probes = rule == "PROBE"
    asked = world.turn(
        messages,
        said("Done."),
        context=context,
        finish=length if probes else stop,
        tokens=1 if probes else 3,
    )
    (own,) = (one for one in world.export() if one.leaf_node_id == asked.node_id)
    assert own.lineage_rule == trajectory_pb2.LineageRule.Value(f"LINEAGE_RULE_{rule}")
    assert own.lineage == RULES[own.lineage_rule]
    tree = trajectory_pb2.TrajectoryTree()
    for _ in pack_tree(world.tree, tree):
        pass
    packed = next(one for one in tree.nodes if one.node_id == asked.node_id)
    asked.stored = True
    (shown,) = write_nodes(world.tree, 0, with_messages=False)
    for one in (packed, shown):
        assert (one.lineage, one.lineage_rule) == (own.lineage, own.lineage_rule)


def test_a_sub_agent_that_takes_a_title_and_goes_on_is_trained() -> None:
    world = World()
    worked(world, 2)
    form, asked = tool("set_title", "title"), (OTHER, user("Write the report."))
    call = said("", ToolCall("c", "set_title", '{"title": "A"}'))
    world.turn(asked, call, context=form)
    answered = (*asked, call, Message("tool", "kept", tool_call_id="c"))
    world.turn(answered, said("The report."), context=form)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SUB_AGENT]


@pytest.mark.parametrize(
    ("beside", "marked"),
    [
        pytest.param(memory, trajectory_pb2.LINEAGE_AUXILIARY, id="memory calls of several turns"),
        pytest.param(memory, trajectory_pb2.LINEAGE_SUB_AGENT, id="a sub-agent"),
        pytest.param(title, trajectory_pb2.LINEAGE_AUXILIARY, id="title"),
        pytest.param(memory, trajectory_pb2.LINEAGE_COMPACTION, id="compaction"),
    ],
)
@pytest.mark.parametrize("order", ["first", "last"])
def test_the_lineage_given_by_a_request_wins(
    beside: Callable[..., None], marked: Lineage, order: str
) -> None:
    world = World()
    if order == "first":
        beside(world, context=TOOLS, marked=marked)
    work(world, 2)
    if order == "last":
        beside(world, context=TOOLS, marked=marked)
    assert main_of(world) == ["done"]
    assert sorted(found(world)) == sorted([trajectory_pb2.LINEAGE_MAIN, marked])
    trained = {one.lineage for one in world.export() if mask_of(one).any()}
    assert (marked in trained) == (marked != trajectory_pb2.LINEAGE_AUXILIARY)


def test_a_conversation_that_says_it_is_main_is() -> None:
    world = World()
    memory(world)
    work(world, 1, context=BARE, marked=trajectory_pb2.LINEAGE_MAIN)
    assert main_of(world) == ["done"]


@pytest.mark.parametrize("marked", [None, trajectory_pb2.LINEAGE_AUXILIARY])
def test_a_call_that_leaves_the_work_does_not_become_it(marked: Say) -> None:
    world = World()
    start = (SYSTEM, user(WORK))
    first = said("step", CALL)
    world.turn(start, first, context=TOOLS)
    world.turn((*start, first, user("Summarise.")), said("A summary"), context=TOOLS, said=marked)
    world.turn((*start, first, Message("tool", "r", tool_call_id="c")), said("done"), context=TOOLS)
    assert main_of(world) == ["done"]
    assert sorted(found(world)) == sorted(
        [trajectory_pb2.LINEAGE_MAIN, marked or trajectory_pb2.LINEAGE_BRANCH]
    )
    trained = [
        segment.node_id for one in world.export() for segment in one.segments if segment.trained
    ]
    assert len(trained) == len(set(trained)) == (2 if marked else 3)


def test_an_auxiliary_call_at_the_end_leaves_the_work_before_it_trained() -> None:
    world = World()
    start = (SYSTEM, user(WORK))
    world.turn(start, said("done"), context=TOOLS)
    after = (*start, said("done"), user("Summarise."))
    world.turn(after, said("A summary"), context=TOOLS, said=trajectory_pb2.LINEAGE_AUXILIARY)
    (trajectory,) = world.export()
    assert [one.trained for one in trajectory.segments if one.sampled] == [True, False]
    assert trajectory.lineage == trajectory_pb2.LINEAGE_MAIN


def summarise(world: World, before: tuple[Message, ...], summary: str) -> None:
    after = (*before[:-1], user("Summarise."))
    world.turn(after, said(summary), context=TOOLS, said=trajectory_pb2.LINEAGE_COMPACTION)


def test_a_summary_that_goes_on_from_the_work_does_not_take_its_place() -> None:
    world = World()
    before = worked(world, 3)
    summarise(world, before, "A summary")
    world.turn((SYSTEM, user("go"), user("A summary")), said("on"), context=TOOLS)
    main, after = world.export()
    assert (main.lineage, main.turns) == (trajectory_pb2.LINEAGE_MAIN, 4)
    assert (after.lineage, after.turns) == (trajectory_pb2.LINEAGE_COMPACTION, 1)
    assert all(one.trained for one in main.segments if one.sampled)


def test_of_two_summaries_one_goes_on_from_the_work() -> None:
    world = World()
    before = worked(world, 2)
    summarise(world, before, "A summary")
    summarise(world, before, "Another one")
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_COMPACTION]
    assert [mask_of(one).sum() for one in world.export()] == [12, 4]


def test_work_that_goes_on_after_a_summary_is_trained_as_work() -> None:
    world = World()
    before = worked(world, 2)
    summarise(world, before, "A summary")
    world.turn(before, said("more"), context=TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_COMPACTION, trajectory_pb2.LINEAGE_MAIN]
    assert [mask_of(one).sum() for one in world.export()] == [4, 12]


def test_the_conversation_that_continues_is_the_main_one() -> None:
    world = World()
    world.turn((user("first"),), said("once"))
    world.turn((user("second"),), said("A"))
    world.turn((user("second"), said("A"), user("on")), said("B"))
    assert main_of(world) == ["B"]


def test_a_probe_with_the_tools_and_system_message_of_the_work_is_auxiliary() -> None:
    world = World()
    worked(world, 2)
    cut = sampling_pb2.FINISH_REASON_LENGTH
    world.turn((SYSTEM, user("quota")), said("x"), context=TOOLS, finish=cut, tokens=1)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_AUXILIARY]


def test_a_conversation_with_tools_of_its_own_is_a_sub_agent() -> None:
    world = World()
    worked(world, 2)
    world.turn((SYSTEM, user("find it")), said("found"), context=OTHER_TOOLS)
    assert found(world) == [trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SUB_AGENT]


def test_the_branch_that_continues_is_the_main_branch() -> None:
    world = World()
    start = (SYSTEM, user(WORK))
    world.turn(start, said("step"), context=TOOLS)
    one, other = ((*start, said("step"), user(text)) for text in ("one", "other"))
    world.turn(one, said("once"), context=TOOLS)
    world.turn(other, said("A"), context=TOOLS)
    world.turn((*other, said("A"), user("on")), said("B"), context=TOOLS)
    assert main_of(world) == ["B"]
