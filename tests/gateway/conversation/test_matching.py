"""Searches from where an earlier request led. `World` compares each with one from the root."""

import random

import pytest

from rollmesh.chat import Message, ToolCall, exact_key
from rollmesh.gateway import Tree
from tests.gateway.worlds import BARE, END, TOOLS, World, said, user

THOUGHT = "because"


def thought(text: str) -> Message:
    return Message("assistant", text, reasoning=THOUGHT)


def test_a_turn_compares_as_many_messages_at_the_end_of_a_long_session_as_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[int] = []

    def counted(group: tuple[Message, ...], *, call_ids: bool) -> bytes:
        digested[-1] += 1
        return exact_key(group, call_ids=call_ids)

    monkeypatch.setattr("rollmesh.gateway.tree.exact_key", counted)
    tree = Tree(frozenset({END}))
    history: tuple[Message, ...] = (user("q"),)
    world = World(tree)
    for at in range(60):
        digested.append(0)
        groups = [(message,) for message in history]
        earlier = repr(history[:-2]).encode()
        match, bookmark = tree.search(tree.start(BARE, groups, earlier), groups)
        assert match.depth == len(groups) - 1 or not at
        tree.keep(BARE, repr(history).encode(), bookmark)
        monkeypatch.setattr("rollmesh.gateway.tree.exact_key", exact_key)
        world.turn(history, thought(f"A{at}"))
        monkeypatch.setattr("rollmesh.gateway.tree.exact_key", counted)
        history = (*history, said(f"A{at}"), user("on"))  # agents drop the reasoning
    assert max(digested) <= 2


def step(dice: random.Random, history: tuple[Message, ...]) -> tuple[Message, ...]:
    """A request after another one: it goes on, repeats it, edits it, or answers a call."""
    kind = dice.choice(["on", "on", "again", "back", "results", "other"])
    if kind == "back":
        history = history[: dice.randrange(len(history) + 1)]
    if kind == "results" and history:
        results = [
            Message("tool", dice.choice("rs"), tool_call_id=dice.choice(["one", "two", ""]))
            for _ in range(dice.randint(1, 2))
        ]
        return (*history, *results)
    if kind == "again" and history:
        return history
    return (*history, user(dice.choice("xy")))


def reply(dice: random.Random) -> Message:
    calls = (ToolCall(dice.choice(["one", "two"]), "f", dice.choice(["{}", '{"a": 1}', "{"])),)
    return Message(
        "assistant",
        dice.choice(["", "A", " A"]),
        calls if dice.random() < 0.5 else (),
        reasoning=dice.choice(["", THOUGHT, "else"]),
    )


def echo(dice: random.Random, message: Message) -> Message:
    """What an agent makes of an answer."""
    calls = tuple(
        ToolCall(dice.choice([call.id, "own"]), call.name, dice.choice([call.arguments, "{}"]))
        for call in message.tool_calls
    )
    reasoning = dice.choice(["", message.reasoning])
    return Message("assistant", dice.choice([message.content, "A"]), calls, reasoning=reasoning)


@pytest.mark.parametrize("call_ids", [True, False], ids=["ids printed", "ids not printed"])
def test_where_an_earlier_request_led_is_where_a_search_from_the_root_leads(
    *, call_ids: bool
) -> None:
    used = 0
    for seed in range(80):
        dice = random.Random(seed)
        world = World(Tree(frozenset({END}), call_ids=call_ids))
        histories: list[tuple[Message, ...]] = [()]
        for _ in range(14):
            messages = step(dice, dice.choice(histories[-3:]))
            context = BARE if dice.random() < 0.9 else TOOLS
            node = world.turn(messages, reply(dice), context=context)
            if dice.random() < 0.15:  # the journal could not store it
                world.tree.detach(node)
                world.seen.pop(node.node_id)
                continue
            histories.append((*messages, echo(dice, node.messages[0])))
        used += world.bookmarked
        world.check()
    assert used > 200


def test_an_equal_sample_that_was_passed_over_counts_once_it_goes_on() -> None:
    world = World()
    one, two, own = (said("", ToolCall(name, "f", "{}")) for name in ("one", "two", "own"))
    for sampled in (one, two):
        world.turn((user("q"),), sampled)
    world.turn((user("q"), own, user("x")), said("B"))
    world.turn((user("q"), own, user("x")), said("C"))
    newest = world.turn((user("q"), one, user("x")), said("B"))
    last = world.turn((user("q"), own, user("x"), said("B"), user("on")), said("D"))
    assert newest in last.path()
    assert world.bookmarked
