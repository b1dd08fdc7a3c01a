"""A request that engines die of is refused. A request that was beside it is not."""

import asyncio
from collections.abc import Sequence

import pytest

from rollmesh.mesh import Order, Suspects
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    EngineDeadError,
    EnginesBusyError,
    PoisonRequestError,
    RemoteError,
    RollmeshError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.runtime.mesh.generations.test_failover import (
    DEAD,
    STUCK,
    Fleet,
    Step,
    last,
    order_of,
    run,
    some,
)
from tests.waiting import until

RESET = RemoteError("Socket closed", "UNAVAILABLE")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.mesh.failover._FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("rollmesh.mesh.failover._LONGEST_RETRY_S", 0.001)


def taking(*engines: Sequence[Step]) -> Fleet:
    fleet = Fleet(*engines)
    fleet.takes = True
    return fleet


async def die(suspects: Suspects, engine_id: str, asked: engine_pb2.GenerateRequest) -> None:
    with pytest.raises(EngineDeadError):
        await killed(suspects, engine_id, asked)


def request(session: str = "", seed: int = 0) -> engine_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(seed=seed)
    return engine_pb2.GenerateRequest(
        request_id=f"r{seed}", session_id=session, token_ids_u32le=b"abcd", sampling=sampling
    )


async def killed(suspects: Suspects, engine_id: str, asked: engine_pb2.GenerateRequest) -> None:
    with suspects.attempt(asked) as attempt:
        await suspects.isolate(attempt, 60_000)
        attempt.engine_id = engine_id
        raise EngineDeadError("it died")


@pytest.mark.parametrize("death", [DEAD, STUCK, RESET], ids=["dead", "silent", "reset"])
async def test_the_third_engine_that_dies_before_the_first_token_is_the_last(
    death: RollmeshError,
) -> None:
    fleet = taking(*[[death]] * 8)
    with pytest.raises(PoisonRequestError, match="e0, e1, e2"):
        await run(fleet, order_of())
    assert (len(fleet.requests), fleet.losses) == (3, 3)
    with pytest.raises(PoisonRequestError):
        await run(fleet, order_of(seed=5))  # the agent's retry
    assert (len(fleet.requests), fleet.losses) == (3, 3)


async def test_silence_before_the_first_token_does_not_take_the_engine_away() -> None:
    fleet = taking([STUCK], [some(1), STUCK], [last(2)])
    await run(fleet, order_of())
    assert fleet.outcomes == ["ENGINE_DEAD", "ENGINE_FAULT", "answered"]


async def test_engines_that_never_had_the_request_say_nothing_about_it() -> None:
    fleet = Fleet(*[[DEAD]] * 7, [last(1)])
    await run(fleet, order_of())
    assert len(fleet.requests) == 8


async def test_a_first_token_clears_a_request() -> None:
    fleet = taking([DEAD], [DEAD], [some(1), DEAD], [DEAD], [DEAD], [last(2)])
    assert await run(fleet, order_of()) == ([[1], [2]], [1, 2])


async def test_engines_that_lie_are_not_killed_by_the_request() -> None:
    fleet = taking(*[[some(500)]] * 4, [last(1)])
    await run(fleet, order_of())
    assert len(fleet.requests) == 5


async def test_equal_requests_that_die_on_one_engine_count_once() -> None:
    suspects = Suspects()
    there = asyncio.Barrier(8)

    async def one(session: str) -> None:
        with suspects.attempt(request(session)) as attempt:
            attempt.engine_id = "e0"
            await there.wait()
            raise EngineDeadError("it died")

    deaths = await asyncio.gather(*(one(f"s{at}") for at in range(8)), return_exceptions=True)
    assert [type(death) for death in deaths] == [EngineDeadError] * 8
    await die(suspects, "e1", request())
    with pytest.raises(PoisonRequestError):
        await die(suspects, "e2", request(seed=9))


async def test_requests_in_quarantine_run_one_at_a_time_until_their_first_token() -> None:
    suspects, asked = Suspects(), [request(), request()]
    asked[1].token_ids_u32le = b"efgh"
    for one in asked:
        await die(suspects, "e0", one)
        await die(suspects, "e1", one)
    order: list[str] = []

    async def run_second() -> None:
        with suspects.attempt(asked[1]) as second:
            await suspects.isolate(second, 60_000)
            order.append("second runs")

    with suspects.attempt(asked[0]) as first:
        await suspects.isolate(first, 60_000)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(run_second())
            for _ in range(10):
                await asyncio.sleep(0)
            order.append("first is answered")
            suspects.answered(first)
            await waiting
    assert order == ["first is answered", "second runs"]


