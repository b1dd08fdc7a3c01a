import asyncio

import pytest

from rollmesh.client import Client, Outcome, RollmeshError, sync
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RemoteError,
    SessionUnknownError,
    TooManySessionsError,
)
from rollmesh.v1 import types_pb2
from tests.sidecar.scripted_gateway import ScriptedGateway


async def test_a_session_tells_an_agent_where_to_go_and_closes_with_its_reward(
    gateway: ScriptedGateway, client: Client
) -> None:
    async with client.session(
        group_id="g",
        sample_index=2,
        group_size=8,
        sampling={"temperature": 0.5},
        metadata={"a": "b"},
    ) as session:
        assert session.base_url == f"http://127.0.0.1:7080/sessions/{session.id}/v1"
        assert session.api_key == session.key == f"rmk-{session.id}-secret"
        assert await session.close(reward=1.0, metadata={"c": "d"}) == (f"{session.id}-1",)
    opened, closed = gateway.opened[0], gateway.closed[0]
    assert (opened.group_id, opened.sample_index, opened.group_size) == ("g", 2, 8)
    assert opened.sampling == types_pb2.SamplingParams(temperature=0.5)
    assert dict(opened.metadata) == {"a": "b"}
    assert (closed.reward, closed.outcome) == (1.0, types_pb2.SESSION_OUTCOME_COMPLETED)
    assert dict(closed.metadata) == {"c": "d"}
    assert len(gateway.closed) == 1


async def test_a_block_that_ends_closes_as_completed_without_a_reward(
    gateway: ScriptedGateway, client: Client
) -> None:
    async with client.session():
        pass
    assert gateway.closed[0].outcome == types_pb2.SESSION_OUTCOME_COMPLETED
    assert not gateway.closed[0].HasField("reward")


async def test_an_exception_closes_as_failed_and_goes_on(
    gateway: ScriptedGateway, client: Client
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.session():
            raise ZeroDivisionError
    assert gateway.closed[0].outcome == types_pb2.SESSION_OUTCOME_FAILED


async def test_a_cancellation_closes_as_aborted(gateway: ScriptedGateway, client: Client) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), client.session():
            await asyncio.Event().wait()
    assert gateway.closed[0].outcome == types_pb2.SESSION_OUTCOME_ABORTED


async def test_a_full_gateway_is_asked_again_for_the_same_session(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.failures = [TooManySessionsError("full", retry_delay_ms=1)] * 2
    await client.open_session()
    assert len(gateway.opened) == 3
    assert len({request.request_id for request in gateway.opened}) == 1


async def test_what_waiting_does_not_heal_is_raised_at_once_and_typed(
    gateway: ScriptedGateway, client: Client
) -> None:
    session = await client.open_session()
    gateway.failures = [SessionUnknownError("session_id: is unknown")]
    with pytest.raises(SessionUnknownError):
        await session.close(reward=1.0)
    assert session.outcome is None


async def test_a_gateway_that_stays_away_is_a_typed_error() -> None:
    async with Client(gateway="127.0.0.1:1", call_timeout_s=0.3) as client:
        with pytest.raises(RemoteError):
            await client.open_session()


async def test_a_missing_address_or_a_wrong_word_is_named(client: Client) -> None:
    with pytest.raises(InvalidFieldError, match="router: is not set"):
        await client.push_checkpoint("/nowhere", 1)
    with pytest.raises(InvalidFieldError, match="sampling"):
        await client.open_session(sampling={"heat": 1})
    session = await client.open_session()
    with pytest.raises(InvalidFieldError, match="outcome"):
        await session.close(outcome="great")


async def test_the_sync_client_does_the_same_without_a_loop(
    gateway: ScriptedGateway, address: str
) -> None:
    def work() -> tuple[str, float | None]:
        with sync.Client(gateway=address, sidecar="http://agents:1/") as client:
            with client.session(group_id="g") as session:
                session.close(reward=0.5, outcome=Outcome.COMPLETED)
            with pytest.raises(ZeroDivisionError), client.session():
                raise ZeroDivisionError
            summary = client.rollout(["p"], runner=lambda session, prompt: 1.0, n=2)
            return session.base_url, summary.mean_reward

    base_url, mean = await asyncio.to_thread(work)
    assert base_url == "http://agents:1/sessions/5e550001/v1"
    assert mean == 1.0
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes[:2] == [
        types_pb2.SESSION_OUTCOME_COMPLETED,
        types_pb2.SESSION_OUTCOME_FAILED,
    ]


async def test_the_sync_client_raises_the_same_errors() -> None:
    def work() -> None:
        with sync.Client() as client:
            client.open_session()

    with pytest.raises(RollmeshError, match="gateway: is not set"):
        await asyncio.to_thread(work)
