import asyncio
import itertools
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rollmesh.client import (
    Client,
    Limits,
    Retries,
    SampleOutcome,
    Session,
    progress,
    register_runner,
    rollout,
    rollout_groups,
)
from rollmesh.client.groups import Needed
from rollmesh.runtime.errors import InvalidFieldError, SessionUnknownError
from rollmesh.v1 import gateway_pb2, types_pb2
from tests.client.conftest import addresses_of
from tests.sidecar.scripted_gateway import ScriptedGateway, serving


async def length(prompt: str, session: Session) -> float:
    assert session.session_id
    return float(len(prompt))


register_runner("length-of-the-prompt", length)


async def test_every_prompt_becomes_a_group_of_n_sessions(
    gateway: ScriptedGateway, client: Client
) -> None:
    seen: list[SampleOutcome] = []
    summary = await rollout(
        client,
        ["a", "bbb"],
        runner="length-of-the-prompt",
        n=4,
        export="tree",
        on_sample=seen.append,
    )
    assert {request.export_mode for request in gateway.opened} == {gateway_pb2.EXPORT_MODE_TREE}
    groups: dict[str, list[int]] = {}
    for request in gateway.opened:
        groups.setdefault(request.group_id, []).append(request.sample_index)
    assert [sorted(indexes) for indexes in groups.values()] == [[0, 1, 2, 3]] * 2
    assert {request.group_size for request in gateway.opened} == {4}
    assert (summary.counts, summary.mean_reward) == ({"COMPLETED": 8}, 2.0)
    assert len(seen) == 8
    assert sorted(closed.rewards.reward for closed in gateway.closed) == [1.0] * 4 + [3.0] * 4