def two_suspects() -> tuple[Order, Order]:
    """Two unequal requests, of two sessions."""
    first, second = order_of(top_k=1), order_of(top_k=2)
    second.session_id = "other"
    return first, second


async def put_into_quarantine(suspects: Suspects, *asked: engine_pb2.GenerateRequest) -> None:
    for one in asked:
        await die(suspects, "d0", one)
        await die(suspects, "d1", one)


async def test_a_suspect_that_waits_for_an_engine_holds_up_no_other() -> None:
    fleet = taking([last(2)], [last(1)])
    first, second = two_suspects()
    await put_into_quarantine(fleet.suspects, first.generation.request, second.generation.request)
    gate = fleet.gates["s"] = asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        waiting = group.create_task(run(fleet, first))
        await until(lambda: fleet.waiting)
        assert await run(fleet, second) == ([[2]], [2])
        gate.set()
    assert waiting.result() == ([[1]], [1])


async def test_a_suspect_is_refused_where_an_equal_one_is_found_to_be_poison() -> None:
    fleet = taking()
    order, _ = two_suspects()
    asked = order.generation.request
    await put_into_quarantine(fleet.suspects, asked)

    async def die_last() -> None:
        with fleet.suspects.attempt(asked) as attempt:
            await fleet.suspects.isolate(attempt, 60_000)
            attempt.engine_id = "d2"
            await until(lambda: fleet.excluded)  # the equal one has its lease
            raise EngineDeadError("it died")

    ends = await asyncio.gather(die_last(), run(fleet, order), return_exceptions=True)
    assert [type(end) for end in ends] == [PoisonRequestError] * 2
    assert "d0, d1, d2" in str(ends[0])
    assert not fleet.requests
    assert fleet.outcomes == ["POISON_REQUEST"]


async def test_the_wait_in_quarantine_ends_with_a_typed_error() -> None:
    suspects, asked = Suspects(), [request(), request()]
    asked[1].token_ids_u32le = b"efgh"
    await put_into_quarantine(suspects, *asked)
    with suspects.attempt(asked[0]) as first, suspects.attempt(asked[1]) as second:
        await suspects.isolate(first, 0)
        with pytest.raises(EnginesBusyError, match="within 10 ms"):
            await suspects.isolate(second, 10)
        suspects.answered(first)
        await suspects.isolate(second, 0)
        assert second.is_alone


async def test_a_stop_ends_the_wait_in_quarantine() -> None:
    fleet = taking()
    order, other = two_suspects()
    asked = other.generation.request
    await put_into_quarantine(fleet.suspects, asked, order.generation.request)
    with fleet.suspects.attempt(asked) as attempt:
        await fleet.suspects.isolate(attempt, 60_000)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(run(fleet, order))
            await until(lambda: fleet.excluded)
            order.stop(sampling_pb2.FINISH_REASON_ABORT)
            assert await waiting == ([], [])
    assert not fleet.requests
    assert not fleet.outcomes  # nothing is known of the engine


async def test_suspects_of_two_models_run_at_the_same_time() -> None:
    suspects, asked = Suspects(), [request(), request()]
    asked[1].model = "another"
    await put_into_quarantine(suspects, *asked)
    with suspects.attempt(asked[0]) as first, suspects.attempt(asked[1]) as second:
        await suspects.isolate(first, 60_000)
        await suspects.isolate(second, 0)
        assert first.is_alone
        assert second.is_alone


async def test_a_request_that_shares_three_deaths_and_is_not_to_blame_is_answered() -> None:
    suspects, asked = Suspects(), [request(), request()]
    asked[1].token_ids_u32le = b"efgh"
    for one in asked:
        await die(suspects, "e0", one)
        await die(suspects, "e1", one)
    with pytest.raises(PoisonRequestError):
        await die(suspects, "e2", asked[0])
    with suspects.attempt(asked[1]) as attempt:
        await suspects.isolate(attempt, 60_000)
        suspects.answered(attempt)
    for _ in range(2):
        await die(suspects, "e3", asked[1])


async def test_a_verdict_is_forgotten_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    suspects = Suspects()
    now = 1_000
    monkeypatch.setattr(clock, "monotonic_ms", lambda: now)
    for at in range(2):
        now += 1
        await die(suspects, f"e{at}", request())
    now += 1
    with pytest.raises(PoisonRequestError):
        await die(suspects, "e2", request())
    now += 600_001
    await die(suspects, "e2", request())


async def test_remembered_entries_are_bounded() -> None:
    suspects = Suspects()
    for at in range(1_100):
        asked = request()
        asked.token_ids_u32le = at.to_bytes(4, "little")
        await die(suspects, "e0", asked)
    assert len(suspects) == 1_024
