"""Sessions that are closed in a journal, without a gateway."""

from collections.abc import Sequence

from rollmesh.gateway.conversation.session import Session
from rollmesh.gateway.conversation.spec import AnswerReceipt, SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.export.record import record_bytes, trajectory_ends
from rollmesh.gateway.storage import closed, journal
from rollmesh.gateway.storage.closed import Close
from rollmesh.gateway.storage.transaction import Transaction
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.gateway.worlds import END, World, said, user

COMPLETED = gateway_pb2.CloseSessionRequest(outcome=session_pb2.SESSION_OUTCOME_COMPLETED)


def new_tree() -> Tree:
    return Tree(frozenset({END}))


def write_open(tx: Transaction, spec: SessionSpec, tree: Tree) -> None:
    """Writes a session as its turns would have been committed and their answers sent."""
    journal.insert_session(tx, spec)
    journal.insert_sent(tx, [(spec.session_id, node_id) for node_id in tree.nodes])
    for node in tree.nodes.values():
        answer = AnswerReceipt(f"a{node.node_id}", "f", "", 0)
        journal.insert_turn(tx, spec.session_id, [node], answer)


def write_closed(tx: Transaction, spec: SessionSpec, tree: Tree, size: int | None = None) -> None:
    """Writes a session, and its close; `size` is what its record is said to have."""
    write_open(tx, spec, tree)
    session = Session(spec, tree)
    close = Close(
        spec.session_id,
        COMPLETED.SerializeToString(),
        b"",
        1,
        record_bytes(session) if size is None else size,
        trajectory_ends(session),
        [],
    )
    closed.close_session(tx, close)


def write_small(tx: Transaction, names: Sequence[str], size: int | None = None) -> None:
    """Writes closed sessions of one turn each."""
    for name in names:
        world = World()
        world.turn((user("x"),), said("A"))
        write_closed(tx, SessionSpec(name, 0), world.tree, size)
