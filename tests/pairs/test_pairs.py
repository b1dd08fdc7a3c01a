"""Two things at once: control calls beside long operations, and failures beside each other.

Whatever meets, both end in their time with success or a typed error. No answer is lost or doubled,
the trainer gets the tokens that the engines sampled with the versions that they had, and in the end
no engine is leased.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import SessionResult
from tests.audited import Agent, agents_go_on
from tests.pairs.meshwork import LIMIT_S, Meshwork, ended, meshwork
from tests.pairs.steps import CONTROLS, FAILURES, OPERATIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")
REFUSED = {
    ("update", "push"): {"SUPERSEDED", "STALE_VERSION"},
    ("adapter", "push"): {"INVALID_FIELD", "SUPERSEDED"},  # adapters belong to the weights in use
}
"""Reasons with which one of two calls may end."""
QUICK = {
    ("pause", "push"),
    ("sleep-2", "push"),
    ("takeover", "close"),
    ("reload", "ingest"),
    ("adapter", "takeover"),
    ("kill gateway-0", "kill collector"),
}
"""The pairs of `make test`."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def work(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Meshwork]:
    async with meshwork(tmp_path_factory.mktemp("pairs"), tokenizer_dir) as running:
        yield running


def pairs(found: Any) -> list[Any]:
    return [
        pytest.param(
            *pair, id="-beside-".join(pair), marks=[] if pair in QUICK else pytest.mark.long
        )
        for pair in found
    ]


@pytest.mark.parametrize(("control", "operation"), pairs(product(CONTROLS, OPERATIONS)))
async def test_a_control_call_beside_a_long_operation(
    work: Meshwork, control: str, operation: str
) -> None:
    async with agents_go_on(work.client, 2) as agents:
        began = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(ended(OPERATIONS[operation](work, agents, began)))
            async with asyncio.timeout(LIMIT_S):
                await began.wait()
            first = await ended(CONTROLS[control](work))
            await work.go_on()
        reasons = {first, running.result()} - {""}
        assert len(reasons) <= 1
        assert reasons <= REFUSED.get((control, operation), set())
    await work.rest()
    await work.check_versions()


@pytest.mark.parametrize(("one", "other"), pairs(combinations(FAILURES, 2)))
async def test_a_failure_beside_another_one(work: Meshwork, one: str, other: str) -> None:
    async with agents_go_on(work.client, 2):
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(ended(FAILURES[name](work))) for name in (one, other)]
        assert [task.result() for task in both] == ["", ""]
    await work.rest()
    await work.check_versions()


async def test_a_seat_that_is_abandoned_beside_the_close_of_its_session_counts_once(
    work: Meshwork,
) -> None:
    names = [f"abandoned-{at}" for at in range(6)]
    agents = []
    for name in names:
        agent = Agent(await work.client.open_session(work.client.session_request(group_id=name)))
        await agent.run(lambda agent=agent: not agent.answers)  # type: ignore[misc]
        agents.append(agent)
    async with asyncio.TaskGroup() as tasks:
        for name, agent in zip(names, agents, strict=True):
            tasks.create_task(work.client.close_session(agent.session))
            tasks.create_task(work.client.abandon_seat(name, 0, 1, reason="beside its close"))
    found: dict[str, list[SessionResult]] = {}
    async with work.client.subscribe("groups", unit="group") as groups, asyncio.timeout(LIMIT_S):
        while len(found) < len(names):
            group = await anext(groups)
            await groups.acknowledge(group)
            if group.group_id in names:
                assert group.group_id not in found
                found[group.group_id] = list(group.sessions)
    for name, agent in zip(names, agents, strict=True):
        (session,) = found[name]
        assert session.abandoned or session.session_id == agent.session.session_id


async def test_a_journal_that_is_taken_over_in_a_second_run_keeps_the_groups_of_both(
    work: Meshwork,
) -> None:
    async def seat(run: str, index: int, size: int) -> Agent:
        agent = Agent(
            await work.client.open_session(
                work.client.session_request(
                    group_id="g", run_id=run, sample_index=index, group_size=size
                )
            )
        )
        await agent.run(lambda: not agent.answers)
        return agent

    first = [await seat("one", index, 2) for index in range(2)]
    await work.client.close_session(first[0].session)
    second = [await seat("two", index, 3) for index in range(2)]
    await asyncio.gather(
        *(work.replace(f"gateway-{at}", signal.SIGKILL) for at in range(2)),
    )
    second.append(await seat("two", 2, 3))
    for agent in (first[1], *second):
        before = len(agent.answers)
        await agent.run(lambda agent=agent, before=before: len(agent.answers) == before)  # type: ignore[misc]
        await work.client.close_session(agent.session)
    found: dict[str, set[str]] = {}
    async with work.client.subscribe("runs", unit="group") as groups, asyncio.timeout(LIMIT_S):
        while len(found) < 2:
            group = await anext(groups)
            await groups.acknowledge(group)
            if group.group_id == "g":
                found[group.run_id] = {session.session_id for session in group.sessions}
    assert found == {
        run: {agent.session.session_id for agent in agents}
        for run, agents in (("one", first), ("two", second))
    }
