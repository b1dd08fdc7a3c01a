"""Budgets of sessions over gRPC: calls, sampled tokens and time, also for calls at once."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from rollmesh.client import SessionResult, Subscription
from rollmesh.runtime import clock
from rollmesh.runtime.errors import BudgetSpentError, InvalidFieldError
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2
from tests.gateway.live import Cut, LiveMesh
from tests.messages import chat_in, close_of, said
from tests.waiting import until

TIMEOUT_S = 180
BUDGET = trajectory_pb2.FIDELITY_REASON_BUDGET
REFUSE = gateway_pb2.BUDGET_ACTION_REFUSE
REPLY = 24  # tokens of a whole answer, with its end


async def opened(mesh: LiveMesh, **budget: Any) -> Any:
    request = gateway_pb2.CreateSessionRequest(budget=gateway_pb2.SessionBudget(**budget))
    with typed_errors():
        return await mesh.stub.CreateSession(request, wait_for_ready=True)


async def ask(mesh: LiveMesh, session: Any, text: str = "q", **fields: Any) -> Any:
    request = chat_in(session, said(text), **fields)
    with typed_errors():
        return await mesh.stub.Chat(request, timeout=TIMEOUT_S, wait_for_ready=True)


async def streamed(mesh: LiveMesh, session: Any, text: str, **fields: Any) -> list[Any]:
    request = gateway_pb2.StreamChatRequest(chat=chat_in(session, said(text), **fields))
    with typed_errors():
        return [one async for one in mesh.stub.StreamChat(request, timeout=TIMEOUT_S)]


def is_final(answer: gateway_pb2.ChatAnswer) -> bool:
    """Whether an answer is a clean one that was not sampled."""
    if BUDGET not in answer.reasons or answer.completion_tokens:
        return False
    assert answer.finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert answer.answer_id
    return answer.message.content[0].text.startswith("I have to stop here: the budget of")


async def closed(mesh: LiveMesh, session: Any) -> SessionResult:
    await mesh.stub.CloseSession(close_of(session), timeout=TIMEOUT_S)
    async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
        (result,) = (await anext(deliveries)).sessions
    return result


def sampled(result: SessionResult) -> int:
    return sum(int(one.loss_mask.sum()) for one in result.trajectories)


async def test_calls_beyond_the_budget_get_a_final_answer_that_is_not_trained(
    mesh: LiveMesh,
) -> None:
    session = await opened(mesh, calls=2)
    for text in ("a", "b"):
        assert not is_final((await ask(mesh, session, text)).answers[0])
    first, second = [(await ask(mesh, session, "c")).answers[0] for _ in range(2)]
    assert is_final(first)
    assert is_final(second)
    assert first.answer_id != second.answer_id
    begun, delta, done = await streamed(mesh, session, "c")
    assert is_final(done.done)
    assert begun.begun.answer_id == done.done.answer_id
    assert delta.delta.content == done.done.message.content[0].text
    result = await closed(mesh, session)
    assert (result.turns, result.budgets_spent) == (2, ("CALLS",))
    assert len(mesh.generations) == 2
    assert {one.reasons for one in result.trajectories} == {("BUDGET",)}


async def test_a_session_that_refuses_names_its_budget(mesh: LiveMesh) -> None:
    session = await opened(mesh, calls=1, action=REFUSE)
    await ask(mesh, session)
    for refused in (ask(mesh, session, "b"), streamed(mesh, session, "b")):
        with pytest.raises(BudgetSpentError, match="budget of calls is spent, which is 1") as error:
            await refused
        assert error.value.code == "OUT_OF_RANGE"
        assert (error.value.metadata["budget"], error.value.metadata["limit"]) == ("calls", "1")
    assert (await closed(mesh, session)).budgets_spent == ("CALLS",)


async def test_a_session_that_ends_within_its_budget_carries_nothing(mesh: LiveMesh) -> None:
    session = await opened(mesh, calls=1, sampled_tokens=1000, time_ms=10**9)
    await ask(mesh, session)
    result = await closed(mesh, session)
    assert result.budgets_spent == ()
    assert result.trajectories[0].reasons == ("EXACT",)


async def test_a_retry_of_an_answered_turn_costs_nothing(mesh: LiveMesh) -> None:
    session = await opened(mesh, calls=1)
    first = (await ask(mesh, session, retry_count=0)).answers[0]
    again = (await ask(mesh, session, retry_count=1)).answers[0]
    assert again.answer_id == first.answer_id
    await mesh.start_gateway()
    again = (await ask(mesh, session, retry_count=2)).answers[0]
    assert again.answer_id == first.answer_id
    assert is_final((await ask(mesh, session, "new")).answers[0])


async def test_of_two_calls_that_race_for_the_last_one_is_sampled(mesh: LiveMesh) -> None:
    session = await opened(mesh, calls=3)
    await ask(mesh, session, "first")
    await ask(mesh, session, "second")
    gates = [Cut(0, "waits"), Cut(0, "waits")]
    mesh.cuts += gates
    racing = [asyncio.create_task(ask(mesh, session, f"race {at}")) for at in range(2)]
    done, _ = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
    assert [is_final(one.result().answers[0]) for one in done] == [True]
    for gate in gates:
        gate.gate.set()
    answers = [(await one).answers[0] for one in racing]
    assert sorted(map(is_final, answers)) == [False, True]
    assert len(mesh.generations) == 3


async def test_a_call_that_fails_gives_its_place_back(mesh: LiveMesh) -> None:
    session = await opened(mesh, calls=1, sampled_tokens=REPLY)
    mesh.cuts.append(Cut(0, "waits"))
    call = mesh.stub.Chat(chat_in(session, said("left")))
    waiting = asyncio.ensure_future(call)
    await until(lambda: len(mesh.generations) == 1)
    call.cancel()
    await asyncio.wait([waiting])
    await until(lambda: not mesh.gateway.session(session.session_id).in_flight)
    assert not is_final((await ask(mesh, session, "kept")).answers[0])


async def test_a_turn_is_cut_to_the_rest_of_the_tokens(mesh: LiveMesh) -> None:
    session = await opened(mesh, sampled_tokens=REPLY + 6)
    whole = (await ask(mesh, session, "a")).answers[0]
    assert BUDGET not in whole.reasons
    cut = (await ask(mesh, session, "b")).answers[0]
    assert cut.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert whole.completion_tokens + cut.completion_tokens == REPLY + 6
    assert BUDGET in cut.reasons
    assert is_final((await ask(mesh, session, "c")).answers[0])
    result = await closed(mesh, session)
    assert (sampled(result), result.budgets_spent) == (REPLY + 6, ("SAMPLED_TOKENS",))


async def test_a_cut_turn_alone_says_which_budget_it_was(mesh: LiveMesh) -> None:
    session = await opened(mesh, sampled_tokens=5)
    low = sampling_pb2.SamplingParams(min_tokens=9)  # above the rest
    assert (await ask(mesh, session, sampling=low)).answers[0].completion_tokens == 5
    result = await closed(mesh, session)
    assert result.budgets_spent == ("SAMPLED_TOKENS",)
    assert set(result.trajectories[0].reasons) >= {"BUDGET", "LENGTH_CUT"}


@pytest.mark.parametrize("most", [REPLY * 3 + 1, REPLY * 4 - 1, REPLY * 5])
async def test_tokens_of_many_calls_at_once_never_exceed_the_budget(
    mesh: LiveMesh, most: int
) -> None:
    session = await opened(mesh, sampled_tokens=most)
    limits = sampling_pb2.SamplingParams(max_tokens=REPLY)
    calls = [ask(mesh, session, f"q{at}", sampling=limits) for at in range(4)]
    calls += [ask(mesh, session, f"n{at}") for at in range(2)]  # may take all that is left
    answers = [one.answers[0] for one in await asyncio.gather(*calls)]
    streams = [await streamed(mesh, session, "last", choices=2)]
    answers += [one.done for stream in streams for one in stream if one.HasField("done")]
    used = sum(one.completion_tokens for one in answers)
    assert used == most
    assert is_final(answers[-1])
    result = await closed(mesh, session)
    assert (sampled(result), result.budgets_spent) == (most, ("SAMPLED_TOKENS",))


async def test_choices_of_a_request_share_the_rest_of_the_tokens(mesh: LiveMesh) -> None:
    session = await opened(mesh, sampled_tokens=2 * REPLY + 3)
    answers = (await ask(mesh, session, choices=4)).answers
    found = Counter((one.completion_tokens, is_final(one)) for one in answers)
    assert found == {(REPLY, False): 2, (3, False): 1, (0, True): 1}


async def test_a_stream_that_finds_nothing_left_ends_with_a_final_answer(mesh: LiveMesh) -> None:
    session = await opened(mesh, sampled_tokens=REPLY)
    gate = Cut(0, "waits")
    mesh.cuts.append(gate)
    first = asyncio.create_task(ask(mesh, session, "a"))
    await until(lambda: len(mesh.generations) == 1)
    second = asyncio.create_task(streamed(mesh, session, "b"))  # waits for the first one
    await until(lambda: len(mesh.gateway.session(session.session_id).in_flight) == 2)
    gate.gate.set()
    assert not is_final((await first).answers[0])
    begun, *_, done = await second
    assert is_final(done.done)
    assert begun.begun.answer_id == done.done.answer_id
    assert done.done.prompt_tokens > 1


async def test_no_turn_begins_after_the_time(
    mesh: LiveMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(mesh, time_ms=10**8)
    await ask(mesh, session)
    now_ms = clock.unix_ms()
    monkeypatch.setattr(clock, "unix_ms", lambda: now_ms + 10**8)
    assert is_final((await ask(mesh, session, "late")).answers[0])
    assert not is_final((await ask(mesh, session, retry_count=1)).answers[0])
    assert (await closed(mesh, session)).budgets_spent == ("TIME",)


async def test_a_budget_and_its_end_outlive_the_gateway(mesh: LiveMesh) -> None:
    session = await opened(mesh, calls=2, sampled_tokens=REPLY * 2)
    await ask(mesh, session, "a")
    await mesh.start_gateway()
    await ask(mesh, session, "b")
    assert is_final((await ask(mesh, session, "c")).answers[0])
    await mesh.start_gateway()
    result = await closed(mesh, session)
    assert result.budgets_spent == ("CALLS",)
    assert len(mesh.generations) == 2


async def test_an_exported_tree_and_an_empty_session_carry_the_budget(mesh: LiveMesh) -> None:
    request = gateway_pb2.CreateSessionRequest(
        export_mode=gateway_pb2.EXPORT_MODE_TREE, budget=gateway_pb2.SessionBudget(calls=1)
    )
    session = await mesh.stub.CreateSession(request)
    assert is_final((await ask(mesh, session, choices=2)).answers[1])
    result = await closed(mesh, session)
    assert (result.budgets_spent, result.turns) == (("CALLS",), 0)
    assert result.tree is not None
    assert result.tree.reasons == ("BUDGET",)


@pytest.mark.parametrize(
    ("budget", "field"),
    [({"action": 9}, "budget.action"), ({"time_ms": 1 << 60}, "budget.time_ms")],
)
async def test_a_bad_budget_is_named(mesh: LiveMesh, budget: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        await opened(mesh, **budget)
    assert refused.value.field == field