async def test_completed_sessions_wait_for_rewards_that_come_later_and_failed_ones_do_not(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> None:
        if prompt == "fails":
            raise ValueError("no")

    await rollout(client, ["ends", "fails"], runner=run, n=1, reward_timeout_ms=5000)
    waits = {
        closed.outcome: closed.reward_timeout_ms if closed.HasField("reward_timeout_ms") else None
        for closed in gateway.closed
    }
    assert waits == {
        types_pb2.SESSION_OUTCOME_COMPLETED: 5000,
        types_pb2.SESSION_OUTCOME_FAILED: None,
    }
    with pytest.raises(InvalidFieldError, match="reward_timeout_ms"):
        await rollout(client, ["ends"], runner=run, reward_timeout_ms=0)


async def test_a_sample_that_fails_closes_as_failed_and_leaves_its_siblings_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    first_failed = asyncio.Event()

    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            first_failed.set()
            raise ValueError("the agent is confused")
        await first_failed.wait()
        return 1.0

    seen: list[SampleOutcome] = []
    summary = await rollout(client, ["p"], runner=run, n=4, on_sample=seen.append)
    assert summary.counts == {"COMPLETED": 3, "FAILED": 1}
    assert summary.errors == {"ValueError": 1}
    failed = next(sample for sample in seen if sample.outcome == "FAILED")
    assert failed.error == "ValueError: the agent is confused"
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes.count(types_pb2.SESSION_OUTCOME_FAILED) == 1


async def test_a_session_that_cannot_be_opened_fails_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.failures = [SessionUnknownError("no")]
    summary = await rollout(client, ["p"], runner=length, n=3)
    assert summary.counts == {"COMPLETED": 2, "FAILED": 1}


async def test_a_sample_over_its_time_closes_as_aborted(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            await asyncio.Event().wait()
        return 1.0

    summary = await rollout(client, ["p"], runner=run, n=2, timeout_s=0.3)
    assert summary.counts == {"ABORTED": 1, "COMPLETED": 1}
    assert types_pb2.SESSION_OUTCOME_ABORTED in {closed.outcome for closed in gateway.closed}


async def test_a_timeout_of_the_agents_own_is_a_failure(client: Client) -> None:
    async def run(prompt: str, session: Session) -> float:
        raise TimeoutError

    summary = await rollout(client, ["p"], runner=run, n=1)
    assert summary.counts == {"FAILED": 1}


async def test_no_more_sessions_are_open_than_allowed(client: Client) -> None:
    running, most = 0, 0
    three = asyncio.Barrier(3)

    async def run(prompt: int, session: Session) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await three.wait()  # passes only when three run at a time
        running -= 1
        return 0.0

    async with asyncio.timeout(60):
        summary = await rollout(client, range(4), runner=run, n=3, concurrency=3)
    assert (summary.counts, most) == ({"COMPLETED": 12}, 3)


async def test_cancelling_a_rollout_closes_what_is_open_as_aborted(
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
    assert gateway.closed[0].outcome == types_pb2.SESSION_OUTCOME_ABORTED


async def test_the_runner_is_chosen_by_the_samples_agent_name_else_the_default(
    gateway: ScriptedGateway, client: Client
) -> None:
    @dataclass
    class Task:
        agent_name: str

    async def default(sample: Any, session: Session) -> float:
        return -1.0

    async def named(sample: Any, session: Session) -> float:
        return 2.0

    register_runner("named", named)
    samples = [{"agent_name": "named"}, Task("named"), {"agent_name": "nobody"}, {"q": 1}]
    summary = await rollout(client, samples, runner=default, n=1)
    assert summary.counts == {"COMPLETED": 3, "FAILED": 1}
    assert summary.errors == {"InvalidFieldError": 1}  # alone, and its group is whole
    assert sorted(closed.rewards.reward for closed in gateway.closed) == [-1.0, 0.0, 2.0, 2.0]
    names = [request.metadata["agent_name"] for request in gateway.opened]
    assert sorted(names) == ["", "named", "named", "nobody"]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"n": 0}, id="n"),
        pytest.param({"concurrency": 0}, id="concurrency"),
        pytest.param({"n": 2, "needed": 3}, id="needed"),
    ],
)
async def test_a_setting_that_makes_no_sense_is_named(
    client: Client, wrong: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with pytest.raises(InvalidFieldError, match=request.node.callspec.id):
        await rollout(client, ["p"], runner=length, **wrong)


def test_a_limit_that_makes_no_sense_is_named() -> None:
    with pytest.raises(InvalidFieldError, match=r"limits\.grace_s: is 0"):
        Limits(grace_s=0)


async def test_a_group_that_cannot_succeed_is_stopped_and_still_becomes_whole(
    gateway: ScriptedGateway, client: Client
) -> None:
    running = asyncio.Event()

    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            await running.wait()
            raise ValueError
        running.set()
        await asyncio.Event().wait()
        return 1.0

    async with (
        asyncio.timeout(60),
        rollout_groups(client, ["p"], runner=run, n=4, concurrency=2, needed="all") as groups,
    ):
        (group,) = [group async for group in groups]
    assert not group.succeeded
    outcomes = [session.outcome for session in group.sessions]
    assert sorted(outcomes) == ["ABORTED", "ABORTED", "ABORTED", "FAILED"]
    assert sorted(request.sample_index for request in gateway.opened) == [0, 1, 2, 3]
    assert len(gateway.closed) == 4
    assert groups.summary.groups == {"failed": 1}


async def test_a_group_succeeds_with_as_many_as_it_needs(client: Client) -> None:
    async def run(prompt: str, session: Session) -> float:
        if session.session_id in ("5e550001", "5e550002"):
            raise ValueError
        return 1.0

    needed: Needed
    for needed in (2, "any"):
        summary = await rollout(client, ["p"], runner=run, n=4, concurrency=1, needed=needed)
        assert summary.groups == {"succeeded": 1}


class Endless:
    """An iterable that counts what is taken of it."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        for self.taken in itertools.count(1):
            yield self.taken


async def test_samples_are_taken_as_places_become_free_and_groups_wait_to_be_taken(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: int, session: Session) -> float:
        return 1.0

    samples = Endless()
    async with (
        asyncio.timeout(60),
        rollout_groups(client, samples, runner=run, n=1, concurrency=2, group_id=str) as groups,
    ):
        first = await anext(groups)
        for _ in range(100):
            await client.open_session(client.session_request())  # time for more to begin
        assert first.group_id == str(first.sample)
        assert samples.taken <= 1 + 2 + 2 + 1  # taken, waiting, in their places, next
    assert len(gateway.closed) >= 1


async def test_leaving_early_ends_what_runs_and_closes_it(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: int, session: Session) -> float:
        if prompt > 1:
            await asyncio.Event().wait()
        return 1.0

    async def some() -> None:
        async with rollout_groups(client, Endless(), runner=run, n=1, concurrency=3) as groups:
            async for _ in groups:
                raise ZeroDivisionError

    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            await some()
    assert {closed.session_id for closed in gateway.closed} == {
        f"5e55{at:04x}" for at in range(1, len(gateway.opened) + 1)
    }


async def test_samples_may_come_asynchronously_and_their_error_comes_behind_their_groups(
    client: Client,
) -> None:
    async def samples() -> AsyncIterator[str]:
        yield "a"
        yield "bbb"
        raise OSError("the dataset is gone")

    async with rollout_groups(client, samples(), runner=length, n=2) as groups:
        rewards = [(await anext(groups)).sessions[0].reward for _ in range(2)]
        with pytest.raises(OSError, match="dataset is gone"):
            await anext(groups)
    assert sorted(rewards, key=str) == [1.0, 3.0]


class Sample:
    """A sample that can be looked for."""


async def test_many_samples_leave_no_trace_in_memory(client: Client) -> None:
    alive: weakref.WeakSet[Sample] = weakref.WeakSet()
    most = 0

    def samples() -> Iterator[Sample]:
        for _ in range(600):
            sample = Sample()
            alive.add(sample)
            yield sample

    async def run(sample: Sample, session: Session) -> float:
        nonlocal most
        most = max(most, len(alive))
        return 1.0

    summary = await rollout(client, samples(), runner=run, n=1, concurrency=4)
    assert summary.counts == {"COMPLETED": 600}
    assert 0 < most <= 2 * 4 + 2  # in their places, ended and not taken, next


async def test_a_failed_attempt_is_superseded_by_one_in_a_new_session(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        if session.session_id == "5e550001":
            session.reward = 7.0
            raise ValueError("once")
        return 1.0

    seen: list[SampleOutcome] = []
    summary = await rollout(
        client,
        ["p"],
        runner=run,
        n=1,
        retries=Retries(tries=2, delay_s=0.01),
        on_sample=seen.append,
        metadata=lambda prompt: {"prompt": prompt},
    )
    (outcome,) = seen
    assert (summary.counts, summary.retries, outcome.attempts) == ({"COMPLETED": 1}, 1, 2)
    first, second = gateway.closed
    assert (first.superseded, first.outcome) == (True, types_pb2.SESSION_OUTCOME_FAILED)
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


async def test_cancelling_twice_still_closes_what_is_open(
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

    limits = Limits(grace_s=0.2)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(rollout(client, [None], runner=run, n=1, limits=limits))
        await started.wait()
        running.cancel()
        await cleaning.wait()
        running.cancel()
    assert [closed.outcome for closed in gateway.closed] == [types_pb2.SESSION_OUTCOME_ABORTED]
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
    assert [closed.outcome for closed in gateway.closed] == [types_pb2.SESSION_OUTCOME_ABORTED]


@pytest.mark.parametrize(
    ("wanted", "lines"),
    [pytest.param(None, 0, id="no terminal"), pytest.param(True, 1, id="asked")],
)
async def test_progress_is_a_line_where_it_is_asked_for_and_nobody_looks(
    client: Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wanted: Any,
    lines: int,
) -> None:
    monkeypatch.setattr(progress, "_LINE_MS", 3_600_000)  # no line but the last
    await rollout(client, ["p"], runner=length, n=2, progress=wanted)
    written = capsys.readouterr().err.splitlines()
    assert len(written) == lines
    assert all(line.startswith("rollout 2/2: completed 2, groups succeeded 1") for line in written)


async def test_a_runner_that_is_not_registered_is_named(client: Client) -> None:
    with pytest.raises(InvalidFieldError, match="nobody"):
        await rollout(client, ["p"], runner="nobody")


def test_a_name_belongs_to_one_runner() -> None:
    async def other(prompt: str, session: Session) -> float:
        return 0.0

    register_runner("length-of-the-prompt", length)
    with pytest.raises(InvalidFieldError, match="length-of-the-prompt"):
        register_runner("length-of-the-prompt", other)
