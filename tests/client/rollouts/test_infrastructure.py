"""Agents that failed, and agents whose infrastructure failed: LOST, refilled, never rewarded."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.client import (
    Client,
    CommandLostError,
    CommandRunner,
    InfrastructureError,
    Retries,
    Session,
    is_infrastructure,
    rollout,
)
from rollmesh.runtime.errors import InvalidFieldError, SessionUnknownError
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.client.conftest import addresses_of, one_sample
from tests.collector.collectors import collector_at
from tests.sidecar.scripted_gateway import ScriptedGateway

httpx: Any = pytest.importorskip("httpx")  # openai has it
LOST = session_pb2.SESSION_OUTCOME_LOST
REQUEST = httpx.Request("POST", "http://mesh")


def status(code: int) -> Exception:
    answer = httpx.Response(code, request=REQUEST)
    return openai.APIStatusError("said", response=answer, body=None)


def caused(error: Exception) -> Exception:
    raised = ValueError("the agent's own")
    raised.__cause__ = error
    return raised


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InfrastructureError("the sandbox is gone"), True),
        (CommandLostError("exit 75"), True),
        (SessionUnknownError("the gateway lost it"), True),
        (ConnectionResetError("a tool"), True),
        (openai.APIConnectionError(request=REQUEST), True),
        (openai.APITimeoutError(request=REQUEST), True),
        (httpx.ReadError("cut"), True),
        (status(503), True),
        (status(429), True),
        (caused(status(502)), True),
        (ExceptionGroup("two", [ConnectionError()]), True),
        (status(400), False),
        (status(404), False),
        (InvalidFieldError("reward", "is text"), False),
        (caused(ValueError("x")), False),
        (ValueError("a wrong answer"), False),
        (TimeoutError("the agent's own limit"), False),
    ],
)
def test_an_error_is_one_of_the_agent_or_its_infrastructure(
    error: Exception, expected: bool
) -> None:
    assert is_infrastructure(error) is expected


async def test_a_lost_session_has_its_reason_and_no_reward(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        session.reward = 0.0
        raise InfrastructureError("the sandbox is gone")

    summary, outcome = await one_sample(client, run)
    (closed,) = gateway.closed
    assert (closed.outcome, closed.superseded) == (LOST, False)
    assert not closed.rewards.ByteSize()
    assert "the sandbox is gone" in closed.metadata["error"]
    assert (outcome.outcome, outcome.reward) == ("LOST", None)
    assert summary.counts == {"LOST": 1}


async def test_an_agent_that_fails_about_half_a_character_has_its_reason(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        raise ValueError("no city \ud83d")  # as of arguments that the policy sampled

    _, outcome = await one_sample(client, run)
    (closed,) = gateway.closed
    assert closed.outcome == session_pb2.SESSION_OUTCOME_FAILED
    assert closed.metadata["error"] == outcome.error == "ValueError: no city ?"


async def test_a_seat_is_refilled_as_often_as_asked_beside_its_retries(
    gateway: ScriptedGateway, client: Client
) -> None:
    errors: list[Exception] = [
        ConnectionError("first"),
        ValueError("second"),
        ConnectionError("third"),
    ]

    async def run(prompt: str, session: Session) -> float:
        if errors:
            raise errors.pop(0)
        return 1.0

    retries = Retries(tries=2, delay_s=0.01)
    summary, outcome = await one_sample(client, run, retries=retries, refill=2)
    assert (summary.counts, outcome.attempts) == ({"COMPLETED": 1}, 4)
    *before, last = gateway.closed
    assert [one.superseded for one in before] == [True] * 3
    assert [one.outcome for one in before] == [LOST, session_pb2.SESSION_OUTCOME_FAILED, LOST]
    assert [one.metadata["error"].split(": ")[1] for one in before] == ["first", "second", "third"]
    assert (last.superseded, "error" in last.metadata, last.rewards.reward) == (False, False, 1.0)


async def test_a_seat_without_refills_left_is_lost(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        raise ConnectionError("again")

    retries = Retries(delay_s=0.01)
    summary, outcome = await one_sample(client, run, retries=retries, refill=2)
    assert (summary.counts, outcome.attempts) == ({"LOST": 1}, 3)
    assert [one.superseded for one in gateway.closed] == [True, True, False]


async def test_a_rollout_may_decide_otherwise_about_an_error(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(prompt: str, session: Session) -> float:
        raise ConnectionError("the server that the agent was asked to repair")

    _, outcome = await one_sample(client, run, lost=lambda error: False)
    assert outcome.outcome == "FAILED"


async def test_a_seat_whose_close_is_refused_is_refilled_or_abandoned(
    gateway: ScriptedGateway, address: str, tmp_path: Path
) -> None:
    async def close(request: gateway_pb2.CloseSessionRequest) -> None:
        if request.session_id == "5e550001":
            raise SessionUnknownError("the gateway lost it")

    async def run(prompt: str, session: Session) -> float:
        return 1.0

    gateway.closing = close
    _, outcome = await one_sample_at(address, run, refill=1)
    assert (outcome.outcome, outcome.attempts) == ("COMPLETED", 2)
    seats = [(one.group_id, one.sample_index) for one in gateway.opened]
    assert seats[0] == seats[1]


async def one_sample_at(address: str, run: Any, **settings: Any) -> Any:
    async with Client(addresses_of(gateway=address)) as client:
        return await one_sample(client, run, retries=Retries(delay_s=0.01), **settings)


async def test_a_group_whose_close_is_never_confirmed_is_delivered_without_the_session(
    gateway: ScriptedGateway, address: str, tmp_path: Path
) -> None:
    async def close(request: gateway_pb2.CloseSessionRequest) -> None:
        raise SessionUnknownError("the gateway lost it")

    async def run(prompt: str, session: Session) -> float:
        return 1.0

    gateway.closing = close
    async with collector_at(tmp_path) as collector:
        addresses = replace(addresses_of(gateway=address), collector=collector)
        async with Client(addresses) as client, client.subscribe("trainer") as groups:
            summary = await rollout(client, ["p"], runner=run, n=2)
            async with asyncio.timeout(60):
                delivery = await anext(groups)
    assert summary.counts == {"LOST": 2}
    assert delivery.partial
    assert all("the gateway lost it" in one.abandoned for one in delivery.sessions)


async def test_a_command_that_is_killed_or_exits_with_75_is_lost() -> None:
    session = Session("5e55", "key", "http://mesh/key/v1")
    for command in ("kill -9 $$", "exit 75"):
        with pytest.raises(CommandLostError):
            await CommandRunner(argv=["sh", "-c", command])(None, session)
