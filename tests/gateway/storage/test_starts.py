"""Contexts in journals of both kinds: with their session at once, and back after a takeover."""

import numpy as np
import pytest

from rollmesh.chat import Message, group_messages
from rollmesh.gateway import (
    Node,
    SessionSpec,
    Transaction,
    export_tree,
    insert_session,
    insert_turn,
    new_root,
    read_open,
)
from rollmesh.v1 import trajectory_pb2
from tests.gateway.closing import new_tree
from tests.gateway.journals import Opened
from tests.gateway.worlds import TOOLS, said, user

IMPORTED = trajectory_pb2.FIDELITY_REASON_IMPORTED


def context() -> list[Node]:
    """A path whose ids do not ascend, as turns reserve theirs before their messages get theirs."""
    parent, nodes = new_root(TOOLS), list[Node]()
    for node_id, message in ((7, user("q")), (3, said(" A ")), (9, user("r"))):
        ids = np.arange(node_id, node_id + 4, dtype=np.uint32)
        reasons = frozenset({IMPORTED}) if message.role == "assistant" else frozenset()
        parent = Node(node_id, parent, TOOLS, (message,), ids, len(ids), reasons=reasons)
        nodes.append(parent)
    return nodes


async def test_a_context_is_back_with_its_session_and_an_echo_continues_it(opened: Opened) -> None:
    spec, nodes = SessionSpec("s", 5, origin='{"templateUnixMs": "3"}'), context()

    def write(tx: Transaction) -> None:
        insert_session(tx, spec)
        insert_turn(tx, "s", nodes, None)

    def fail(tx: Transaction) -> None:
        insert_session(tx, SessionSpec("t", 5))
        insert_turn(tx, "t", nodes, None)
        raise RuntimeError("killed")

    async with opened() as journal_:
        await journal_.run(write)
        with pytest.raises(RuntimeError, match="killed"):
            await journal_.run(fail)
        sessions, damaged = await journal_.read(lambda tx: read_open(tx, new_tree))
    (session,) = sessions
    assert not damaged
    assert session.spec.template_unix_ms == 3
    tree = session.tree
    assert [(one.node_id, one.was_sampled, one.stored) for one in tree.nodes.values()] == [
        (7, False, True), (3, True, True), (9, False, True),
    ]  # fmt: skip
    assert (tree.turns, tree.sampled_tokens, tree.tokens) == (0, 0, 12)
    assert tree.reserve_id() == 10
    assert not [*export_tree(tree, "s")]
    groups = group_messages((user("q"), Message("assistant", "A"), user("r")))
    match, _ = tree.search(tree.start(TOOLS, groups), groups)
    assert (match.node.node_id, match.depth) == (9, 3)
    assert match.reasons == {trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO}
