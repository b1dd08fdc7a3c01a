"""The gateway's journal: open sessions turn by turn, closed ones until they are delivered."""

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollmesh.chat.canonical import make_context
from rollmesh.chat.messages import Message, RenderContext, ToolCall
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.spec import AnswerReceipt, SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.mesh.generations.sampled import Tops
from rollmesh.runtime.codec.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import SessionClosedError
from rollmesh.v1 import sampling_pb2, trajectory_pb2

SCHEMA_VERSION = 11  # incremented with every change of the schema and of the values in it
SCHEMA = """
CREATE TABLE IF NOT EXISTS model (tokenizer_sha256 TEXT NOT NULL, template_sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, request_id TEXT UNIQUE, spec TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS contexts (
  context_key BLOB PRIMARY KEY, tools_json BLOB NOT NULL, options_json BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS session_contexts (
  session_id TEXT NOT NULL, context_key BLOB NOT NULL, PRIMARY KEY (session_id, context_key));
CREATE INDEX IF NOT EXISTS sessions_of_contexts ON session_contexts (context_key);
CREATE TABLE IF NOT EXISTS nodes (
  session_id TEXT NOT NULL, node_id INTEGER NOT NULL, parent_id INTEGER NOT NULL,
  context_key BLOB NOT NULL, messages TEXT NOT NULL, token_ids BLOB NOT NULL,
  scaffold INTEGER NOT NULL, reasons TEXT NOT NULL, sample TEXT, logprobs BLOB, tops BLOB,
  answer TEXT, PRIMARY KEY (session_id, node_id));
CREATE INDEX IF NOT EXISTS nodes_in_order ON nodes (session_id);
CREATE TABLE IF NOT EXISTS sent (
  session_id TEXT NOT NULL, node_id INTEGER NOT NULL, PRIMARY KEY (session_id, node_id))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS closes (
  n INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT UNIQUE NOT NULL, request_id TEXT,
  leaves BLOB NOT NULL, digest BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS closes_by_request ON closes (request_id);
CREATE TABLE IF NOT EXISTS outbox (
  n INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT UNIQUE NOT NULL, request BLOB NOT NULL,
  closed_unix_ms INTEGER NOT NULL, bytes INTEGER NOT NULL, state INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS outbox_states ON outbox (state, n);
CREATE TABLE IF NOT EXISTS dead_letters (
  n INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT UNIQUE NOT NULL, reason INTEGER NOT NULL,
  message TEXT NOT NULL, unix_ms INTEGER NOT NULL);
"""
_OPEN = (
    "session_id NOT IN (SELECT session_id FROM outbox)"
    " AND session_id NOT IN (SELECT session_id FROM dead_letters)"
)


class ModelFiles(NamedTuple):
    """The files that determine a conversation's token ids; SHA-256 of each, hexadecimal."""

    tokenizer_sha256: str
    template_sha256: str


class OtherModelError(Exception):
    """The journal has open sessions of another model."""

    def __init__(self, found: ModelFiles, open_sessions: int) -> None:
        """Takes the journal's model and the number of its open sessions."""
        super().__init__(found, open_sessions)
        self.found = found
        self.open_sessions = open_sessions


@dataclass(slots=True)
class StoredSession:
    """A session as read back from the journal."""

    spec: SessionSpec
    tree: Tree
    answers: dict[int, AnswerReceipt] = field(default_factory=dict)
    """Records of answered turns by node id, oldest first."""
    sent: frozenset[int] = frozenset()
    """Node ids of the answers that were recorded as sent."""


def keep_secret(db: sqlite3.Connection, fresh: bytes) -> bytes:
    """Returns the secret of the session keys; stores `fresh` as the secret if there is none yet."""
    return _kept(db, "session keys", fresh)


def keep_id(db: sqlite3.Connection, fresh: str) -> str:
    """Returns the journal's id; stores `fresh` as its id if it has none yet."""
    return _kept(db, "journal id", fresh.encode()).decode()


def _kept(db: sqlite3.Connection, name: str, fresh: bytes) -> bytes:
    db.execute("INSERT OR IGNORE INTO identity VALUES (?, ?)", (name, fresh))
    row = db.execute("SELECT value FROM identity WHERE name = ?", (name,)).fetchone()
    return bytes(row[0])


def adopt_model(db: sqlite3.Connection, model: ModelFiles) -> None:
    """Stores the model of the open sessions; with no open session, any model may be stored.

    An open session that was set aside counts, because it is served again once it is retried.

    Raises:
        OtherModelError: The open sessions belong to another model, so their ids have another
            meaning.
    """
    row = db.execute("SELECT tokenizer_sha256, template_sha256 FROM model").fetchone()
    if row is not None and ModelFiles(*row) == model:
        return
    (count,) = db.execute(
        "SELECT count(*) FROM sessions WHERE session_id NOT IN (SELECT session_id FROM outbox)"
    ).fetchone()
    if row is not None and count:
        raise OtherModelError(ModelFiles(*row), count)
    db.execute("DELETE FROM model")
    db.execute("INSERT INTO model VALUES (?, ?)", model)


