"""The gateway's journal: open sessions turn by turn, closed ones until the collector has them."""

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollmesh.gateway.canonical import make_frame
from rollmesh.gateway.fidelity import ExportMode, Fidelity, Finish, Lineage
from rollmesh.gateway.messages import Message, ToolCall
from rollmesh.gateway.sampled import Tops
from rollmesh.gateway.tree import Node, Sample, Tree, VersionSpan
from rollmesh.runtime.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import SessionClosedError

SCHEMA_VERSION = 5  # counts up with every change of what is below
SCHEMA = """
CREATE TABLE IF NOT EXISTS model (tokenizer_sha256 TEXT NOT NULL, template_sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, request_id TEXT UNIQUE, spec TEXT NOT NULL, trajectory_ids TEXT);
CREATE TABLE IF NOT EXISTS frames (
  frame_key BLOB PRIMARY KEY, tools_json BLOB NOT NULL, options_json BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (
  session_id TEXT NOT NULL, node_id INTEGER NOT NULL, parent_id INTEGER NOT NULL,
  frame_key BLOB NOT NULL, unit TEXT NOT NULL, token_ids BLOB NOT NULL, glue INTEGER NOT NULL,
  reasons TEXT NOT NULL, sample TEXT, logprobs BLOB, tops BLOB, answer TEXT,
  PRIMARY KEY (session_id, node_id));
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (session_id TEXT PRIMARY KEY, record BLOB NOT NULL);
"""
_CLOSED_KEPT = 10_000


class ModelFiles(NamedTuple):
    """What makes the ids of a conversation; SHA-256 each, hexadecimal."""

    tokenizer_sha256: str
    template_sha256: str


class OtherModelError(Exception):
    """The journal has open sessions of another model."""

    def __init__(self, found: ModelFiles, open_sessions: int) -> None:
        """Says which model the journal has, and how many open sessions of it."""
        super().__init__(found, open_sessions)
        self.found = found
        self.open_sessions = open_sessions


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session was opened with."""

    session_id: str
    opened_unix_ms: int
    request_id: str = ""
    group_id: str = ""
    sample_index: int = 0
    group_size: int = 1
    sampling: str = "{}"
    """Default sampling parameters: the JSON form of `SamplingParams`."""
    metadata: dict[str, str] = field(default_factory=dict)
    finish_on_disconnect: bool = False
    export_mode: int = ExportMode.LEAVES
    """In which form the tree is exported: an `ExportMode`."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """How an answered turn is found again by a retry."""

    answer_id: str
    fingerprint: str
    idempotency_key: str
    created_unix_ms: int
    lineage: int | None = None
    """What the request says that the turn is: a `Lineage`."""


@dataclass(slots=True)
class StoredSession:
    """A session as read back."""

    spec: SessionSpec
    tree: Tree
    answers: dict[int, AnswerRecord] = field(default_factory=dict)
    """By node id, oldest first."""


def keep_secret(db: sqlite3.Connection, fresh: bytes) -> bytes:
    """Returns the secret of the session keys; `fresh` becomes it where there is none yet."""
    db.execute("INSERT OR IGNORE INTO secrets VALUES ('session keys', ?)", (fresh,))
    row = db.execute("SELECT value FROM secrets WHERE name = 'session keys'").fetchone()
    return bytes(row[0])


def adopt_model(db: sqlite3.Connection, model: ModelFiles) -> None:
    """Stores which model the open sessions are of; with none open, any model may have the journal.

    Raises:
        OtherModelError: The open sessions are another model's: their ids would mean other text.
    """
    row = db.execute("SELECT tokenizer_sha256, template_sha256 FROM model").fetchone()
    if row is not None and ModelFiles(*row) == model:
        return
    (count,) = db.execute("SELECT count(*) FROM sessions WHERE trajectory_ids IS NULL").fetchone()
    if row is not None and count:
        raise OtherModelError(ModelFiles(*row), count)
    db.execute("DELETE FROM model")
    db.execute("INSERT INTO model VALUES (?, ?)", model)


def insert_session(db: sqlite3.Connection, spec: SessionSpec) -> None:
    """Stores a new session.

    Raises:
        SessionClosedError: Its request id opened one that is closed and still remembered.
    """
    known = "SELECT session_id FROM sessions WHERE request_id = ? AND trajectory_ids IS NOT NULL"
    for (session_id,) in db.execute(known, (spec.request_id,)):
        raise SessionClosedError(
            f"request_id: {spec.request_id!r} opened session {session_id}, which is closed; "
            "give another to open another",
            session_id=session_id,
        )
    db.execute(
        "INSERT INTO sessions (session_id, request_id, spec) VALUES (?, ?, ?)",
        (spec.session_id, spec.request_id or None, json.dumps(dataclasses.asdict(spec))),
    )


def insert_turn(
    db: sqlite3.Connection, session_id: str, nodes: list[Node], answer: AnswerRecord
) -> None:
    """Stores the nodes of a turn that may not be stored yet; the last is the sampled one."""
    frame = nodes[-1].frame
    db.execute(
        "INSERT OR IGNORE INTO frames VALUES (?, ?, ?)",
        (frame.key, frame.tools_json, frame.options_json),
    )
    for node in nodes:
        text = json.dumps(dataclasses.asdict(answer)) if node is nodes[-1] else None
        row = (session_id, *_node_row(node), text)
        db.execute("INSERT OR IGNORE INTO nodes VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", row)


def update_reasons(db: sqlite3.Connection, session_id: str, node: Node) -> None:
    """Stores what is to be known about a node by now."""
    db.execute(
        "UPDATE nodes SET reasons = ? WHERE session_id = ? AND node_id = ?",
        (json.dumps(sorted(node.reasons)), session_id, node.node_id),
    )


def close_session(
    db: sqlite3.Connection, session_id: str, trajectory_ids: list[str], record: bytes
) -> None:
    """Moves a session to the outbox; keeps the answer of the close for repeats of it."""
    db.execute(
        "UPDATE sessions SET trajectory_ids = ? WHERE session_id = ?",
        (json.dumps(trajectory_ids), session_id),
    )
    db.execute("DELETE FROM nodes WHERE session_id = ?", (session_id,))
    db.execute("INSERT INTO outbox VALUES (?, ?)", (session_id, record))


def undelivered(db: sqlite3.Connection, count: int) -> list[tuple[str, int]]:
    """Returns the oldest closed sessions that the collector has not taken, and their sizes."""
    rows = db.execute(
        "SELECT session_id, length(record) FROM outbox ORDER BY rowid LIMIT ?", (count,)
    )
    return list(rows)


def read_record(db: sqlite3.Connection, session_id: str) -> bytes:
    """Returns a closed session that the collector has not taken."""
    row = db.execute("SELECT record FROM outbox WHERE session_id = ?", (session_id,)).fetchone()
    return bytes(row[0])


def delete_delivered(db: sqlite3.Connection, session_ids: list[str]) -> None:
    """Forgets closed sessions that the collector has taken, and the oldest closes."""
    db.executemany("DELETE FROM outbox WHERE session_id = ?", [(id_,) for id_ in session_ids])
    db.execute(
        "DELETE FROM sessions WHERE trajectory_ids IS NOT NULL AND rowid <= "
        "(SELECT max(rowid) FROM sessions) - ?",
        (_CLOSED_KEPT,),
    )


def read_closed(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Returns the trajectory ids of the closed sessions that are remembered."""
    rows = db.execute(
        "SELECT session_id, trajectory_ids FROM sessions WHERE trajectory_ids IS NOT NULL"
    )
    return {session_id: json.loads(ids) for session_id, ids in rows}


