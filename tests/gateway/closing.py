"""Sessions that are closed in a journal, without a gateway."""

from collections.abc import Sequence

from rollmesh.gateway import (
    AnswerReceipt,
    Session,
    SessionSpec,
    Transaction,
    Tree,
    blobs_of,
    check_close,
    close_session,
    insert_sent,
    insert_session,
    insert_turn,
    serialize,
    stored_close,
    write_head,
)
from rollmesh.v1 import collector_pb2, gateway_pb2, session_pb2
from tests.gateway.worlds import END, World, said, user

COMPLETED = gateway_pb2.CloseSessionRequest(outcome=session_pb2.SESSION_OUTCOME_COMPLETED)


def new_tree() -> Tree:
    return Tree(frozenset({END}))


def write_open(tx: Transaction, spec: SessionSpec, tree: Tree) -> None:
    """Writes a session as its turns would have been committed and their answers sent."""
    insert_session(tx, spec)
    insert_sent(tx, [(spec.session_id, node_id) for node_id in tree.nodes])
    for node in tree.nodes.values():
        answer = AnswerReceipt(f"a{node.node_id}", "f", "", 0)
        insert_turn(tx, spec.session_id, [node], answer)


def write_closed(
    tx: Transaction,
    spec: SessionSpec,
    tree: Tree,
    size: int | None = None,
    *,
    with_head: bool = True,
) -> None:
    """Writes a session, and its close. `size` is what its record is said to have.

    Without a head the record is written when it is sent, as after a close that took too long.
    """
    write_open(tx, spec, tree)
    session = Session(spec, tree)
    stored = COMPLETED.SerializeToString()
    if with_head:
        stored = stored_close(session, COMPLETED, 1)
    close_session(tx, session, stored, b"", 1, check_close(session, COMPLETED.rewards), [])
    if size is not None:
        tx.db.run("UPDATE outbox SET bytes = ?1 WHERE session_id = ?2", size, spec.session_id)


def write_small(
    tx: Transaction, names: Sequence[str], size: int | None = None, *, with_head: bool = True
) -> None:
    """Writes closed sessions of one turn each."""
    for name in names:
        world = World()
        world.turn((user("x"),), said("A"))
        write_closed(tx, SessionSpec(name, 0), world.tree, size, with_head=with_head)


def mark_delivered(tx: Transaction, names: Sequence[str]) -> None:
    """Marks closed sessions as the outbox does once the collector has them."""
    for name in names:
        tx.db.run("UPDATE outbox SET state = 1 WHERE session_id = ?1", name)


def write_record(
    spec: SessionSpec,
    tree: Tree,
    request: gateway_pb2.CloseSessionRequest,
    closed_unix_ms: int,
) -> session_pb2.SessionRecord:
    """Returns the record of a session, as the collector gets it."""
    head = write_head(spec, tree, request, closed_unix_ms)
    sent = collector_pb2.IngestRequest.FromString(serialize(head, blobs_of(tree)))
    return sent.sessions[0]
