"""The settings with which a rollout goes on after a restart: its state and its seeds."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from rollmesh.client import (
    Client,
    GroupIds,
    InfrastructureError,
    Retries,
    RolloutSettings,
    Session,
    rollout,
)
from rollmesh.runtime.errors import InvalidFieldError, RepeatConflictError
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.client.conftest import length
from tests.sidecar.scripted_gateway import ScriptedGateway


def seeds_of(gateway: ScriptedGateway) -> dict[tuple[str, int], list[int]]:
    """Returns the seeds of the sessions opened so far, by group and seat, and forgets them."""
    found: dict[tuple[str, int], list[int]] = {}
    for one in gateway.opened:
        found.setdefault((one.group_id, one.sample_index), []).append(one.sampling.seed)
    gateway.opened.clear()
    return found


async def test_seeds_depend_on_the_rollouts_seed_the_group_and_the_seat(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def seeds(seed: int) -> dict[tuple[str, int], list[int]]:
        await rollout(client, ["a", "b"], runner=length, n=2, seed=seed, group_id=str)
        return seeds_of(gateway)

    first = await seeds(1)
    assert await seeds(1) == first
    assert len({one for (one,) in [*first.values(), *(await seeds(2)).values()]}) == 8


async def test_groups_without_chosen_ids_have_the_seeds_of_their_positions(
    gateway: ScriptedGateway, client: Client
) -> None:
    found: list[list[list[int]]] = []
    for _ in range(2):
        await rollout(client, ["a", "b"], runner=length, n=2, seed=1, concurrency=1)
        found.append(list(seeds_of(gateway).values()))
    assert found[0] == found[1]


async def test_a_seat_that_the_infrastructure_failed_is_sampled_again_and_a_failed_agent_otherwise(
    gateway: ScriptedGateway, client: Client
) -> None:
    errors: list[Exception] = []

    async def agent(prompt: str, session: Session) -> float:
        if errors:
            raise errors.pop(0)
        return 1.0

    settings: dict[str, Any] = {"runner": agent, "n": 1, "seed": 1, "refill": 1}
    errors += [InfrastructureError("away"), ValueError("wrong")]
    await rollout(client, ["a"], retries=Retries(tries=2, delay_s=0.01), **settings)
    ((lost, failed, last),) = seeds_of(gateway).values()
    assert lost == failed != last


async def test_a_cancelled_rollout_that_can_be_resumed_leaves_its_seats_to_its_successor(
    gateway: ScriptedGateway, client: Client
) -> None:
    started = asyncio.Event()

    async def agent(prompt: str, session: Session) -> None:
        started.set()
        await asyncio.Event().wait()

    settings = {"n": 2, "concurrency": 1, "run_id": "run", "resume": True}
    records = patch.object(client, "stored_group", AsyncMock(return_value=[]))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        with records, patch.object(client, "abandon_seat") as abandoned:
            running = group.create_task(rollout(client, ["a"], runner=agent, **settings))  # type: ignore[arg-type]
            await started.wait()
            running.cancel()
            await asyncio.wait([running])
    (closed,) = gateway.closed
    assert (closed.outcome, closed.superseded) == (session_pb2.SESSION_OUTCOME_LOST, True)
    assert not abandoned.called


@pytest.mark.parametrize("fails", [False, True])
async def test_a_process_whose_successor_took_its_seat_neither_fills_nor_abandons_it(
    gateway: ScriptedGateway, client: Client, *, fails: bool
) -> None:
    async def agent(prompt: str, session: Session) -> float:
        if fails:
            raise InfrastructureError("the session is closed")
        return 1.0

    async def close(request: gateway_pb2.CloseSessionRequest) -> None:
        raise RepeatConflictError("session_id: it was closed otherwise")

    gateway.closing = close
    settings: dict[str, Any] = {"n": 1, "run_id": "run", "resume": True, "refill": 1}
    records = patch.object(client, "stored_group", AsyncMock(return_value=[]))
    with records, patch.object(client, "abandon_seat") as abandoned:
        summary = await rollout(client, ["a"], runner=agent, **settings)
    assert not summary.counts["COMPLETED"]
    assert len(gateway.opened) == 1
    assert not abandoned.called


async def test_a_runner_is_told_the_closed_sessions_that_an_earlier_process_left(
    gateway: ScriptedGateway, client: Client
) -> None:
    runner = AsyncMock()
    record = session_pb2.SessionRecord(session_id="kept", group_id="a", run_id="run")
    record.outcome = session_pb2.SESSION_OUTCOME_COMPLETED
    settings: dict[str, Any] = {"n": 1, "run_id": "run", "group_id": str, "resume": True}
    with patch.object(client, "stored_group", AsyncMock(return_value=[record])):
        await rollout(client, ["a"], runner=runner, **settings)
    runner.closed.assert_awaited_once_with(client, "kept")
    assert not runner.await_count


def test_groups_have_ids_of_their_step_and_sample_also_in_another_order() -> None:
    def ids(*samples: str) -> dict[str, list[str]]:
        names, found = GroupIds(), dict[str, list[str]]()
        for sample in samples:
            found.setdefault(sample, []).append(names.id("train", 3, sample=sample))
            names.id("eval", 3, sample=sample)
        return found

    first = ids("a", "b", "a")
    assert ids("b", "a", "a") == first
    assert len({one for of in first.values() for one in of}) == 3
    assert GroupIds().id("train", 4, sample="a") not in first["a"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"resume": True}, "run_id"),
        ({"resume": {"format": 0}}, "resume.format"),
        ({"resume": {"format": 1, "taken": 3}}, "resume"),
        ({"resume": True, "run_id": "r", "teacher": "t"}, "resume"),
        ({"seed": 1, "sampling": {"seed": 2}}, "sampling"),
    ],
)
def test_a_state_that_is_none_is_refused_by_its_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        RolloutSettings(**settings)