def count_undelivered(db: sqlite3.Connection) -> int:
    """Returns how many closed sessions the collector has not taken."""
    return int(db.execute("SELECT count(*) FROM outbox").fetchone()[0])


def read_open(db: sqlite3.Connection, new_tree: Callable[[], Tree]) -> list[StoredSession]:
    """Rebuilds all open sessions exactly."""
    frames = {row[0]: make_frame(row[1], row[2]) for row in db.execute("SELECT * FROM frames")}
    sessions: list[StoredSession] = []
    specs = db.execute("SELECT spec FROM sessions WHERE trajectory_ids IS NULL ORDER BY rowid")
    for (text,) in specs.fetchall():
        stored = StoredSession(SessionSpec(**json.loads(text)), new_tree())
        for row in _node_rows(db, stored.spec.session_id):
            _attach_row(stored, row, frames)
        sessions.append(stored)
    return sessions


def _node_rows(db: sqlite3.Connection, session_id: str) -> Iterator[Any]:
    return db.execute(
        "SELECT node_id, parent_id, frame_key, unit, token_ids, glue, reasons, sample, logprobs,"
        " tops, answer FROM nodes WHERE session_id = ? ORDER BY rowid",  # parents first
        (session_id,),
    )


def _node_row(node: Node) -> tuple[object, ...]:
    assert node.parent is not None
    sample, logprobs, tops = None, None, None
    if node.sample is not None:
        sample = json.dumps(
            [
                node.sample.spans,
                int(node.sample.finish),
                node.sample.engine_id,
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
        node.frame.key,
        json.dumps([dataclasses.asdict(message) for message in node.unit]),
        pack_ids(node.token_ids),
        node.glue,
        json.dumps(sorted(node.reasons)),
        sample,
        logprobs,
        tops,
    )


def _attach_row(stored: StoredSession, row: Any, frames: dict[bytes, Any]) -> None:
    node_id, parent_id, frame_key, unit, ids, glue, reasons, *sampled, answer = row
    frame = frames[frame_key]
    token_ids = np.array(unpack_ids(ids, "token_ids"))
    stored.tree.attach(
        Node(
            node_id,
            stored.tree.nodes[parent_id] if parent_id else stored.tree.root(frame),
            frame,
            tuple(_message(fields) for fields in json.loads(unit)),
            token_ids,
            glue,
            sample=_sample(token_ids[glue:], *sampled) if sampled[0] else None,
            reasons=frozenset(map(Fidelity, json.loads(reasons))),
            stored=True,
        )
    )
    if answer:
        record = stored.answers[node_id] = AnswerRecord(**json.loads(answer))
        stored.tree.nodes[node_id].said = Lineage(record.lineage) if record.lineage else None


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
    return Message(**fields, tool_calls=calls)


def _sample(token_ids: Any, text: str, logprobs: bytes, tops: bytes | None) -> Sample:
    spans, finish, engine_id, prompt_tokens, cached_tokens, prompt_crc32 = json.loads(text)
    return Sample(
        token_ids,
        unpack_logprobs(logprobs, "logprobs"),
        tuple(VersionSpan(*span) for span in spans),
        Finish(finish),
        engine_id,
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
