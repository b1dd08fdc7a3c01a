"""What a session decides: which turn a request gets, what it is told, which answers are orphans."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from rollmesh.chat.messages import Message, ToolCall
from rollmesh.chat.parsing.events import ReasoningEvent, TextEvent, ToolCallEvent
from rollmesh.gateway.conversation.nodes import Node
from rollmesh.gateway.conversation.session import (
    Answered,
    Begun,
    PromptIds,
    Reading,
    Session,
    Turn,
    TurnEvent,
    TurnRequest,
)
from rollmesh.gateway.conversation.spec import AnswerReceipt, SessionSpec
from rollmesh.gateway.protocol.requests import read_choices
from rollmesh.runtime import clock
from rollmesh.runtime.errors import GenerationAbortedError, IdempotencyKeyReusedError
from rollmesh.v1 import gateway_pb2, trajectory_pb2
from tests.gateway.worlds import World, said, user
from tests.messages import said as message

ORPHANED = trajectory_pb2.FIDELITY_REASON_ORPHANED
REPLAYED = trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY
LOST = GenerationAbortedError("the engine is gone")
TIMEOUT_S = 60


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


def begun(session: Session, asked: TurnRequest) -> Turn:
    turn = Turn.of(asked, "s", session.tree.reserve_id())
    session.begin(turn)
    return turn


def answer(world: World, turn: Turn, reply: Message) -> Answered:
    """What a turn is once it is committed."""
    node = world.turn((user("q"),), reply)
    receipt = AnswerReceipt(turn.answer_id, turn.fingerprint, turn.idempotency_key, 0)
    return Answered(node, receipt)


def test_a_turn_is_known_by_its_session_and_its_node() -> None:
    session, _ = new_session()
    asked = dataclasses.replace(
        request(session, key="k", stream=True),
        finish_on_disconnect=True,
        lineage=trajectory_pb2.LINEAGE_AUXILIARY,
    )
    turn = Turn.of(asked, "s", 7)
    assert (turn.node_id, turn.answer_id) == (7, "chatcmpl-s-7")
    assert (turn.stream, turn.finish_on_disconnect, turn.lineage) == (
        True,
        True,
        trajectory_pb2.LINEAGE_AUXILIARY,
    )
    assert turn.identity == asked.identity == asked.idempotency_key
    plain = request(session)
    assert Turn.of(plain, "s", 8).identity == plain.identity == plain.fingerprint
    assert (turn.waiting, turn.joins, turn.tries) == (0, 0, 0)
    said_so = (turn.sent, turn.handed, turn.committing, turn.ended, turn.has_emitted)
    assert not any(said_so)


def test_an_answer_is_needed_early_where_it_is_streamed_or_may_be_cut() -> None:
    session, _ = new_session()
    whole = request(session)
    assert not whole.may_stop_early
    assert request(session, stream=True).may_stop_early
    assert dataclasses.replace(whole, stops=("stop",)).may_stop_early
    one_call = dataclasses.replace(whole.wanted, one_call=True)
    assert dataclasses.replace(whole, wanted=one_call).may_stop_early


@pytest.mark.parametrize("ended", [False, True])
def test_a_key_names_one_sample_of_one_request(*, ended: bool) -> None:
    session, world = new_session()
    asked = request(session, key="k")
    assert session.find_turn(asked) is None
    turn = begun(session, asked)
    turn.waiting = 1  # which would make a request without a key a sibling
    if ended:
        session.end(turn, answer(world, turn, said("A")))
        turn.sent = True
    assert session.find_turn(request(session, key="k")) is turn
    assert session.find_turn(request(session, key="another")) is None
    assert session.find_turn(request(session)) is None
    with pytest.raises(IdempotencyKeyReusedError) as refused:
        session.find_turn(request(session, text="else", key="k"))
    assert refused.value.field == "idempotency_key"


def test_without_a_key_only_a_retry_joins_a_turn() -> None:
    session, _ = new_session()
    turn = begun(session, request(session))
    turn.waiting = 1
    assert session.find_turn(request(session)) is None
    assert session.find_turn(request(session, retry_count=1)) is turn
    assert session.find_turn(request(session, text="else", retry_count=1)) is None


def test_a_turn_that_failed_is_forgotten_and_its_siblings_stay() -> None:
    session, world = new_session()
    kept, failed = (begun(session, request(session)) for _ in range(2))
    assert session.in_flight == [kept, failed]
    session.used_ms = 0
    session.end(failed, LOST)
    assert session.used_ms > 0
    assert session.in_flight == [kept]
    assert session.turns == {kept.identity: [kept]}
    session.end(kept, answer(world, kept, said("A")))
    assert session.in_flight == []
    session.used_ms = 0
    session.end(kept, LOST)  # a cancellation that comes after the commit changes nothing
    session.end(failed, LOST)
    assert session.used_ms == 0
    assert kept.answered is not None
    assert session.turns == {kept.identity: [kept]}
    session.forget(kept)
    session.forget(kept)
    assert session.turns == {}


@pytest.mark.parametrize(
    ("recorded", "awaited", "replayed", "continued", "sent", "handed"),
    [
        pytest.param(False, False, False, False, False, False, id="nobody waited for it"),
        pytest.param(False, True, False, False, False, True, id="somebody waited for it"),
        pytest.param(False, False, True, False, False, True, id="a retry got it"),
        pytest.param(True, False, False, False, True, True, id="it was recorded as sent"),
        pytest.param(False, False, False, True, True, True, id="the agent continued from it"),
    ],
)
def test_a_restart_knows_what_may_have_reached_the_agent(
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
        session.restore(Answered(node, receipt), sent=recorded)
    first, second = session.turns["key"]
    assert first is not second
    assert (first.node_id, first.answer_id) == (node.node_id, "answer")
    assert (first.fingerprint, first.idempotency_key, first.tries) == ("print", "key", 3)
    assert (first.sent, first.handed) == (sent, handed)
    assert first.answered == Answered(node, receipt)
    assert session.in_flight == []


def test_an_answer_that_nobody_got_and_nobody_continued_is_an_orphan() -> None:
    session, world = new_session()

    def committed(reply: str) -> tuple[Turn, Node]:
        turn = begun(session, request(session, key=reply))
        answered = answer(world, turn, said(reply))
        session.end(turn, answered)
        return turn, answered.node

    (handed, got), (awaited, coming) = committed("got"), committed("coming")
    (_, left), (_, continued) = committed("left"), committed("continued")
    begun(session, request(session, key="in flight"))
    handed.handed, awaited.waiting = True, 1
    continued.reasons |= {ORPHANED, REPLAYED}  # by a close that could not be stored
    world.turn((user("q"), said("continued"), user("on")), said("B"))
    assert session.mark_orphans() == [left, continued]
    assert [node.reasons for node in (got, coming, left, continued)] == [
        frozenset(),
        frozenset(),
        frozenset({ORPHANED}),
        frozenset({REPLAYED}),
    ]


async def events_of(turn: Turn, count: int | None = None) -> list[TurnEvent]:
    """All events of a turn, or the first of them."""
    found: list[TurnEvent] = []
    events: AsyncIterator[TurnEvent] = turn.events()
    async with asyncio.timeout(TIMEOUT_S):
        async for event in events:
            found.append(event)
            if len(found) == count:
                break
    return found


async def test_a_reader_gets_the_prompt_and_the_events_of_the_try_that_succeeded() -> None:
    session, world = new_session()
    turn = begun(session, request(session, stream=True))
    prompt = PromptIds(b"1234")
    turn.begin(prompt)
    assert not turn.has_emitted  # the prompt is no part of the answer
    turn.emit([])
    turn.emit([TextEvent("lost")])
    assert turn.has_emitted
    turn.begin_again()
    assert not turn.has_emitted
    turn.emit([TextEvent("A"), TextEvent("B")])
    early = [Begun(turn.answer_id), Reading(0), prompt, TextEvent("A"), TextEvent("B")]
    assert await events_of(turn, len(early)) == early
    reading = asyncio.ensure_future(events_of(turn))
    waiting = asyncio.ensure_future(turn.result())
    await asyncio.sleep(0)  # both wait now
    turn.emit([TextEvent("C")])
    await asyncio.sleep(0)
    answered = answer(world, turn, said("ABC"))
    session.end(turn, answered)
    assert await reading == [*early, TextEvent("C"), answered]
    async with asyncio.timeout(TIMEOUT_S):
        assert await waiting is answered
    assert turn.ended


async def test_an_answer_that_is_there_is_told_in_the_order_of_its_parts() -> None:
    session, world = new_session()
    turn = begun(session, request(session))
    calls = (ToolCall("one", "f", "{}"), ToolCall("two", "g", '{"a": 1}'))
    reply = Message("assistant", "text", calls, reasoning="thought")
    session.end(turn, answer(world, turn, reply))
    assert await events_of(turn) == [
        Begun(turn.answer_id),
        Reading(turn.prompt_tokens),
        ReasoningEvent("thought"),
        TextEvent("text"),
        ToolCallEvent(0, "one", "f", "{}"),
        ToolCallEvent(1, "two", "g", '{"a": 1}'),
        turn.answered,
    ]
    empty = begun(session, request(session))
    session.end(empty, answer(world, empty, said("")))
    assert await events_of(empty) == [
        Begun(empty.answer_id),
        Reading(empty.prompt_tokens),
        empty.answered,
    ]


async def never() -> None:
    await asyncio.Event().wait()


async def test_all_that_wait_for_a_turn_that_is_cancelled_get_its_error() -> None:
    session, _ = new_session()
    turn = begun(session, request(session))
    reading = asyncio.ensure_future(events_of(turn))
    waiting = asyncio.ensure_future(turn.result())
    turn.task = asyncio.ensure_future(never())
    await asyncio.sleep(0)
    turn.cancel(LOST)
    async with asyncio.timeout(TIMEOUT_S):
        read, told, ran = await asyncio.gather(reading, waiting, turn.task, return_exceptions=True)
    assert read is told is LOST
    assert isinstance(ran, asyncio.CancelledError)
    assert turn.ended
    assert turn.answered is None
    with pytest.raises(GenerationAbortedError):  # so does one that reads only now
        await events_of(turn)
    assert not turn.has_emitted


def test_a_new_session_was_used_when_it_was_made() -> None:
    before = clock.monotonic_ms()
    session, _ = new_session()
    assert before <= session.used_ms <= clock.monotonic_ms()
    assert not session.closing
