import pytest

from rollmesh.chat.messages import Message, ToolCall
from rollmesh.gateway.conversation.reasons import Fidelity
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.v1 import trajectory_pb2
from tests.gateway.worlds import END, World, said, user

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