def insert_session(db: sqlite3.Connection, spec: SessionSpec) -> None:
    """Stores a new session.

    Raises:
        SessionClosedError: The request id opened a session that is closed and still remembered.
    """
    known = "SELECT session_id FROM closes WHERE request_id = ?"
    for (session_id,) in db.execute(known, (spec.request_id,)):
        raise SessionClosedError(
            f"request_id: {spec.request_id!r} belongs to session {session_id}, which is closed; "
            "give a new one to open another session",
            session_id=session_id,
        )
    db.execute(
        "INSERT INTO sessions (session_id, request_id, spec) VALUES (?, ?, ?)",
        (spec.session_id, spec.request_id or None, json.dumps(dataclasses.asdict(spec))),
    )


def insert_turn(
    db: sqlite3.Connection, session_id: str, nodes: list[Node], answer: AnswerReceipt
) -> None:
    """Stores those nodes of a turn that are not stored yet; the last one is the sampled node."""
    context = nodes[-1].render_context
    db.execute(
        "INSERT OR IGNORE INTO contexts VALUES (?, ?, ?)",
        (context.key, context.tools_json, context.options_json),
    )
    db.execute("INSERT OR IGNORE INTO session_contexts VALUES (?, ?)", (session_id, context.key))
    for node in nodes:
        text = json.dumps(dataclasses.asdict(answer)) if node is nodes[-1] else None
        row = (session_id, *_node_row(node), text)
        db.execute("INSERT OR IGNORE INTO nodes VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", row)


def insert_sent(db: sqlite3.Connection, answers: Iterable[tuple[str, int]]) -> None:
    """Stores that answers were sent completely; takes the session id and node id of each."""
    db.executemany("INSERT OR IGNORE INTO sent VALUES (?, ?)", answers)


def update_reasons(db: sqlite3.Connection, session_id: str, node: Node) -> None:
    """Stores the current fidelity reasons of a node."""
    db.execute(
        "UPDATE nodes SET reasons = ? WHERE session_id = ? AND node_id = ?",
        (json.dumps(sorted(node.reasons)), session_id, node.node_id),
    )


def read_open(
    db: sqlite3.Connection, new_tree: Callable[[], Tree]
) -> tuple[list[StoredSession], dict[str, str]]:
    """Rebuilds all open sessions exactly.

    Returns:
        The sessions, and the error message of each session that cannot be read, by session id.
    """
    sessions: list[StoredSession] = []
    damaged: dict[str, str] = {}
    ids = db.execute(f"SELECT session_id FROM sessions WHERE {_OPEN} ORDER BY rowid").fetchall()  # noqa: S608
    for (session_id,) in ids:
        try:
            sessions.append(read_session(db, session_id, new_tree))
        except DamagedSessionError as error:
            damaged[session_id] = str(error)
    return sessions, damaged


def read_session(
    db: sqlite3.Connection, session_id: str, new_tree: Callable[[], Tree]
) -> StoredSession:
    """Rebuilds one session exactly.

    Raises:
        DamagedSessionError: The session's data in the journal is damaged.
    """
    try:
        stored = StoredSession(read_spec(db, session_id), new_tree())
        contexts = read_contexts(db, session_id)
        for row in read_nodes(db, session_id):
            attach_row(stored, row, contexts)
        stored.sent = _read_sent(db, session_id)
    except Exception as error:
        raise DamagedSessionError(f"{type(error).__name__}: {error}") from error
    return stored


class DamagedSessionError(Exception):
    """The data of a session in the journal is damaged; the message says how."""


def read_spec(db: sqlite3.Connection, session_id: str) -> SessionSpec:
    """Returns the settings with which a session was created."""
    row = db.execute("SELECT spec FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return SessionSpec(**json.loads(row[0]))


def read_contexts(db: sqlite3.Connection, session_id: str) -> dict[bytes, RenderContext]:
    """Returns the render contexts of a session by their keys."""
    rows = db.execute(
        "SELECT context_key, tools_json, options_json FROM session_contexts JOIN contexts"
        " USING (context_key) WHERE session_id = ?",
        (session_id,),
    )
    return {key: make_context(tools, options) for key, tools, options in rows}


def read_nodes(
    db: sqlite3.Connection, session_id: str, after: int = 0, limit: int = -1
) -> list[Any]:
    """Returns rows of a session's nodes, parents first, for `attach_row`.

    Args:
        db: The journal.
        session_id: Id of the session.
        after: First column of the last row that was read; 0 starts from the beginning.
        limit: Maximum number of rows; -1 returns all.
    """
    return db.execute(
        "SELECT rowid, node_id, parent_id, context_key, messages, token_ids, scaffold, reasons,"
        " sample, logprobs, tops, answer FROM nodes INDEXED BY nodes_in_order"
        " WHERE session_id = ? AND rowid > ? ORDER BY rowid LIMIT ?",
        (session_id, after, limit),
    ).fetchall()


def _read_sent(db: sqlite3.Connection, session_id: str) -> frozenset[int]:
    rows = db.execute("SELECT node_id FROM sent WHERE session_id = ?", (session_id,))
    return frozenset(node_id for (node_id,) in rows)


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
