"""The relay, the connector and the sidecar fail under running answers: each turn counts once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.demo.audit import Audit
from rollmesh.client import Client, SessionResult
from tests.faults.proxy import Proxy, proxy_to
from tests.harbor.connecting import (
    ASKED,
    answered,
    both,
    command,
    connected,
    connecting,
    generating,
    trained,
)
from tests.harbor.serving import Harbor, answers_of, statuses_of
from tests.waiting import until

AGENTS, TURNS = 2, 3
"""As many agents stream as do not."""


async def submitted(harbor: Harbor, **agent: Any) -> list[str]:
    """Submits a job whose agents stream, and one whose agents do not."""
    task, agent = [harbor.task("one", ASKED)], {"turns": TURNS, **agent}
    return [
        await harbor.submit("training-1", task, attempts=AGENTS, stream=stream, **agent)
        for stream in (False, True)
    ]


@asynccontextmanager
async def in_mid_answer(client: Client, harbor: Harbor, at_once: int = 1) -> AsyncIterator[None]:
    """Runs the block while all agents wait for answers, and all streams of them have begun."""

    def begun() -> bool:
        return len(list(harbor.folder.glob("data/**/begun"))) == AGENTS

    async with asyncio.timeout(60):
        while True:
            await until(begun)
            await client.pause_engines()
            await generating(client, 2 * AGENTS * at_once)
            if begun():
                break
            await client.resume_engines()
    yield
    await client.resume_engines()


def check_books(harbor: Harbor, sessions: Sequence[SessionResult], turns: int = TURNS) -> None:
    """Asserts that the answers of the agents are those that a trainer received, each once."""
    audit = Audit()
    audit.received(sessions)
    answers = [id_ for ids in answers_of(harbor.folder) for id_ in ids]
    assert sorted(audit.trained) == sorted(answers)
    assert set(audit.trained.values()) == {1}
    assert audit.drift_tokens == 0
    assert [one.turns for one in sessions] == [turns] * len(sessions)


def interrupted(harbor: Harbor) -> list[int]:
    """Returns how many answers of each agent were refused or broken off."""
    return [one.get("503", 0) + one.get("broken", 0) for one in statuses_of(harbor.folder)]


@pytest.mark.parametrize(
    ("kind", "unmarked", "at_once"),
    [
        pytest.param("cut", False, 1, marks=pytest.mark.long),
        ("cut", True, 2),
        pytest.param("half-open", True, 1, marks=pytest.mark.long),
    ],
)
async def test_a_connection_that_is_lost_under_running_answers_doubles_and_loses_no_turn(
    tmp_path: Path, tokenizer_dir: Path, kind: str, *, unmarked: bool, at_once: int
) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
        proxy_to(harbor.url.removeprefix("http://")) as proxy,
        connected(client, f"http://{proxy.address}", "training-1") as connector,
    ):
        jobs = await submitted(harbor, unmarked=unmarked, at_once=at_once)
        async with in_mid_answer(client, harbor, at_once):
            await lose(proxy, kind)
            await until(lambda: not connector.connected.is_set())
        for job in jobs:
            assert [one["error_type"] for one in await harbor.ended(job)] == [None] * AGENTS
        sessions = await trained(client, 2 * AGENTS)
    check_books(harbor, sessions, TURNS * at_once)
    assert min(interrupted(harbor)) >= 1


async def lose(proxy: Proxy, kind: str) -> None:
    if kind == "half-open":
        proxy.silence()
        return
    with proxy.cut():
        pass


@pytest.mark.long
async def test_a_slow_and_halting_network_interrupts_no_answer(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
        proxy_to(harbor.url.removeprefix("http://")) as proxy,
        connected(client, f"http://{proxy.address}", "training-1"),
    ):
        jobs = await submitted(harbor)
        async with in_mid_answer(client, harbor):
            pass
        with proxy.partitioned():
            await until(lambda: answered(mesh) >= 2 * AGENTS)
        with proxy.delayed(0.05):
            for job in jobs:
                await harbor.ended(job)
            sessions = await trained(client, 2 * AGENTS)
    check_books(harbor, sessions)
    assert interrupted(harbor) == [0] * 2 * AGENTS


@pytest.mark.long
async def test_a_sidecar_that_is_killed_under_running_answers_and_returns_doubles_no_turn(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        jobs = await submitted(harbor, unmarked=True)
        async with in_mid_answer(client, harbor):
            await mesh.restart("sidecar")
        for job in jobs:
            await harbor.ended(job)
        sessions = await trained(client, 2 * AGENTS)
    check_books(harbor, sessions)
    assert min(interrupted(harbor)) >= 1


@pytest.mark.long
async def test_a_second_connector_waits_until_the_first_is_killed_and_takes_over(
    tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> bool:
        logged = [getattr(one, "fields", {}) for one in caplog.records]
        return any(one.get("reason", "").startswith("another") for one in logged)

    async with (
        both(tmp_path, tokenizer_dir, tokens_per_second=20) as (mesh, harbor),
        mesh.client() as client,
        command(mesh, harbor) as first,
        AsyncExitStack() as stack,
    ):
        jobs = await submitted(harbor, unmarked=True)
        async with in_mid_answer(client, harbor):  # by the first, which is connected
            connector = connecting(client, harbor.url, "training-1")
            second = await stack.enter_async_context(connector)
            await until(refused)
            assert not second.connected.is_set()
            first.kill()
            await first.wait()
        for job in jobs:
            await harbor.ended(job)
        sessions = await trained(client, 2 * AGENTS)
    check_books(harbor, sessions)
    assert min(interrupted(harbor)) >= 1
