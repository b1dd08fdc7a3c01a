"""Several collectors with a scorer on one store: each session is scored once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.collector import Arrival
from rollmesh.runtime import clock
from rollmesh.v1 import collector_pb2 as pb, scorer_pb2, scorer_pb2_grpc, session_pb2
from tests.collector.collectors import TIMEOUT_S, stub_at, subscribing
from tests.collector.postgres_server import Database
from tests.collector.stores import postgres_store
from tests.scorer.sessions import REWARD, unscored
from tests.waiting import until

STORE = "rollmesh.collector.postgres"
DIES = (
    "UPDATE collectors SET alive_until = clock_timestamp()"
    " WHERE id IN (SELECT scorer FROM sessions)"
)
"""The collector that has to score sessions is no longer alive."""
HOUR_MS = 3_600_000


class Counting(scorer_pb2_grpc.ScorerServiceServicer):
    """Counts the calls for each session. Answers when it is told to."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.answers = asyncio.Event()

    async def Score(self, request: scorer_pb2.ScoreRequest, context: Any) -> Any:
        self.calls[request.session.session_id] += 1
        await self.answers.wait()
        return scorer_pb2.ScoreResponse(rewards=session_pb2.SessionRewards(reward=REWARD))


@asynccontextmanager
async def served(service: Counting) -> AsyncIterator[str]:
    server = grpc.aio.server()
    scorer_pb2_grpc.add_ScorerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ingest(stub: Any, *names: str) -> None:
    request = pb.IngestRequest(sessions=[unscored(name) for name in names])
    await stub.Ingest(request, timeout=TIMEOUT_S)


async def test_collectors_with_one_store_score_each_session_once(
    tmp_path: Path, database: Database
) -> None:
    service = Counting()
    async with served(service) as scorer:
        settings = {"store": database.url, "scorer": scorer, "scorer_concurrency": 8}
        async with stub_at(tmp_path, **settings) as left:
            await ingest(left, "a", "b")
            async with (
                stub_at(tmp_path, **settings) as right,  # which finds two that wait
                subscribing(right, credits_=4) as stream,
            ):
                await ingest(right, "c", "d")

                async def all_are_asked_for() -> bool:
                    return len(service.calls) == 4

                await until(all_are_asked_for)
                service.answers.set()
                assert sorted(await stream.delivered(4)) == ["a", "b", "c", "d"]
    assert service.calls == dict.fromkeys("abcd", 1)


async def test_a_reward_that_a_client_sets_meanwhile_counts_more_than_a_score(
    tmp_path: Path,
) -> None:
    service = Counting()
    async with served(service) as scorer, stub_at(tmp_path, scorer=scorer) as stub:
        await ingest(stub, "a", "b")
        await until(lambda: service.calls.keys() == {"a", "b"})
        rewards = session_pb2.SessionRewards(reward=REWARD - 1)
        request = pb.SetRewardsRequest(session_id="a", request_id="r", rewards=rewards)
        await stub.SetRewards(request, timeout=TIMEOUT_S)
        service.answers.set()
        async with subscribing(stub, credits_=2) as stream:
            assert sorted(await stream.delivered(2)) == ["a", "b"]
        found = [one.session async for one in stub.ReadSessions(pb.ReadSessionsRequest())]
    assert {one.session_id: one.reward for one in found} == {"a": REWARD - 1, "b": REWARD}


async def test_a_collector_that_is_thought_dead_takes_none_of_its_own_sessions_again(
    database: Database,
) -> None:
    async with postgres_store(database.url) as slow, postgres_store(database.url) as other:
        await slow.ingest([Arrival(unscored("a"), HOUR_MS)], clock.steady_unix_ms())
        await asyncio.to_thread(database.sql, DIES)
        assert await slow.to_score(9) == []
        assert await other.to_score(9) == ["a"]


async def test_sessions_that_a_dead_collector_had_to_score_are_scored_by_another(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Counting()
    service.answers.set()
    monkeypatch.setattr("rollmesh.collector.scoring._TAKE_OVER_S", 0.1)
    async with served(service) as scorer:
        async with stub_at(tmp_path, store=database.url, scorer=scorer) as heir:
            async with postgres_store(database.url) as dead:
                await dead.ingest([Arrival(unscored("a"), HOUR_MS)], clock.steady_unix_ms())
            await asyncio.to_thread(database.sql, DIES)
            async with subscribing(heir, credits_=1) as stream:
                assert await stream.delivered(1) == ["a"]
    assert service.calls == {"a": 1}


async def test_a_session_that_waits_for_its_trainer_is_not_taken_to_be_scored(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{STORE}._ALIVE_MS", 1)
    async with postgres_store(database.url) as one, postgres_store(database.url) as other:
        late = unscored("late")
        late.reward_timeout_ms = HOUR_MS
        await one.ingest([Arrival(late), Arrival(unscored("a"), HOUR_MS)], clock.steady_unix_ms())

        async def taken() -> list[str]:
            return await other.to_score(10)

        assert await until(taken) == ["a"]


async def test_a_store_has_an_id_that_its_collectors_share(database: Database) -> None:
    async with postgres_store(database.url) as one, postgres_store(database.url) as other:
        assert one.store_id == other.store_id != ""
