"""Open sessions in a journal, turn by turn."""

import base64
import dataclasses
import json
import secrets
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollmesh.chat import Image, Message, Placeholder, RenderContext, ToolCall, make_context
from rollmesh.gateway.conversation import ImageFacts
from rollmesh.gateway.session import AnswerReceipt, Session, SessionSpec
from rollmesh.gateway.tree import Edge, Fidelity, Node, Sample, Told, Tree
from rollmesh.mesh import JOURNAL_ID_CHARS, Tops
from rollmesh.runtime import Database, Row, SqliteStatements, Statements
from rollmesh.runtime.codec import (
    CheckedImage,
    TokenIds,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from rollmesh.runtime.errors import (
    JournalMovedError,
    RollmeshError,
    SessionClosedError,
    StoreError,
    StoreLostError,
)
from rollmesh.v1 import sampling_pb2, session_pb2, trajectory_pb2

# A transaction of a journal, and its runner.

_Result = TypeVar("_Result")
_RETRY_MS = 1000
SECRET_BYTES = 32
"""Length of the secret of session keys."""


def new_journal_id() -> str:
    """Returns an id for a new journal."""
    return secrets.token_hex(JOURNAL_ID_CHARS // 2)


def moved(journal_id: str) -> JournalMovedError:
    """Returns the error of a session whose journal is elsewhere."""
    return JournalMovedError(
        f"session_id: another gateway serves journal {journal_id}, or takes it over now; try again",
        retry_delay_ms=_RETRY_MS,
    )


class Transaction(NamedTuple):
    """A transaction of one journal. Its tables may hold other journals, too."""

    db: Statements
    journal_id: str


class Journal(ABC):
    """One journal that this process may write. No other process may at the same time."""

    def __init__(self, journal_id: str, secret: bytes, epoch: int) -> None:
        self.journal_id = journal_id
        """Prefix of the ids of its sessions."""
        self.secret = secret
        """Secret of the session keys."""
        self.epoch = epoch
        """Number of times that a gateway has taken it, or 0 if that is not counted."""

    @abstractmethod
    async def run(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work in a transaction and returns once the commit is durable.

        Work may run more than once. All but the last run leave nothing.

        Raises:
            JournalMovedError: Another gateway has taken the journal. Nothing was stored.
            StoreInDoubtError: The work may or may not be stored, and the journal is lost.
            RollmeshError: The store failed and nothing was stored, or an error of the work.
        """

    async def read(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work that only reads, without delaying commits where the store can do that."""
        return await self.run(work)

    @abstractmethod
    async def lost(self) -> RollmeshError:
        """Waits until the journal can no longer be written and returns the reason."""

    @abstractmethod
    async def release(self) -> None:
        """Leaves the journal to any gateway. Nothing is written after that."""

    async def remove(self) -> bool:
        """Removes the journal if it has no sessions and returns whether it did.

        Closes that it remembered are forgotten. A journal in a file is never removed.
        """
        return False


# The sessions that request ids opened and that are closed by now, as far as that is remembered.


def closed_session(tx: Transaction, request_id: str) -> str:
    """Returns the closed session that a request id opened, or an empty text."""
    known = "SELECT session_id FROM closes WHERE journal = ?1 AND request_id = ?2"
    found = (str(session_id) for (session_id,) in tx.db.rows(known, tx.journal_id, request_id))
    return next(found, "")


# Images of sessions in the journal: each once for a session, beside its turns.


def read_images(tx: Transaction, session_id: str) -> dict[str, ImageFacts]:
    """Returns the images of a session by hash, without their bytes."""
    rows = tx.db.rows(
        "SELECT sha256, media_type, width, height, length(data) FROM images WHERE session_id = ?1",
        session_id,
    )
    return {sha256: ImageFacts(*facts) for sha256, *facts in rows}


def read_image_bytes(tx: Transaction, session_id: str, wanted: Iterable[str]) -> dict[str, bytes]:
    """Returns the bytes of images of a session, by hash."""
    rows = tx.db.rows(
        f"SELECT sha256, data FROM images WHERE session_id = ?1 AND sha256 {tx.db.within(2)}",
        session_id,
        [*wanted],
    )
    return {sha256: bytes(data) for sha256, data in rows}


def read_next_image(
    tx: Transaction, session_id: str, after: int
) -> tuple[int, session_pb2.SessionImage] | None:
    """Returns the next image of a session and its position, or None if there are no more.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        after: Position of the image before it. 0 starts from the beginning.
    """
    row = tx.db.row(
        "SELECT n, sha256, media_type, data FROM images WHERE session_id = ?1 AND n > ?2"
        " ORDER BY n LIMIT 1",
        session_id,
        after,
    )
    if row is None:
        return None
    n, sha256, media_type, data = row
    return n, session_pb2.SessionImage(
        sha256=sha256, media_type=media_type, data=data, data_bytes=len(data)
    )


def remove_images(tx: Transaction, session_id: str, size: int) -> int:
    """Removes images of a session, oldest first, until there are none or `size` bytes are gone.

    Returns:
        Bytes that are gone: less than `size` if no image is left.
    """
    rows = tx.db.rows(
        "DELETE FROM images WHERE n IN (SELECT n FROM (SELECT n,"
        " sum(length(data)) OVER (ORDER BY n) - length(data) AS older"
        " FROM images WHERE session_id = ?1) AS sized WHERE older < ?2) RETURNING length(data)",
        session_id,
        size,
    )
    return sum(length for (length,) in rows)


_ALL = 2**62
_RECEIPT = [one.name for one in dataclasses.fields(AnswerReceipt)]
_receipt_of = attrgetter(*_RECEIPT)
_REASONS_CACHED, _SAMPLINGS_CACHED, _PARSED_ROWS = 256, 64, 64
_OPEN = (
    "NOT EXISTS (SELECT 1 FROM outbox o WHERE o.session_id = s.session_id)"
    " AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.session_id = s.session_id)"
)


def insert_session(tx: Transaction, spec: SessionSpec) -> None:
    """Stores a new session.

    Raises:
        SessionClosedError: The request id opened a session that is closed and still remembered.
    """
    if session_id := closed_session(tx, spec.request_id):
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


def insert_turn(
    tx: Transaction,
    session_id: str,
    nodes: list[Node],
    answer: AnswerReceipt | None,
    images: Sequence[CheckedImage] = (),
) -> None:
    """Stores the parts of a turn that are not stored yet, or the context of a session's start.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        nodes: Its nodes that are not stored yet. The last one of a turn is the sampled node.
        answer: The receipt of the answer. None for a context.
        images: The images that these nodes show, as far as the journal may not have them.
    """
    if images:
        tx.db.run_many(
            "INSERT INTO images (session_id, sha256, media_type, width, height, data)"
            " VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING",
            [
                (session_id, one.sha256, one.media_type, one.width, one.height, one.data)
                for one in images
            ],
        )
    context, parent = nodes[-1].render_context, nodes[0].parent
    if parent is not None and parent.parent is None:  # else its node has stored the context
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
    rows: list[tuple[object, ...]] = []
    for node in nodes:
        assert node.parent is not None
        sample, logprobs, tops, sampling = None, None, None, None
        if (own := node.sample) is not None:
            spans: list[tuple[object, ...]] = []
            for one in own.spans:
                span = one.policy_version, one.start, one.end, one.engine_id, one.numerics_id
                spans.append((*span, one.adapter) if one.adapter else span)
            numerics = [base64.b64encode(one.SerializeToString()).decode() for one in own.numerics]
            counts = int(own.finish), own.prompt_tokens, own.cached_tokens, own.prompt_crc32
            told = [own.told._asdict()] if own.told else []
            times = [own.begun_unix_ms, own.ended_unix_ms]
            sample = json.dumps([spans, *counts, *told, *numerics, times])
            logprobs = pack_logprobs(own.logprobs)
            sampling = own.sampling.SerializeToString(deterministic=True)
            if own.tops is not None:
                tops = pack_ids(own.tops.ids) + pack_logprobs(own.tops.logprobs)
        columns = (
            session_id,
            node.node_id,
            node.parent.node_id,
            node.render_context.key,
            json.dumps([*map(dataclasses.asdict, node.messages)]),
            pack_ids(node.token_ids),
            node.scaffold_tokens,
            json.dumps(sorted(node.reasons)),
            sample,
            logprobs,
            tops,
            json.dumps(node.images) if node.images else None,
            sampling,
            _receipt_json(answer) if answer is not None and node is nodes[-1] else None,
            node.columns or None,
        )
        rows.append(columns)
    tx.db.run_many(
        "INSERT INTO nodes (session_id, node_id, parent_id, context_key, messages, token_ids,"
        " scaffold, reasons, sample, logprobs, tops, images, sampling, answer, token_columns)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)"
        " ON CONFLICT DO NOTHING",
        rows,
    )


def insert_sent(tx: Transaction, answers: Iterable[tuple[str, int]]) -> None:
    """Stores that answers, given by session id and node id, were sent completely."""
    tx.db.run_many(
        "INSERT INTO sent (session_id, node_id) VALUES (?1, ?2) ON CONFLICT DO NOTHING", answers
    )


def insert_facts(tx: Transaction, session_id: str, facts: Iterable[Sequence[str | int]]) -> None:
    """Stores facts of a session that no turn has, each once: see `state_facts`."""
    tx.db.run_many(
        "INSERT INTO facts (session_id, fact) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
        [(session_id, json.dumps(fact)) for fact in facts],
    )


def read_facts(tx: Transaction, session_id: str) -> list[str]:
    """Returns the facts of a session as they are stored, in order."""
    rows = tx.db.rows("SELECT fact FROM facts WHERE session_id = ?1 ORDER BY n", session_id)
    return [fact for (fact,) in rows]


def state_facts(tree: Tree, facts: Iterable[str]) -> None:
    """Adds stored facts to the tree of their session: edges, budgets, late request ids."""
    for fact in facts:
        match json.loads(fact):
            case ["edge", source, target, kind]:
                tree.edges[Edge(source, target, kind)] = None
            case ["budget", kind]:
                tree.spent.add(_known(session_pb2.BudgetKind, kind))
            case ["request", node_id, request_id]:
                sample = tree.nodes[node_id].sample
                assert sample is not None
                if request_id not in sample.request_ids:  # else it came during the commit
                    sample.request_ids.append(request_id)
            case other:
                raise ValueError(f"{other} is no fact")


def update_reasons(tx: Transaction, session_id: str, node: Node) -> None:
    """Stores the current fidelity reasons of a node."""
    tx.db.run(
        "UPDATE nodes SET reasons = ?1 WHERE session_id = ?2 AND node_id = ?3",
        json.dumps(sorted(node.reasons)),
        session_id,
        node.node_id,
    )


def update_answer(tx: Transaction, session_id: str, node_id: int, answer: AnswerReceipt) -> None:
    """Stores the current receipt of an answer."""
    tx.db.run(
        "UPDATE nodes SET answer = ?1 WHERE session_id = ?2 AND node_id = ?3",
        _receipt_json(answer),
        session_id,
        node_id,
    )


class DamagedSessionError(Exception):
    """The data of a session in the journal is damaged. The message says how."""


def read_open(
    tx: Transaction, new_tree: Callable[[], Tree]
) -> tuple[list[Session], dict[str, DamagedSessionError]]:
    """Rebuilds all open sessions exactly.

    Returns:
        The sessions, and the error of each session that cannot be read, by session id.
    """
    sessions: list[Session] = []
    damaged: dict[str, DamagedSessionError] = {}
    ids = tx.db.rows(
        f"SELECT session_id FROM sessions s WHERE journal = ?1 AND {_OPEN} ORDER BY n",
        tx.journal_id,
    )
    for (session_id,) in ids:
        try:
            sessions.append(read_session(tx, session_id, new_tree))
        except DamagedSessionError as error:
            damaged[session_id] = error
    return sessions, damaged


def read_session(tx: Transaction, session_id: str, new_tree: Callable[[], Tree]) -> Session:
    """Rebuilds one session exactly.

    Raises:
        DamagedSessionError: The session's data in the journal is damaged.
        RollmeshError: The journal cannot be read now.
    """
    with damage(tx):
        session = Session(SessionSpec.from_json(spec_row(tx, session_id)), new_tree())
        contexts = read_contexts(tx, session_id)
        answers: dict[int, AnswerReceipt] = {}
        rows = read_nodes(tx, session_id, columns=_OPEN_COLUMNS)
        attach_rows(session.tree, rows, contexts, answers)
        rows = tx.db.rows("SELECT node_id FROM sent WHERE session_id = ?1", session_id)
        sent = {node_id for (node_id,) in rows}
        for node_id, receipt in answers.items():
            session.restore(session.tree.nodes[node_id], receipt, sent=node_id in sent)
        session.images = read_images(tx, session_id)
        state_facts(session.tree, read_facts(tx, session_id))
        for turn in session.answers.values():
            turn.stored_ids = len(turn.request_ids)
    return session


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


NODE_COLUMNS = (
    "n, node_id, parent_id, context_key, messages, token_ids, scaffold, reasons, sample, logprobs,"
    " tops, answer, sampling, token_columns, images"
)
"""The source of a node."""
_OPEN_COLUMNS = NODE_COLUMNS.replace("token_columns", "length(token_columns)")
BLOB_COLUMNS = "n, node_id, token_ids, logprobs, token_columns, images"
"""The source of a record's arrays."""


def read_nodes(
    tx: Transaction,
    session_id: str,
    after: int = 0,
    limit: int = _ALL,
    columns: str = NODE_COLUMNS,
) -> list[Row]:
    """Returns rows of a session's nodes, parents first, by default for `attach_rows`.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        after: First column of the last row that was read. 0 starts from the beginning.
        limit: Maximum number of rows.
        columns: Columns of the rows. `n` is the first, and `images` the last.
    """
    return tx.db.rows(
        f"SELECT {columns} FROM nodes WHERE session_id = ?1 AND n > ?2 ORDER BY n LIMIT ?3",
        session_id,
        after,
        limit,
    )


def _receipt_json(answer: AnswerReceipt) -> str:
    return json.dumps(dict(zip(_RECEIPT, _receipt_of(answer), strict=True)))


def attach_rows(
    tree: Tree,
    rows: Sequence[Row],
    contexts: Mapping[bytes, RenderContext],
    answers: dict[int, AnswerReceipt] | None = None,
) -> None:
    """Attaches the nodes of rows to the tree of their session.

    Args:
        tree: The tree.
        rows: Rows of the session, parents first.
        contexts: Its render contexts by their keys.
        answers: Takes the records of the answers, by node id. None drops them.
    """
    for at in range(0, len(rows), _PARSED_ROWS):
        part = rows[at : at + _PARSED_ROWS]
        # All texts are parsed at once: a call of the parser takes longer than most of them.
        texts = [
            f"[{one[4]},{one[8] or 'null'},{one[11] or 'null'},{one[14] or '[]'}]" for one in part
        ]
        parsed: list[Any] = json.loads(f"[{','.join(texts)}]")
        for row, (messages, sample, answer, images) in zip(part, parsed, strict=True):
            _, node_id, parent_id, key, _, ids, scaffold, reasons, _, logprobs, tops, *rest = row
            _, sampling, columns, _ = rest
            said = answer["lineage"] if answer else None
            asked = answer.get("request_ids", []) if answer else []
            token_ids, context = unpack_ids(ids, "token_ids"), contexts[key]
            tree.attach(
                Node(
                    node_id,
                    tree.nodes[parent_id] if parent_id else tree.root(context),
                    context,
                    tuple([_message(fields) for fields in messages]),
                    token_ids,
                    scaffold,
                    tuple([Placeholder(*one) for one in images]),
                    sample=(
                        _sample(token_ids[scaffold:], sample, logprobs, tops, sampling, asked)
                        if sample
                        else None
                    ),
                    reasons=_reasons(reasons),
                    said=_known(trajectory_pb2.Lineage, said) if said else None,
                    stored=True,
                    # Open sessions have their size alone.
                    columns=columns if isinstance(columns, bytes) else b"",
                    column_bytes=columns if isinstance(columns, int) else 0,
                )
            )
            if answer and answers is not None:
                answers[node_id] = AnswerReceipt(**answer)


@lru_cache(_REASONS_CACHED)
def _reasons(text: str) -> frozenset[Fidelity]:
    """Returns the reasons of a node. Most nodes have none, or the same ones."""
    return frozenset(_known(trajectory_pb2.FidelityReason, one) for one in json.loads(text))


def _known(enum: Any, number: Any) -> Any:
    """Returns the number of an enum value.

    Raises:
        ValueError: The enum has no such number, so the row is damaged.
    """
    if number not in enum.DESCRIPTOR.values_by_number:
        raise ValueError(f"{number} is not a {enum.DESCRIPTOR.name}")
    return number


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
    images = tuple(Image(**one) for one in fields.pop("images", ()))
    return Message(**fields, tool_calls=calls, images=images)


def _sample(
    token_ids: TokenIds,
    fields: Any,
    logprobs: bytes,
    tops: bytes | None,
    sampling: bytes | None,
    request_ids: list[str],
) -> Sample:
    kept = None
    if tops is not None:
        half, shape = len(tops) // 2, (len(token_ids), len(tops) // 8 // max(len(token_ids), 1))
        kept = Tops(
            unpack_ids(tops[:half], "tops").reshape(shape),
            unpack_logprobs(tops[half:], "tops").reshape(shape),
        )
    spans, finish, prompt_tokens, cached_tokens, prompt_crc32, *more = fields
    told = [one for one in more if isinstance(one, dict)]
    numerics = [one for one in more if isinstance(one, str)]
    begun, ended = next((one for one in more if isinstance(one, list)), (0, 0))  # of old rows
    return Sample(
        token_ids,
        unpack_logprobs(logprobs, "logprobs"),
        tuple(
            sampling_pb2.VersionSpan(
                policy_version=version,
                start=start,
                end=end,
                engine_id=engine_id,
                numerics_id="".join(more[:1]),
                adapter="".join(more[1:]),
            )
            for version, start, end, engine_id, *more in spans
        ),
        _known(sampling_pb2.FinishReason, finish),
        prompt_tokens,
        cached_tokens,
        prompt_crc32,
        kept,
        _sampling(sampling),
        tuple(map(_numerics, numerics)),
        request_ids=request_ids,
        told=Told(**told[0]) if told else None,
        begun_unix_ms=begun,
        ended_unix_ms=ended,
    )


@lru_cache(_SAMPLINGS_CACHED)
def _sampling(data: bytes | None) -> sampling_pb2.SamplingParams:
    """Returns the sampling parameters of a turn. Version 15 of the tables did not have them."""
    return sampling_pb2.SamplingParams.FromString(data or b"")


@lru_cache(_SAMPLINGS_CACHED)
def _numerics(text: str) -> sampling_pb2.Numerics:
    """Returns the numerics of a turn. Version 15 of the tables did not have them."""
    return sampling_pb2.Numerics.FromString(base64.b64decode(text))


# The model whose token ids a journal holds.


class ModelFiles(NamedTuple):
    """SHA-256 of each file that determines a conversation's token ids, hexadecimal."""

    tokenizer_sha256: str
    template_sha256: str


# Tables of a journal in both dialects. A database may hold several journals.

_FACTS = (
    "CREATE TABLE IF NOT EXISTS facts ("
    "n {key}, session_id {text} NOT NULL, fact {text} NOT NULL, UNIQUE (session_id, fact))"
)
VERSION = 18
"""Incremented with every change of the tables and of the values in them."""
UPGRADES = (
    "ALTER TABLE nodes ADD COLUMN sampling {blob}",
    "ALTER TABLE nodes ADD COLUMN token_columns {blob}",
    _FACTS,
)
"""Each brings the tables of one version to the next, the last one to this version."""
SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS sessions (
  n {key}, journal {text} NOT NULL, session_id {text} NOT NULL UNIQUE, request_id {text},
  spec {text} NOT NULL, UNIQUE (journal, request_id));
CREATE INDEX IF NOT EXISTS sessions_in_order ON sessions (journal, n);
CREATE TABLE IF NOT EXISTS contexts (
  journal {text} NOT NULL, context_key {blob} NOT NULL, tools_json {blob} NOT NULL,
  options_json {blob} NOT NULL, PRIMARY KEY (journal, context_key));
CREATE TABLE IF NOT EXISTS session_contexts (
  session_id {text} NOT NULL, context_key {blob} NOT NULL, journal {text} NOT NULL,
  PRIMARY KEY (session_id, context_key));
CREATE INDEX IF NOT EXISTS sessions_of_contexts ON session_contexts (journal, context_key);
CREATE TABLE IF NOT EXISTS nodes (
  n {key}, session_id {text} NOT NULL, node_id BIGINT NOT NULL, parent_id BIGINT NOT NULL,
  context_key {blob} NOT NULL, messages {text} NOT NULL, token_ids {blob} NOT NULL,
  scaffold BIGINT NOT NULL, reasons {text} NOT NULL, sample {text}, logprobs {blob}, tops {blob},
  answer {text}, images {text}, sampling {blob}, token_columns {blob},
  UNIQUE (session_id, node_id));
CREATE INDEX IF NOT EXISTS nodes_in_order ON nodes (session_id, n);
CREATE TABLE IF NOT EXISTS images (
  n {key}, session_id {text} NOT NULL, sha256 {text} NOT NULL, media_type {text} NOT NULL,
  width BIGINT NOT NULL, height BIGINT NOT NULL, data {blob} NOT NULL,
  UNIQUE (session_id, sha256));
CREATE TABLE IF NOT EXISTS sent (
  session_id {text} NOT NULL, node_id BIGINT NOT NULL, PRIMARY KEY (session_id, node_id)){by_key};
CREATE TABLE IF NOT EXISTS closes (
  journal {text} NOT NULL, n BIGINT NOT NULL, session_id {text} NOT NULL UNIQUE,
  request_id {text}, leaves {blob} NOT NULL, digest {blob} NOT NULL, PRIMARY KEY (journal, n));
CREATE INDEX IF NOT EXISTS closes_by_request ON closes (journal, request_id);
CREATE TABLE IF NOT EXISTS session_keys (
  session_id {text} PRIMARY KEY, journal {text} NOT NULL, revision BIGINT NOT NULL,
  request_id {text} NOT NULL);
CREATE INDEX IF NOT EXISTS session_keys_of_journals ON session_keys (journal);
CREATE TABLE IF NOT EXISTS outbox (
  journal {text} NOT NULL, n BIGINT NOT NULL, session_id {text} NOT NULL UNIQUE,
  request {blob} NOT NULL, closed_unix_ms BIGINT NOT NULL, bytes BIGINT NOT NULL,
  state BIGINT NOT NULL, PRIMARY KEY (journal, n));
CREATE INDEX IF NOT EXISTS outbox_states ON outbox (journal, state, n);
CREATE TABLE IF NOT EXISTS dead_letters (
  session_id {text} PRIMARY KEY, journal {text} NOT NULL, reason BIGINT NOT NULL,
  message {text} NOT NULL, unix_ms BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS dead_letters_of_journals ON dead_letters (journal, session_id);
"""
    + _FACTS
    + ";"
)
"""Statements with the types of a dialect left open. `n` is the order of insertion."""


# Revisions of session keys: how often the key of a session was ended.
#
# Most sessions keep their first key and have no row. A row stays as long as the session or its
# close does. Keys themselves are not stored.


class KeyRevision(NamedTuple):
    """The current key of a session."""

    number: int
    """Number of keys that were ended before it."""
    request_id: str
    """Request id of the call that ended the last one. May be empty."""


def read_revisions(tx: Transaction) -> dict[str, KeyRevision]:
    """Returns the revisions of a journal above 0, by session id."""
    rows = tx.db.rows(
        "SELECT session_id, revision, request_id FROM session_keys WHERE journal = ?1",
        tx.journal_id,
    )
    return {session_id: KeyRevision(*revision) for session_id, *revision in rows}


def store_revision(tx: Transaction, session_id: str, revision: KeyRevision) -> None:
    """Stores the revision of a session's key."""
    tx.db.run(
        "INSERT INTO session_keys (session_id, journal, revision, request_id)"
        " VALUES (?1, ?2, ?3, ?4) ON CONFLICT (session_id) DO UPDATE"
        " SET revision = excluded.revision, request_id = excluded.request_id",
        session_id,
        tx.journal_id,
        *revision,
    )


def delete_revisions(tx: Transaction, session_ids: Iterable[tuple[str]]) -> None:
    """Deletes the revisions of sessions that no request can name."""
    tx.db.run_many("DELETE FROM session_keys WHERE session_id = ?1", session_ids)


# The journal in a SQLite file: of one gateway, which keeps it over restarts.

_DIALECT = {"key": "INTEGER PRIMARY KEY", "text": "TEXT", "blob": "BLOB"}
SQLITE_SCHEMA = (
    SCHEMA.format(**_DIALECT, by_key=" WITHOUT ROWID")
    + """
CREATE TABLE IF NOT EXISTS model (tokenizer_sha256 TEXT NOT NULL, template_sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""
)


class SqliteJournal(Journal):
    """The only journal of a file."""

    def __init__(self, database: Database, journal_id: str, secret: bytes) -> None:
        super().__init__(journal_id, secret, epoch=0)
        self._database = database

    async def run(self, work: Callable[[Transaction], _Result]) -> _Result:
        """Runs work in a transaction and returns once the commit is durable."""
        journal_id = self.journal_id
        return await self._database.run(
            lambda db: work(Transaction(SqliteStatements(db), journal_id))
        )

    async def lost(self) -> RollmeshError:
        """Waits until the file is removed or replaced and returns the reason."""
        return StoreLostError(await self._database.lost())

    async def release(self) -> None:
        """Does nothing: the file stays for this gateway's successor."""


@asynccontextmanager
async def open_sqlite(
    folder: Path, model: ModelFiles, model_path: Path
) -> AsyncIterator[SqliteJournal]:
    """Opens the journal in a folder, which is created if it is missing.

    Raises:
        StoreError: The file cannot be opened, was written by another version, or holds open
            sessions of another model.
    """
    path = folder / "journal.sqlite"
    upgrades = [one.format(**_DIALECT) for one in UPGRADES]
    async with Database(path, SQLITE_SCHEMA, VERSION, upgrades=upgrades) as database:
        fresh = new_journal_id(), secrets.token_bytes(SECRET_BYTES)
        journal_id, secret = await database.run(lambda db: _keep_identity(db, *fresh))
        opened = SqliteJournal(database, journal_id, secret)
        await opened.run(lambda tx: adopt_model(tx, model, path, model_path))
        yield opened


def _keep_identity(db: sqlite3.Connection, journal_id: str, secret: bytes) -> tuple[str, bytes]:
    """Returns the id and the secret of the journal. Stores these if it has none yet."""
    fresh = [("journal id", journal_id.encode()), ("session keys", secret)]
    db.executemany("INSERT OR IGNORE INTO identity VALUES (?, ?)", fresh)
    kept: dict[str, bytes] = dict(db.execute("SELECT name, value FROM identity"))
    return kept["journal id"].decode(), kept["session keys"]


def adopt_model(tx: Transaction, model: ModelFiles, path: Path, model_path: Path) -> None:
    """Stores the model of the open sessions. With no open session, any model may be stored.

    An open session that was set aside counts, because it is served again once it is retried.

    Raises:
        StoreError: The open sessions belong to another model, so their ids have another meaning.
    """
    row = tx.db.row("SELECT tokenizer_sha256, template_sha256 FROM model")
    if row is not None and ModelFiles(*row) == model:
        return
    count = tx.db.value(
        "SELECT count(*) FROM sessions s WHERE journal = ?1"
        " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.session_id = s.session_id)",
        tx.journal_id,
    )
    if row is not None and count:
        part = next(at for at, name in enumerate(model) if name != row[at])
        raise StoreError(
            f"{path}: holds {count} open sessions of another model: "
            f"the SHA-256 of their {('tokenizer', 'chat template')[part]} is "
            f"{row[part][:16]}..., that of {model_path} is "
            f"{model[part][:16]}...; start the gateway with their model until they are closed, "
            "drop those that were set aside, or name another data_dir"
        )
    tx.db.run("DELETE FROM model")
    tx.db.run("INSERT INTO model VALUES (?1, ?2)", *model)
