"""Open sessions in a journal, turn by turn."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from rollmesh.chat.canonical import make_context
from rollmesh.chat.images.placing import Placeholder
from rollmesh.chat.messages import Image, Message, RenderContext, ToolCall
from rollmesh.gateway.conversation.branches import Branches
from rollmesh.gateway.conversation.images import SessionImages
from rollmesh.gateway.conversation.nodes import Node, Sample
from rollmesh.gateway.conversation.reasons import Fidelity
from rollmesh.gateway.conversation.spec import AnswerReceipt, SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.storage.images import insert_images, read_images
from rollmesh.gateway.storage.request_ids import check_not_closed
from rollmesh.gateway.storage.transaction import Transaction
from rollmesh.mesh.generations.sampled import Tops
from rollmesh.runtime.codec.arrays import (
    TokenIds,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from rollmesh.runtime.codec.images import CheckedImage
from rollmesh.runtime.statements import Row
from rollmesh.v1 import sampling_pb2, trajectory_pb2

_ALL = 2**62
_REASONS_CACHED, _PARSED_ROWS = 256, 64
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
    images: SessionImages = field(default_factory=SessionImages)


def insert_session(tx: Transaction, spec: SessionSpec) -> None:
    """Stores a new session.

    Raises:
        SessionClosedError: The request id opened a session that is closed and still remembered.
    """
    check_not_closed(tx, spec.request_id)
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
    answer: AnswerReceipt,
    images: Iterable[CheckedImage] = (),
) -> None:
    """Stores what is not stored yet of a turn.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        nodes: Its nodes that are not stored yet; the last one is the sampled node.
        answer: The receipt of the answer.
        images: The images that these nodes show, as far as the journal may not have them.
    """
    insert_images(tx, session_id, images)
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
        " scaffold, reasons, sample, logprobs, tops, images, answer)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13) ON CONFLICT DO NOTHING",
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


def update_answer(tx: Transaction, session_id: str, node: Node, answer: AnswerReceipt) -> None:
    """Stores the current receipt of an answer."""
    tx.db.run(
        "UPDATE nodes SET answer = ?1 WHERE session_id = ?2 AND node_id = ?3",
        json.dumps(dataclasses.asdict(answer)),
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
        rows = read_nodes(tx, session_id)
        attach_rows(stored.tree, rows, contexts, stored.answers)
        sent = tx.db.rows("SELECT node_id FROM sent WHERE session_id = ?1", session_id)
        stored.sent = frozenset(node_id for (node_id,) in sent)
        stored.images = read_images(tx, session_id)
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
    """Returns rows of a session's nodes, parents first, for `attach_rows`.

    Args:
        tx: The transaction.
        session_id: Id of the session.
        after: First column of the last row that was read; 0 starts from the beginning.
        limit: Maximum number of rows.
    """
    return tx.db.rows(
        "SELECT n, node_id, parent_id, context_key, messages, token_ids, scaffold, reasons,"
        " sample, logprobs, tops, answer, images FROM nodes WHERE session_id = ?1 AND n > ?2"
        " ORDER BY n LIMIT ?3",
        session_id,
        after,
        limit,
    )


def has_images(row: Row) -> bool:
    """Returns whether the node of a row has images."""
    return row[-1] is not None


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
        json.dumps(node.images) if node.images else None,
    )


def attach_rows(
    tree: Branches,
    rows: Sequence[Row],
    contexts: Mapping[bytes, RenderContext],
    answers: dict[int, AnswerReceipt] | None = None,
) -> None:
    """Attaches the nodes of rows to the tree of their session.

    Args:
        tree: The tree.
        rows: Rows of the session, parents first.
        contexts: Its render contexts by their keys.
        answers: Takes the records of the answers, by node id; None if nobody needs them.
    """
    for at in range(0, len(rows), _PARSED_ROWS):
        part = rows[at : at + _PARSED_ROWS]
        for row, parsed in zip(part, _parsed(part), strict=True):
            answer = _attach(tree, row, contexts, *parsed)
            if answer and answers is not None:
                answers[row[1]] = AnswerReceipt(**answer)


def _parsed(rows: Sequence[Row]) -> Iterable[Any]:
    """Yields the messages, the sample, the answer and the images of each row.

    All are parsed at once: most are short, and a call of the parser takes longer than their text.
    """
    texts = [f"[{row[4]},{row[8] or 'null'},{row[11] or 'null'},{row[12] or '[]'}]" for row in rows]
    found: list[Any] = json.loads(f"[{','.join(texts)}]")
    return found


def _attach(
    tree: Branches, row: Row, contexts: Mapping[bytes, RenderContext], *parsed: Any
) -> dict[str, Any] | None:
    """Attaches the node of a row; returns the record of its answer."""
    _, node_id, parent_id, key, _, ids, scaffold, reasons, _, logprobs, tops, _, _ = row
    messages, sample = parsed[:2]
    answer: dict[str, Any] | None = parsed[2]
    images = tuple([Placeholder(*one) for one in parsed[3]])
    said = answer["lineage"] if answer else None
    token_ids, context = unpack_ids(ids, "token_ids"), contexts[key]
    tree.attach(
        Node(
            node_id,
            tree.nodes[parent_id] if parent_id else tree.root(context),
            context,
            tuple([_message(fields) for fields in messages]),
            token_ids,
            scaffold,
            images,
            sample=_sample(token_ids[scaffold:], sample, logprobs, tops) if sample else None,
            reasons=_reasons(reasons),
            said=_known(trajectory_pb2.Lineage, said) if said else None,
            stored=True,
        )
    )
    return answer


@lru_cache(_REASONS_CACHED)
def _reasons(text: str) -> frozenset[Fidelity]:
    """Returns the reasons of a node; most nodes have none, or the same ones."""
    return frozenset(_known(trajectory_pb2.FidelityReason, one) for one in json.loads(text))


def _known(enum: Any, number: Any) -> Any:
    """Returns the number of an enum value.

    Raises:
        ValueError: The enum has no such number, so the row is damaged.
    """
    if number not in _numbers(enum):
        raise ValueError(f"{number} is not a {enum.DESCRIPTOR.name}")
    return number


@cache
def _numbers(enum: Any) -> frozenset[int]:
    return frozenset(enum.values())


def _message(fields: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls"))
    images = tuple(Image(**one) for one in fields.pop("images", ()))
    return Message(**fields, tool_calls=calls, images=images)


def _sample(token_ids: TokenIds, fields: Any, logprobs: bytes, tops: bytes | None) -> Sample:
    spans, finish, prompt_tokens, cached_tokens, prompt_crc32 = fields
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
