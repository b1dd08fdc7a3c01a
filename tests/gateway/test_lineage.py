"""How branches are told apart: what agents do beside their work is kept, and not trained."""

import pytest

from rollmesh.gateway.fidelity import Fidelity, Finish, Lineage
from rollmesh.gateway.messages import Message
from tests.gateway.worlds import BARE, TOOLS, World, said, user

SYSTEM, OTHER = Message("system", "You work."), Message("system", "Write a title.")


def worked(world: World, turns: int, system: Message = SYSTEM) -> tuple[Message, ...]:
    """A main conversation with tools."""
    messages: tuple[Message, ...] = (system, user("go"))
    for at in range(turns):
        reply = said(f"step {at}")
        world.turn(messages, reply, frame=TOOLS)
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
    assert (title.lineage, main.lineage) == (Lineage.AUXILIARY, Lineage.MAIN)
    assert Fidelity.AUXILIARY in title.reasons
    assert not title.loss_mask.any()
    assert main.loss_mask.sum() == 8


def test_a_probe_of_one_token_is_auxiliary() -> None:
    world = World()
    worked(world, 1)
    world.turn((user("quota"),), said("x"), finish=Finish.LENGTH, tokens=1)
    assert found(world) == [Lineage.MAIN, Lineage.AUXILIARY]


def test_a_conversation_under_another_system_message_is_a_sub_agent() -> None:
    world = World()
    main = worked(world, 2)
    sub = (OTHER, user("find it"))
    world.turn(sub, said("looking"), frame=TOOLS)
    world.turn((*sub, said("looking"), user("and?")), said("found"), frame=TOOLS)
    world.turn(main, said("thanks"), frame=TOOLS)
    assert sorted(found(world)) == [Lineage.MAIN, Lineage.SUB_AGENT]


def test_a_history_begun_anew_is_a_compaction() -> None:
    world = World()
    worked(world, 3)
    summary = (SYSTEM, user("so far: much"))
    world.turn(summary, said("go on"), frame=TOOLS)
    world.turn((*summary, said("go on"), user("yes")), said("done"), frame=TOOLS)
    assert found(world) == [Lineage.MAIN, Lineage.COMPACTION]
    assert all(trajectory.loss_mask.any() for trajectory in world.export())


def test_an_edit_of_the_first_message_is_a_branch() -> None:
    world = World()
    worked(world, 1)
    world.turn((SYSTEM, user("stop")), said("ok"), frame=TOOLS)
    assert found(world) == [Lineage.MAIN, Lineage.BRANCH]


def test_a_second_conversation_of_an_agent_without_tools_is_a_root_and_trained() -> None:
    world = World()
    world.turn((user("a"),), said("A"), frame=BARE)
    world.turn((user("b"),), said("B"), frame=BARE)
    assert found(world) == [Lineage.MAIN, Lineage.ROOT]
    assert all(trajectory.loss_mask.any() for trajectory in world.export())
