"""The messages of a record: each node's once, and a path's exactly as the session has them."""

import pytest

from rollmesh.chat import Image, Message, ToolCall
from rollmesh.gateway import SessionSpec
from rollmesh.runtime.codec import check_session, conversation_of
from rollmesh.v1 import session_pb2
from tests.gateway.closing import COMPLETED, write_record
from tests.gateway.worlds import BARE, TOOLS, World, random_world, said, user

CALL = ToolCall("c1", "f", '{"a":  1}')
RESULT = Message("tool", "one", tool_call_id="c1")


def recorded(world: World, most: int = 1 << 20) -> session_pb2.SessionRecord:
    spec = SessionSpec("s", 0, message_bytes=most)
    record = write_record(spec, world.tree, COMPLETED, 1)
    check_session(record, "session")
    return record


def test_a_path_has_each_message_once_as_it_was_sent_and_sampled() -> None:
    world, image = World(), Image(3, "ab" * 32, 4, 4)
    asked = Message("user", "seething", images=(image,))
    world.turn((asked,), Message("assistant", " A ", (CALL,), reasoning="why"), context=TOOLS)
    echo = said("A", CALL)  # stripped, and without its reasoning
    world.turn((asked, echo, RESULT), said("B"), context=TOOLS)
    record = recorded(world)
    (trajectory,) = record.trajectories
    found = conversation_of(record, trajectory.leaf_node_id)
    assert found is not None
    assert found.messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": f"sha256:{'ab' * 32}"}},
                {"type": "text", "text": "thing"},
            ],
        },
        {
            "role": "assistant",
            "content": " A ",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": CALL.arguments},
                }
            ],
            "reasoning_content": "why",
        },
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "assistant", "content": "B"},
    ]
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]
    assert [*dict.fromkeys(found.node_ids)] == [one.node_id for one in record.messages]


def test_other_tools_are_another_context_and_no_tools_are_none() -> None:
    world = World()
    for context in (TOOLS, BARE, TOOLS):
        world.turn((user("x"),), said("A"), context=context)
    record = recorded(world)
    assert len(record.contexts) == 1
    tools = [conversation_of(record, one.leaf_node_id).tools for one in record.trajectories]  # type: ignore[union-attr]
    assert [len(one) for one in tools] == [1, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_every_path_of_a_random_tree_is_in_the_record(seed: int) -> None:
    world = random_world(seed, 30)
    record = recorded(world)
    for trajectory in record.trajectories:
        found = conversation_of(record, trajectory.leaf_node_id)
        path = world.tree.nodes[trajectory.leaf_node_id].path()
        assert found is not None
        assert [one["content"] for one in found.messages] == [
            message.content for node in path for message in node.messages
        ]


def test_messages_beyond_the_limit_are_left_out_and_counted() -> None:
    world = World()
    world.turn((user("x"),), said("A"))
    world.turn((user("x"), said("A"), user("y" * 100)), said("B"))
    world.turn((user("z"),), said("C"))
    whole = recorded(world)
    size = sum(one.data_bytes for one in whole.messages[:2])
    record = recorded(world, size)
    assert (len(record.messages), record.messages_left_out) == (2, 4)
    assert all(conversation_of(record, one.leaf_node_id) is None for one in record.trajectories)
    assert [*record.trajectories] == [*whole.trajectories]  # no token is lost


def test_a_session_that_does_not_record_messages_has_none() -> None:
    record = write_record(SessionSpec("s", 0), random_world(1, 9).tree, COMPLETED, 1)
    assert [*record.messages, *record.contexts] == []
    assert record.messages_left_out == 0
