"""Open sessions in a journal, turn by turn."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmesh.chat.canonical import make_context
from rollmesh.chat.messages import Message, RenderContext, ToolCall
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.spec import AnswerReceipt, SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.storage.transaction import Transaction
from rollmesh.mesh.generations.sampled import Tops
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import SessionClosedError
from rollmesh.runtime.statements import Row
from rollmesh.v1 import sampling_pb2, trajectory_pb2

_ALL = 2**62
_OPEN = (
    "NOT EXISTS (SELECT 1 FROM outbox o WHERE o.session_id = s.session_id)"
    " AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.session_id = s.session_id)"
)


@dataclass(slots=True)
class StoredSession:
    """A session as read back from the journal."""

    spec: SessionSpec
    tree: Tree
    answers: dict[int, AnswerReceipt] = field(default_factory=dict)
    """Records of answered turns by node id, oldest first."""
    sent: frozenset[int] = frozenset()
    """Node ids of the answers that were recorded as sent."""


def insert_session(tx: Transaction, spec: SessionSpec) -> None:
    """Stores a new session.

    Raises:
        SessionClosedError: The request id opened a session that is closed and still remembered.
    """
    known = "SELECT session_id FROM closes WHERE journal = ?1 AND request_id = ?2"
    for (session_id,) in tx.db.rows(known, tx.journal_id, spec.request_id):
        raise SessionClosedError(
            f"request_id: {spec.request_id!r} belongs to session {session_id}, which is closed; "
            "give a new one to open another session",
            session_id=session_id,
        )
    tx.db.run(
        "INSERT INTO sessions (journal, session_id, request_id, spec) VALUES (?1, ?2, ?3, ?4)",
        tx.journal_id,
        spec.session_id,
        spec.request_id or None,
        json.dumps(dataclasses.asdict(spec)),
    )


def insert_turn(tx: Transaction, session_id: str, nodes: list[Node], answer: AnswerReceipt) -> None:
    """Stores those nodes of a turn that are not stored yet; the last one is the sampled node."""
    context = nodes[-1].render_context
    tx.db.run(
        "INSERT INTO contexts (journal, context_key, tools_json, options_json)"
        " VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING",
        tx.journal_id,
        context.key,
        context.tools_json,
        context.options_json,
    )
    tx.db.run(
        "INSERT INTO session_contexts (session_id, context_key, journal) VALUES (?1, ?2, ?3)"
        " ON CONFLICT DO NOTHING",
        session_id,
        context.key,
        tx.journal_id,
    )
    text = json.dumps(dataclasses.asdict(answer))
    answers = [*[None] * (len(nodes) - 1), text]
    tx.db.run_many(
        "INSERT INTO nodes (session_id, node_id, parent_id, context_key, messages, token_ids,"
        " scaffold, reasons, sample, logprobs, tops, answer)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12) ON CONFLICT DO NOTHING",
        [(session_id, *_node_row(node), said) for node, said in zip(nodes, answers, strict=True)],
    )


def insert_sent(tx: Transaction, answers: Iterable[tuple[str, int]]) -> None:
    """Stores that answers were sent completely; takes the session id and node id of each."""
    tx.db.run_many(
        "INSERT INTO sent (session_id, node_id) VALUES (?1, ?2) ON CONFLICT DO NOTHING", answers
    )


def update_reasons(tx: Transaction, session_id: str, node: Node) -> None:
    """Stores the current fidelity reasons of a node."""
    tx.db.run(
        "UPDATE nodes SET reasons = ?1 WHERE session_id = ?2 AND node_id = ?3",
        json.dumps(sorted(node.reasons)),
        session_id,
        node.node_id,
    )


def read_open(
    tx: Transaction, new_tree: Callable[[], Tree]
) -> tuple[list[StoredSession], dict[str, str]]:
    """Rebuilds all open sessions exactly.

    Returns:
        The sessions, and the error message of each session that cannot be read, by session id.
    """
    sessions: list[StoredSession] = []
    damaged: dict[str, str] = {}
    ids = tx.db.rows(
        f"SELECT session_id FROM sessions s WHERE journal = ?1 AND {_OPEN} ORDER BY n",  # noqa: S608
        tx.journal_id,
    )
    for (session_id,) in ids:
        try:
            sessions.append(read_session(tx, session_id, new_tree))
        except DamagedSessionError as error:
            damaged[session_id] = str(error)
    return sessions, damaged


def count_kept(tx: Transaction) -> int:
    """Returns the number of open sessions, including those that were set aside."""
    return int(
        tx.db.value(
            "SELECT count(*) FROM sessions s WHERE journal = ?1"
            " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.session_id = s.session_id)",
            tx.journal_id,
        )
    )


def read_session(tx: Transaction, session_id: str, new_tree: Callable[[], Tree]) -> StoredSession:
    """Rebuilds one session exactly.

    Raises:
        DamagedSessionError: The session's data in the journal is damaged.
        RollmeshError: The journal cannot be read now.
    """
    with damage(tx):
        stored = StoredSession(SessionSpec(**json.loads(spec_row(tx, session_id))), new_tree())
        contexts = read_contexts(tx, session_id)
        for row in read_nodes(tx, session_id):
            attach_row(stored, row, contexts)
        sent = tx.db.rows("SELECT node_id FROM sent WHERE session_id = ?1", session_id)
        stored.sent = frozenset(node_id for (node_id,) in sent)
    return stored


class DamagedSessionError(Exception):
    """The data of a session in the journal is damaged; the message says how."""


@contextmanager
def damage(tx: Transaction) -> Iterator[None]:
    """Within the block, an error means that a session's data is damaged, unless the store failed.

    Raises:
        DamagedSessionError: The data cannot be read.
    """
    try:
        yield
    except tx.db.failures:
        raise
    except Exception as error:
        raise DamagedSessionError(f"{type(error).__name__}: {error}") from error


def spec_row(tx: Transaction, session_id: str) -> str:
    """Returns the settings with which a session was created, as they are stored."""
    return str(tx.db.value("SELECT spec FROM sessions WHERE session_id = ?1", session_id))


def read_contexts(tx: Transaction, session_id: str) -> dict[bytes, RenderContext]:
    """Returns the render contexts of a session by their keys."""
    rows = tx.db.rows(
        "SELECT c.context_key, c.tools_json, c.options_json FROM session_contexts s"
        " JOIN contexts c ON c.journal = s.journal AND c.context_key = s.context_key"
        " WHERE s.session_id = ?1",
        session_id,
    )
    return {key: make_context(tools, options) for key, tools, options in rows}


def read_nodes(tx: Transaction, session_id: str, after: int = 0, limit: int = _ALL) -> list[Row]:
    """Returns rows of a session's nodes, parents first, for `attach_row`.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        after: First column of the last row that was read; 0 starts from the beginning.
        limit: Maximum number of rows.
    """
    return tx.db.rows(
        "SELECT n, node_id, parent_id, context_key, messages, token_ids, scaffold, reasons,"
        " sample, logprobs, tops, answer FROM nodes WHERE session_id = ?1 AND n > ?2"
        " ORDER BY n LIMIT ?3",
        session_id,
        after,
        limit,
    )


def _node_row(node: Node) -> tuple[object, ...]:
    assert node.parent is not None
    sample, logprobs, tops = None, None, None
    if node.sample is not None:
        sample = json.dumps(
            [
                [
                    (one.policy_version, one.start, one.end, one.engine_id)
                    for one in node.sample.spans
                ],
                int(node.sample.finish),
                node.sample.prompt_tokens,
                node.sample.cached_tokens,
                node.sample.prompt_crc32,
            ]
        )
        logprobs = pack_logprobs(node.sample.logprobs)
        if node.sample.tops is not None:
            tops = pack_ids(node.sample.tops.ids) + pack_logprobs(node.sample.tops.logprobs)
    return (
        node.node_id,
        node.parent.node_id,
        node.render_context.key,
        json.dumps([dataclasses.asdict(message) for message in node.messages]),
        pack_ids(node.token_ids),
        node.scaffold_tokens,
        json.dumps(sorted(node.reasons)),
        sample,
        logprobs,
        tops,
    )


def attach_row(stored: StoredSession, row: Any, contexts: dict[bytes, RenderContext]) -> None:
    """Attaches the node of a row to the tree of its session."""
    _, node_id, parent_id, key, messages, ids, scaffold, reasons, *sampled, answer = row
    context = contexts[key]
    token_ids = np.array(unpack_ids(ids, "token_ids"))
    stored.tree.attach(
        Node(
            node_id,
            stored.tree.nodes[parent_id] if parent_id else stored.tree.root(context),
            context,
            tuple(_message(fields) for fields in json.loads(messages)),
            token_ids,
            scaffold,
            sample=_sample(token_ids[scaffold:], *sampled) if sampled[0] else None,
            reasons=frozenset(
                _known(trajectory_pb2.FidelityReason, one) for one in json.loads(reasons)
            ),
            stored=True,
        )
    )
    if answer:
        receipt = stored.answers[node_id] = AnswerReceipt(**json.loads(answer))
        stored.tree.nodes[node_id].said = (
            _known(trajectory_pb2.Lineage, receipt.lineage) if receipt.lineage else None
        )


def _known(enum: Any, number: Any) -> Any:
    """Returns the number of an enum value.

    Raises:
        ValueError: The enum has no such number, so the row is damaged.
    """
    enum.Name(number)
    return number


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
    return Message(**fields, tool_calls=calls)


def _sample(token_ids: Any, text: str, logprobs: bytes, tops: bytes | None) -> Sample:
    spans, finish, prompt_tokens, cached_tokens, prompt_crc32 = json.loads(text)
    return Sample(
        token_ids,
        unpack_logprobs(logprobs, "logprobs"),
        tuple(
            sampling_pb2.VersionSpan(
                policy_version=version, start=start, end=end, engine_id=engine_id
            )
            for version, start, end, engine_id in spans
        ),
        _known(sampling_pb2.FinishReason, finish),
        prompt_tokens,
        cached_tokens,
        prompt_crc32,
        None if tops is None else _tops(tops, len(token_ids)),
    )


def _tops(data: bytes, tokens: int) -> Tops:
    half, rows = len(data) // 2, max(tokens, 1)
    ids, logprobs = unpack_ids(data[:half], "tops"), unpack_logprobs(data[half:], "tops")
    width = len(ids) // rows
    return Tops(ids.reshape(tokens, width), logprobs.reshape(tokens, width))
