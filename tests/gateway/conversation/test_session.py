"""What a session decides: which turn a request gets, what it is told, which answers are orphans."""

import asyncio

import pytest

from rollmesh.chat import Message
from rollmesh.gateway import (
    AnswerReceipt,
    Node,
    Session,
    SessionSpec,
    Turn,
    TurnRequest,
    read_choices,
)
from rollmesh.runtime import clock
from rollmesh.runtime.errors import GenerationAbortedError, IdempotencyKeyReusedError
from rollmesh.v1 import gateway_pb2, trajectory_pb2
from tests.gateway.worlds import World, said, user
from tests.messages import said as message

ORPHANED = trajectory_pb2.FIDELITY_REASON_ORPHANED
REPLAYED = trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY
LOST = GenerationAbortedError("the engine is gone")
TIMEOUT_S = 180


def new_session() -> tuple[Session, World]:
    world = World()
    return Session(SessionSpec("s", 0), world.tree), world


def request(
    session: Session, text: str = "q", key: str = "", retry_count: int = 0, **more: bool
) -> TurnRequest:
    asked = gateway_pb2.ChatRequest(
        messages=[message(text)], idempotency_key=key, retry_count=retry_count
    )
    (read,) = read_choices(asked, session, 1, stream=more.get("stream", False))
    return read


def answer(world: World, reply: Message) -> Node:
    return world.turn((user("q"),), reply)


@pytest.mark.parametrize("ended", [False, True])
def test_a_key_names_one_sample_of_one_request(*, ended: bool) -> None:
    session, world = new_session()
    asked = request(session, key="k")
    assert session.find_turn(asked) is None
    turn = session.begin(asked)
    turn.readers.add(asyncio.Event())  # which would make a request without a key a sibling
    if ended:
        session.end(turn, answer(world, said("A")))
        turn.sent = True
    assert session.find_turn(request(session, key="k")) is turn
    assert session.find_turn(request(session, key="another")) is None
    assert session.find_turn(request(session)) is None
    with pytest.raises(IdempotencyKeyReusedError) as refused:
        session.find_turn(request(session, text="else", key="k"))
    assert refused.value.field == "idempotency_key"


def test_without_a_key_only_a_retry_joins_a_turn() -> None:
    session, _ = new_session()
    turn = session.begin(request(session))
    turn.readers.add(asyncio.Event())
    assert session.find_turn(request(session)) is None
    assert session.find_turn(request(session, retry_count=1)) is turn
    assert session.find_turn(request(session, text="else", retry_count=1)) is None


def test_a_turn_that_failed_is_forgotten_and_its_siblings_stay() -> None:
    session, world = new_session()
    kept, failed = (session.begin(request(session)) for _ in range(2))
    assert [*session.in_flight] == [kept, failed]
    session.used_ms = 0
    session.end(failed, LOST)
    assert session.used_ms > 0
    assert [*session.in_flight] == [kept]
    assert {key: [*one.turns] for key, one in session.turns.items()} == {kept.fingerprint: [kept]}
    session.end(kept, answer(world, said("A")))
    assert not session.in_flight
    session.used_ms = 0
    session.end(kept, LOST)  # a cancellation that comes after the commit changes nothing
    session.end(failed, LOST)
    assert session.used_ms == 0
    assert kept.node is not None
    assert {key: [*one.turns] for key, one in session.turns.items()} == {kept.fingerprint: [kept]}
    assert session.find_answer(kept.answer_id) is kept
    session.forget(kept)
    session.forget(kept)
    assert not session.turns
    assert not session.answers


@pytest.mark.parametrize(
    ("recorded", "awaited", "replayed", "continued", "sent", "handed"),
    [
        pytest.param(False, False, False, False, False, False, id="no request waited"),
        pytest.param(False, True, False, False, False, True, id="a request waited"),
        pytest.param(False, False, True, False, False, True, id="a retry got it"),
        pytest.param(True, False, False, False, True, True, id="it was recorded as sent"),
        pytest.param(False, False, False, True, True, True, id="the agent continued from it"),
    ],
)
def test_a_restart_knows_the_answers_that_may_have_reached_the_agent(
    *, recorded: bool, awaited: bool, replayed: bool, continued: bool, sent: bool, handed: bool
) -> None:
    session, world = new_session()
    node = world.turn((user("q"),), said("A"))
    if replayed:
        node.reasons |= {REPLAYED}
    if continued:
        world.turn((user("q"), said("A"), user("on")), said("B"))
    receipt = AnswerReceipt("answer", "print", "key", 0, awaited=awaited, tries=3)
    for _ in range(2):
        session.restore(node, receipt, sent=recorded)
    first, second = session.turns["key"].turns
    assert first is not second
    assert (first.node_id, first.answer_id) == (node.node_id, "answer")
    assert (first.fingerprint, first.idempotency_key, first.tries) == ("print", "key", 3)
    assert (first.sent, first.handed) == (sent, handed)
    assert first.node is node
    assert not session.in_flight


def test_an_answer_that_was_neither_received_nor_continued_is_an_orphan() -> None:
    session, world = new_session()

    def committed(reply: str) -> tuple[Turn, Node]:
        turn = session.begin(request(session, key=reply))
        node = answer(world, said(reply))
        session.end(turn, node)
        return turn, node

    (handed, got), (awaited, coming) = committed("got"), committed("coming")
    (_, left), (_, continued) = committed("left"), committed("continued")
    session.begin(request(session, key="in flight"))
    handed.handed, awaited.readers = True, {asyncio.Event()}
    continued.reasons |= {ORPHANED, REPLAYED}  # by a close that could not be stored
    world.turn((user("q"), said("continued"), user("on")), said("B"))
    assert session.mark_orphans() == [left, continued]
    assert [node.reasons for node in (got, coming, left, continued)] == [
        frozenset(),
        frozenset(),
        frozenset({ORPHANED}),
        frozenset({REPLAYED}),
    ]


def test_a_new_session_was_used_when_it_was_made() -> None:
    before = clock.monotonic_ms()
    session, _ = new_session()
    assert before <= session.used_ms <= clock.monotonic_ms()
    assert not session.closing
