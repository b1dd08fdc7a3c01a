"""Which answers the journal records as sent, and what a restart knows of them."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.gateway import (
    ChatCall,
    Journal,
    Node,
    SentAnswers,
    Session,
    SessionSpec,
    Turn,
    read_choices,
)
from rollmesh.runtime.errors import StoreFullError
from rollmesh.v1 import gateway_pb2
from tests.gateway.journals import Opened
from tests.gateway.live import LiveMesh
from tests.gateway.worlds import World, said, user
from tests.messages import chat_in, said as message


@pytest.fixture
async def database(opened: Opened) -> AsyncIterator[Journal]:
    async with opened() as running:
        yield running


def talk(name: str) -> tuple[Session, list[Node]]:
    """A session of three turns: the second continues the first, the third is a sibling."""
    world = World()
    ask, reply = user("x"), said("A")
    nodes = [world.turn(messages, reply) for messages in ((ask,), (ask, reply, ask), (ask,))]
    return Session(SessionSpec(name, 0), world.tree), nodes


def add(sent: SentAnswers, session: Session, node: Node) -> None:
    sent.add(session, Turn("a", "f", "", 0, node_id=node.node_id))


async def recorded(database: Journal) -> set[tuple[str, int]]:
    rows = await database.run(lambda tx: tx.db.rows("SELECT * FROM sent"))
    return set(rows)


async def test_answers_of_closed_sessions_and_continued_answers_are_not_recorded(
    database: Journal,
) -> None:
    sent = SentAnswers(database)
    (open_, nodes), (closed, others) = talk("open"), talk("closed")
    for session, node in [*((open_, node) for node in nodes), *((closed, node) for node in others)]:
        add(sent, session, node)
        add(sent, session, node)  # to a retry
    closed.closing = True
    await sent.flush()
    _, second, sibling = nodes
    assert await recorded(database) == {("open", second.node_id), ("open", sibling.node_id)}


async def test_a_journal_that_cannot_be_written_loses_only_the_record(
    database: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFullError("the disk is full")

    sent = SentAnswers(database)
    session, (_, second, sibling) = talk("s")
    add(sent, session, second)
    monkeypatch.setattr("rollmesh.gateway.journal.insert_sent", full)
    await sent.flush()
    monkeypatch.undo()
    add(sent, session, sibling)
    await sent.flush()
    assert await recorded(database) == {("s", sibling.node_id)}


async def test_a_restarted_gateway_knows_the_tries_of_its_turns_and_the_sent_answers(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with LiveMesh(tmp_path, tokenizer_dir, random.Random(0), faults=0) as mesh:
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
        asked = chat_in(
            opened,
            message("q"),
            retry_count=2,
        )
        await mesh.stub.Chat(asked)
        asked.idempotency_key = "another"
        session = mesh.gateway.session(opened.session_id)
        (request,) = read_choices(asked, session, 1, stream=False)
        await ChatCall(mesh.gateway, session).answers([request])  # and the reply is never sent
        await mesh.start_gateway()
        restored = mesh.gateway.session(opened.session_id)
    turns = [turn for equal in restored.turns.values() for turn in equal.turns]
    assert [(turn.tries, turn.sent, turn.handed) for turn in turns] == [
        (2, True, True),
        (2, False, True),
    ]
