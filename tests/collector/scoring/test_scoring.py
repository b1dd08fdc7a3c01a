"""Collectors that call a scorer: a process of ours, and services that misbehave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from rollmesh.collector import Arrival
from rollmesh.v1 import collector_pb2 as pb, scorer_pb2, scorer_pb2_grpc, session_pb2
from tests.collector.collectors import TIMEOUT_S, stub_at, subscribing
from tests.collector.records import record
from tests.collector.stores import sqlite_store
from tests.processes import reserved_port, running
from tests.scorer.sessions import FUNCTION, REWARD, Hanging, unscored


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


def observed(part: str) -> float:
    """The `count` or the `sum` of the rewards of sessions that were observed."""
    name, labels = f"rollmesh_collector_session_rewards_{part}", {"model": "", "purpose": "train"}
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_session_without_a_reward_is_scored_before_it_is_delivered(tmp_path: Path) -> None:
    count, total = observed("count"), observed("sum")
    async with running("scorer", tmp_path, function=FUNCTION) as scorer:
        async with (
            stub_at(tmp_path, scorer=scorer.address) as stub,
            subscribing(stub, credits_=2) as stream,
        ):
            await ingest(stub, unscored("a"), record("b"))
            found = rewards_of(await stream.deliveries(2))
    assert found == {"a": REWARD, "b": 0.0}
    assert observed("count") == count + 2
    assert observed("sum") == pytest.approx(total + REWARD)


async def test_a_session_whose_scorer_is_killed_in_mid_score_is_scored_by_the_next(
    tmp_path: Path,
) -> None:
    hanging = Hanging(tmp_path)
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        flags = {"function": FUNCTION, "port": port}
        settings = {"scorer": f"127.0.0.1:{port}", "scorer_tries": 2}
        async with stub_at(tmp_path, **settings) as stub, subscribing(stub, credits_=1) as stream:
            async with running("scorer", tmp_path, **flags) as scorer:
                await ingest(stub, hanging.session)
                await hanging.begun()
                await scorer.kill()
            await hanging.ended()
            async with running("scorer", tmp_path, **flags):
                assert rewards_of(await stream.deliveries(1)) == {"hangs": REWARD}


async def test_a_scorer_that_is_away_costs_no_attempt(tmp_path: Path) -> None:
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        settings = {"scorer": f"127.0.0.1:{port}", "scorer_tries": 1}
        async with stub_at(tmp_path, **settings) as stub, subscribing(stub, credits_=1) as stream:
            await ingest(stub, unscored("a"))
            async with running("scorer", tmp_path, function=FUNCTION, port=port):
                assert rewards_of(await stream.deliveries(1)) == {"a": REWARD}


async def test_a_scorer_that_never_comes_delays_a_session_up_to_the_hold(tmp_path: Path) -> None:
    with reserved_port() as reserved:
        scorer = f"127.0.0.1:{reserved.getsockname()[1]}"
        settings = {"scorer": scorer, "scorer_hold_ms": 300}
        async with stub_at(tmp_path, **settings) as stub, subscribing(stub, credits_=1) as stream:
            await ingest(stub, unscored("a"))
            assert rewards_of(await stream.deliveries(1)) == {"a": None}


async def test_what_waited_for_its_scorer_is_scored_after_a_restart(tmp_path: Path) -> None:
    with reserved_port() as reserved:
        settings = {"scorer": f"127.0.0.1:{reserved.getsockname()[1]}"}
        async with stub_at(tmp_path, **settings) as stub:
            await ingest(stub, unscored("a"), unscored("b"))
            stats = await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
            assert stats.waiting_for_rewards == 2
    async with scored_by(Service(), tmp_path) as stub, subscribing(stub, credits_=2) as stream:
        assert rewards_of(await stream.deliveries(2)) == {"a": REWARD, "b": REWARD}


class Service(scorer_pb2_grpc.ScorerServiceServicer):
    """Behaves as the session's metadata says."""

    async def Score(self, request: scorer_pb2.ScoreRequest, context: Any) -> Any:
        match request.session.metadata["behave"]:
            case "hang":
                await asyncio.Event().wait()
            case "raise":
                raise ValueError("no")
            case "wrong":
                rewards = session_pb2.SessionRewards(trajectory_rewards={"x": 1.0})
                return scorer_pb2.ScoreResponse(rewards=rewards)
        return scorer_pb2.ScoreResponse(rewards=session_pb2.SessionRewards(reward=REWARD))


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
    """Serves a scorer and a collector that asks it. Yields a stub for the collector."""
    server = grpc.aio.server()
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scorer = f"127.0.0.1:{port}"
    async with asyncio.timeout(TIMEOUT_S), stub_at(folder, scorer=scorer, **settings) as stub:
        yield stub
    await server.stop(None)


@pytest.mark.parametrize("behave", ["hang", "raise", "wrong"])
async def test_a_bad_scorer_service_harms_its_session_alone(tmp_path: Path, behave: str) -> None:
    before = given_up()
    settings: dict[str, Any] = {"scorer_concurrency": 1, "scorer_tries": 2}
    if behave == "hang":
        settings["scorer_timeout_ms"] = 2000
    async with scored_by(Service(), tmp_path, **settings) as stub:
        async with subscribing(stub, credits_=2) as stream:
            await ingest(stub, unscored("bad", behave), unscored("good"))
            found = rewards_of(await stream.deliveries(2))
    assert found == {"bad": None, "good": REWARD}
    assert given_up() == before + 1


async def test_a_scorer_service_is_tried_again(tmp_path: Path) -> None:
    async with scored_by(Flaky(), tmp_path) as stub, subscribing(stub, credits_=1) as stream:
        await ingest(stub, unscored("a"))
        (delivery,) = await stream.deliveries(1)
    assert rewards_of([delivery]) == {"a": 0.5}
    assert delivery.sessions[0].trajectories[0].segments[1].reward == 1.0


async def test_all_that_an_earlier_process_left_is_found_a_part_at_a_time(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path) as before:
        await before.ingest([Arrival(unscored(name), 9) for name in "abcde"], 0)
    async with sqlite_store(tmp_path) as store:
        assert sorted(await store.to_score(3) + await store.to_score(3)) == [*"abcde"]
        await store.ingest([Arrival(unscored("f"), 9)], 0)
        assert await store.to_score(3) == []
