"""Attempts that fail, are late or cut off: each place of a group has one that counts."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rollmesh.client import Client, Retries, Session, TimeLimits, rollout, rollout_groups
from rollmesh.runtime.errors import SessionUnknownError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, gateway_pb2, session_pb2
from tests.client.conftest import addresses_of, length, one_sample
from tests.collector.collectors import collector_at
from tests.sidecar.scripted_gateway import ScriptedGateway, serving


async def test_cancelling_a_rollout_closes_open_sessions_as_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    started = asyncio.Event()

    async def run(prompt: Any, session: Session) -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(rollout(client, [None], runner=run, n=1))
        await started.wait()
        running.cancel()
    assert gateway.closed[0].outcome == session_pb2.SESSION_OUTCOME_ABORTED


async def test_a_session_that_could_not_be_opened_is_retried_with_the_same_request(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.failures = [SessionUnknownError("broken"), SessionUnknownError("broken")]
    summary, outcome = await one_sample(client, length, retries=Retries(tries=3, delay_s=0.01))
    assert (summary.counts, summary.lost) == ({"COMPLETED": 1}, 0)
    assert (outcome.attempts, len({one.request_id for one in gateway.opened})) == (3, 1)


async def test_a_group_with_a_lost_seat_is_delivered_and_the_seat_counts_as_lost(
    gateway: ScriptedGateway, address: str, tmp_path: Path
) -> None:
    gateway.failures = [SessionUnknownError("broken")]
    async with collector_at(tmp_path) as collector:
        addresses = replace(addresses_of(gateway=address), collector=collector)
        async with Client(addresses) as client, client.subscribe("trainer") as groups:
            summary = await rollout(client, ["p"], runner=length, n=2, concurrency=1)
            assert (summary.counts, summary.lost) == ({"COMPLETED": 1, "LOST": 1}, 1)
            assert "broken" in str(summary)
            # The gateway of this test delivers nothing: the other seat is abandoned here.
            (opened,) = gateway.closed
            await client.abandon_seat(gateway.opened[0].group_id, 1, 2, reason="by hand")
            async with asyncio.timeout(60):
                delivery = await anext(groups)
    assert opened.outcome == session_pb2.SESSION_OUTCOME_COMPLETED
    assert delivery.partial
    assert "broken" in delivery.sessions[0].abandoned


async def test_a_rollout_cancelled_while_it_supersedes_a_session_abandons_the_seat(
    gateway: ScriptedGateway, address: str, tmp_path: Path
) -> None:
    closing, go_on = asyncio.Event(), asyncio.Event()

    async def close(request: gateway_pb2.CloseSessionRequest) -> None:
        closing.set()
        await go_on.wait()

    async def run(prompt: Any, session: Session) -> None:
        raise ValueError

    gateway.closing = close
    async with collector_at(tmp_path) as collector:
        addresses = replace(addresses_of(gateway=address), collector=collector)
        async with Client(addresses) as client, asyncio.timeout(60):
            async with client.subscribe("trainer") as groups, asyncio.TaskGroup() as tasks:
                retries = Retries(tries=2)
                running = tasks.create_task(
                    rollout(client, [None], runner=run, n=1, retries=retries)
                )
                await closing.wait()
                running.cancel()
                go_on.set()
                delivery = await anext(groups)
    assert gateway.closed[0].superseded
    assert "cancelled" in delivery.sessions[0].abandoned


async def test_seats_that_a_cancelled_rollout_did_not_fill_are_abandoned(
    gateway: ScriptedGateway, address: str, tmp_path: Path
) -> None:
    started = asyncio.Event()

    async def run(prompt: Any, session: Session) -> None:
        started.set()
        await asyncio.Event().wait()

    async with collector_at(tmp_path) as collector:
        addresses = replace(addresses_of(gateway=address), collector=collector)
        async with Client(addresses) as client, asyncio.timeout(60):
            async with asyncio.TaskGroup() as group:
                running = group.create_task(rollout(client, [None], runner=run, n=4, concurrency=1))
                await started.wait()
                running.cancel()
        async with open_channel(collector) as channel:
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            request = collector_pb2.ListGroupsRequest()
            (stored,) = (await stub.ListGroups(request, timeout=60)).groups
    assert gateway.closed[0].outcome == session_pb2.SESSION_OUTCOME_ABORTED
    assert (stored.samples, stored.group_size) == (3, 4)


async def test_a_failed_attempt_is_superseded_by_one_in_a_new_session(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            session.reward = 7.0
            raise ValueError("once")
        return 1.0

    summary, outcome = await one_sample(
        client,
        run,
        retries=Retries(tries=2, delay_s=0.01),
        metadata=lambda prompt: {"prompt": prompt},
    )
    assert (summary.counts, summary.retries, outcome.attempts) == ({"COMPLETED": 1}, 1, 2)
    first, second = gateway.closed
    assert (first.superseded, first.outcome) == (True, session_pb2.SESSION_OUTCOME_FAILED)
    assert not first.rewards.HasField("reward")
    assert (second.superseded, second.rewards.reward) == (False, 1.0)
    one, two = gateway.opened
    assert (one.group_id, one.sample_index) == (two.group_id, two.sample_index)
    assert dict(one.metadata) == {"prompt": "p"}
    assert dict(two.metadata) == {"prompt": "p", "attempt": "2"}


async def test_a_failed_attempt_that_cannot_be_closed_has_no_successor(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        gateway.failures.append(SessionUnknownError("lost"))
        raise ValueError

    summary = await rollout(client, ["p"], runner=run, n=1, retries=Retries(tries=5))
    assert (summary.counts, summary.errors) == ({"FAILED": 1}, {"ValueError": 1})
    assert len(gateway.opened) == 1


@pytest.mark.parametrize(("time_limits", "attempts"), [(False, 1), (True, 2)])
async def test_an_agent_over_its_time_is_tried_again_only_where_that_is_wanted(
    gateway: ScriptedGateway, client: Client, time_limits: object, attempts: int
) -> None:
    async def run(prompt: str, session: Session) -> None:
        await asyncio.Event().wait()

    retries = Retries(tries=2, delay_s=0.01, time_limits=bool(time_limits))
    await rollout(client, ["p"], runner=run, n=1, retries=retries, timeout_s=0.05)
    assert len(gateway.opened) == attempts


@settings(max_examples=30)
@given(
    plan=st.lists(
        st.lists(
            st.lists(st.sampled_from(["raises", "is late"]), max_size=4), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=3,
    ),
    needed=st.integers(0, 3),
    concurrency=st.integers(1, 5),
)
def test_every_place_of_every_group_has_one_session_that_counts_whatever_fails(
    plan: list[list[list[str]]], needed: int, concurrency: int
) -> None:
    gateway, whole = ScriptedGateway(), []

    async def run(sample: int, session: Session) -> float:
        request = gateway.opened[int(session.session_id, 16) - 0x5E550000 - 1]
        fates = plan[sample][request.sample_index]
        attempt = int(request.metadata["attempt"] or 1)
        if attempt <= len(fates):
            if fates[attempt - 1] == "raises":
                raise ValueError
            await asyncio.Event().wait()
        return 1.0

    async def roll() -> None:
        async with serving(gateway) as address, Client(addresses_of(gateway=address)) as client:
            async with rollout_groups(
                client,
                range(len(plan)),
                runner=run,
                n=3,
                needed=needed,
                concurrency=concurrency,
                timeout_s=0.02,
                retries=Retries(tries=3, delay_s=0.001, time_limits=True),
            ) as groups:
                whole.extend([group async for group in groups])

    asyncio.run(roll())
    opened = {f"5e55{at:04x}": request for at, request in enumerate(gateway.opened, 1)}
    closed = Counter(close.session_id for close in gateway.closed)
    assert closed == Counter(opened.keys())  # each once, none left open
    counting = [opened[close.session_id] for close in gateway.closed if not close.superseded]
    assert len({request.group_id for request in counting}) == len(plan)
    places = Counter((request.group_id, request.sample_index) for request in counting)
    assert set(places.values()) == {1}
    assert len(places) == 3 * len(plan)
    assert len(whole) == len(plan)
    for group in whole:
        completed = sum(session.outcome == "COMPLETED" for session in group.sessions)
        assert group.succeeded == (completed >= needed)
        last = {session.session_id for session in group.sessions}
        assert not last & {close.session_id for close in gateway.closed if close.superseded}


async def test_cancelling_twice_still_closes_open_sessions(
    gateway: ScriptedGateway, client: Client
) -> None:
    started, cleaning = asyncio.Event(), asyncio.Event()

    async def run(prompt: Any, session: Session) -> None:
        session.reward = 7.0
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await asyncio.Event().wait()

    limits = TimeLimits(grace_s=0.2)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(rollout(client, [None], runner=run, n=1, limits=limits))
        await started.wait()
        running.cancel()
        await cleaning.wait()
        running.cancel()
    assert [closed.outcome for closed in gateway.closed] == [session_pb2.SESSION_OUTCOME_ABORTED]
    assert not gateway.closed[0].rewards.HasField("reward")


async def test_a_session_that_opens_while_the_rollout_is_cancelled_is_closed(
    gateway: ScriptedGateway, client: Client
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    create = gateway.CreateSession

    async def slow(request: Any, context: Any) -> Any:
        asked.set()
        await answer.wait()
        return await create(request, context)

    gateway.CreateSession = slow  # type: ignore[method-assign]
    async with asyncio.timeout(60), serving(gateway) as address:
        async with Client(addresses_of(gateway=address)) as other, asyncio.TaskGroup() as group:
            running = group.create_task(rollout(other, [None], runner=length, n=1))
            await asked.wait()
            running.cancel()
            await asyncio.sleep(0)
            answer.set()
    assert [closed.outcome for closed in gateway.closed] == [session_pb2.SESSION_OUTCOME_ABORTED]


async def test_a_runner_is_told_each_session_that_was_closed_and_its_error_then_changes_nothing(
    gateway: ScriptedGateway, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    class Telling:
        def __init__(self) -> None:
            self.runs, self.told = 0, list[str]()

        async def __call__(self, prompt: str, session: Session) -> float:
            self.runs += 1
            if self.runs == 1:
                raise ValueError("wrong")
            return 1.0

        async def closed(self, client: Client, session_id: str) -> None:
            self.told.append(session_id)
            raise OSError("no space left")

    runner = Telling()
    retries = Retries(tries=2, delay_s=0)
    summary = await rollout(client, ["a"], runner=runner, n=1, retries=retries)
    assert summary.counts == {"COMPLETED": 1}
    assert runner.told == [one.session_id for one in gateway.closed]
    assert len(runner.told) == 2
    assert caplog.text.count("no space left") >= 1


async def test_a_runner_that_does_not_return_after_a_close_does_not_hold_the_rollout(
    gateway: ScriptedGateway, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging:
        async def __call__(self, prompt: str, session: Session) -> float:
            return 1.0

        async def closed(self, client: Client, session_id: str) -> None:
            await asyncio.Event().wait()

    limits = TimeLimits(reward_s=0.2)
    async with asyncio.timeout(60):
        summary = await rollout(client, ["a"], runner=Hanging(), n=1, limits=limits)
    assert summary.counts == {"COMPLETED": 1}
    assert "runner failed after the close" in caplog.text
