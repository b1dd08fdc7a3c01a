"""Scorers: functions in processes, services, and what becomes of bad ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from rollmesh.v1 import collector_pb2 as pb, scorer_pb2, scorer_pb2_grpc, session_pb2
from tests.collector.collectors import TIMEOUT_S, stub_at, subscribing
from tests.collector.records import record

FUNCTION = "tests.collector.scorer_functions:behaves"


def unscored(session_id: str, behave: str = "well") -> session_pb2.SessionRecord:
    made = record(session_id)
    made.ClearField("reward")
    made.metadata["behave"] = behave
    return made


async def ingest(stub: Any, *sessions: session_pb2.SessionRecord) -> None:
    for session in sessions:
        await stub.Ingest(pb.IngestRequest(sessions=[session]), timeout=TIMEOUT_S)


def rewards_of(deliveries: list[pb.Delivery]) -> dict[str, float | None]:
    return {
        session.session_id: session.reward if session.HasField("reward") else None
        for delivery in deliveries
        for session in delivery.sessions
    }


def given_up() -> float:
    name = "rollmesh_collector_scores_total"
    return REGISTRY.get_sample_value(name, {"outcome": "given_up"}) or 0.0


async def test_a_session_without_a_reward_is_scored_before_it_is_delivered(tmp_path: Path) -> None:
    async with stub_at(tmp_path, scorer=FUNCTION, scorer_workers=1) as stub:
        async with subscribing(stub, credits_=2) as stream:
            await ingest(stub, unscored("a"), record("b"))
            found = rewards_of(await stream.deliveries(2))
    assert found == {"a": 6.0, "b": 0.0}


@pytest.mark.parametrize("behave", ["crash", "hang", "raise", "wrong"])
async def test_a_bad_scorer_harms_its_session_alone(tmp_path: Path, behave: str) -> None:
    before = given_up()
    settings: dict[str, Any] = {"scorer_workers": 1, "scorer_tries": 2}
    if behave == "hang":
        settings["scorer_timeout_ms"] = 500
    async with stub_at(tmp_path, scorer=FUNCTION, **settings) as stub:
        async with subscribing(stub, credits_=2) as stream:
            await ingest(stub, unscored("bad", behave), unscored("good"))
            found = rewards_of(await stream.deliveries(2))
    assert found == {"bad": None, "good": 6.0}
    assert given_up() == before + 1


async def test_a_function_that_cannot_be_imported_leaves_sessions_without_rewards(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"scorer": "tests.nothing:here", "scorer_tries": 1}
    async with stub_at(tmp_path, **settings) as stub, subscribing(stub, credits_=1) as stream:
        await ingest(stub, unscored("a"))
        assert rewards_of(await stream.deliveries(1)) == {"a": None}


async def test_what_waited_for_its_scorer_is_scored_after_a_restart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scorer_workers": 1, "scorer": FUNCTION}
    async with stub_at(tmp_path, **settings) as stub:
        await ingest(stub, unscored("first", "hang"), unscored("second"))
        stats = await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
        assert stats.waiting_for_rewards == 2
    async with stub_at(tmp_path, **{**settings, "scorer_workers": 2}) as stub:
        async with subscribing(stub, credits_=1) as stream:
            assert rewards_of(await stream.deliveries(1)) == {"second": 6.0}


class Service(scorer_pb2_grpc.ScorerServiceServicer):
    """Behaves as the session's metadata says, like `scorer_functions`."""

    async def Score(self, request: scorer_pb2.ScoreRequest, context: Any) -> Any:
        match request.session.metadata["behave"]:
            case "hang":
                await asyncio.Event().wait()
            case "raise":
                raise ValueError("no")
            case "wrong":
                rewards = session_pb2.SessionRewards(trajectory_rewards={"x": 1.0})
                return scorer_pb2.ScoreResponse(rewards=rewards)
        return scorer_pb2.ScoreResponse(rewards=session_pb2.SessionRewards(reward=6.0))


class Flaky(scorer_pb2_grpc.ScorerServiceServicer):
    """Fails the first call of every session."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def Score(self, request: scorer_pb2.ScoreRequest, context: Any) -> Any:
        session_id = request.session.session_id
        if session_id not in self.seen:
            self.seen.add(session_id)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        rewards = session_pb2.SessionRewards(reward=0.5, turn_rewards={2: 1.0})
        return scorer_pb2.ScoreResponse(rewards=rewards)


@asynccontextmanager
async def scored_by(service: Any, folder: Path, **settings: Any) -> AsyncIterator[Any]:
    """Serves a scorer and a collector that asks it; yields a stub for the collector."""
    server = grpc.aio.server()
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scorer = f"grpc://127.0.0.1:{port}"
    async with asyncio.timeout(TIMEOUT_S), stub_at(folder, scorer=scorer, **settings) as stub:
        yield stub
    await server.stop(None)


@pytest.mark.parametrize("behave", ["hang", "raise", "wrong"])
async def test_a_bad_scorer_service_harms_its_session_alone(tmp_path: Path, behave: str) -> None:
    before = given_up()
    settings: dict[str, Any] = {"scorer_workers": 1, "scorer_tries": 2}
    if behave == "hang":
        settings["scorer_timeout_ms"] = 500
    async with scored_by(Service(), tmp_path, **settings) as stub:
        async with subscribing(stub, credits_=2) as stream:
            await ingest(stub, unscored("bad", behave), unscored("good"))
            found = rewards_of(await stream.deliveries(2))
    assert found == {"bad": None, "good": 6.0}
    assert given_up() == before + 1


async def test_a_scorer_service_is_tried_again(tmp_path: Path) -> None:
    async with scored_by(Flaky(), tmp_path) as stub, subscribing(stub, credits_=1) as stream:
        await ingest(stub, unscored("a"))
        (delivery,) = await stream.deliveries(1)
    assert rewards_of([delivery]) == {"a": 0.5}
    assert delivery.sessions[0].trajectories[0].segments[1].reward == 1.0
