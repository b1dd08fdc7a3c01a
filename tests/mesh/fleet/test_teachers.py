"""A consumer's deliveries come with the scores of its teacher, whatever dies meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Client, Delivery, MeshAddresses, SessionResult, SubscribeOptions
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.collector.collectors import ingest
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record, trajectory, tree_record, with_images
from tests.mesh.fleet.test_scoring import Fleet, fleet_in
from tests.processes import ServiceProcess, reserved_port, running
from tests.waiting import until

CONTEXT = 64
SLOW: dict[str, Any] = {"tokens_per_second": 4}
"""A sequence takes a quarter of a second, so what happens meanwhile happens in the middle."""
TEACHER = SubscribeOptions(teacher="teacher", top_k=3)


@dataclass
class School:
    """A router, engines of a policy and its teacher, and a collector."""

    fleet: Fleet
    port: int
    store: str
    collector: ServiceProcess | None = None

    async def teacher(self, engine_id: str = "t1", **flags: object) -> None:
        sizes = {"model": "teacher", "max_context_tokens": CONTEXT}
        await self.fleet.engine(engine_id, **{**sizes, **flags})

    async def collect(self, **flags: object) -> None:
        """Starts the collector, in the place of one that is killed."""
        fleet = self.fleet
        if self.collector is not None:
            await self.collector.kill()
        process = running(
            "collector", fleet.folder, port=self.port, router=fleet.router.address,
            data_dir=fleet.folder / "collector", store=self.store, metrics_port=0, **flags,
        )  # fmt: skip
        self.collector = await fleet.enter(process)

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        async with open_channel(f"127.0.0.1:{self.port}") as channel:
            yield collector_pb2_grpc.CollectorServiceStub(channel)

    async def ingest(self, *sessions: session_pb2.SessionRecord, model: str = "policy") -> None:
        async with self.stub() as stub:
            for session in sessions:
                session.model = model
                await ingest(stub, session)

    async def stats(self) -> collector_pb2.GetStatsResponse:
        async with self.stub() as stub:
            return await stub.GetStats(collector_pb2.GetStatsRequest())  # type: ignore[no-any-return]

    async def until_unscored(self, count: int) -> None:
        """Waits until this many units of the consumer wait for its teacher."""

        async def look() -> bool:
            return [one.unscored for one in (await self.stats()).consumers] == [count]

        await until(look)

    def client(self) -> Client:
        at = f"127.0.0.1:{self.port}"
        return Client(MeshAddresses(router=self.fleet.router.address, collector=at))


@pytest.fixture(params=["sqlite", "postgres"])
async def school(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[School]:
    with reserved_port() as holder:
        async with fleet_in(tmp_path) as fleet:
            store = "sqlite"
            if request.param == "postgres":
                store = (await fleet.enter(postgres_database())).url
            found = School(fleet, int(holder.getsockname()[1]), store)
            await fleet.engine("p1")
            await found.collect()
            yield found


async def take(client: Client, count: int, **options: Any) -> list[Delivery]:
    """Takes and acknowledges deliveries."""
    settings: dict[str, Any] = {"consumer": "c", "unit": "session", "options": TEACHER, **options}
    found: list[Delivery] = []
    async with asyncio.timeout(60), client.subscribe(**settings) as deliveries:
        async for delivery in deliveries:
            await deliveries.acknowledge(delivery)
            found.append(delivery)
            if len(found) == count:
                return found
    raise AssertionError


def sessions_of(deliveries: Iterable[Delivery]) -> list[SessionResult]:
    return [session for delivery in deliveries for session in delivery.sessions]


async def check(client: Client, session: SessionResult, top_k: int = 3) -> None:
    """The scores are those that the teacher gives when it is asked."""
    for one in session.trajectories:
        wanted = await client.score(one, model="teacher", top_k=top_k, start=one.prompt_tokens)
        assert one.teacher is not None
        assert one.teacher.start == one.prompt_tokens == 2
        assert one.teacher.logprobs.tolist() == wanted.logprobs.tolist()
        assert one.teacher.top_ids.tolist() == wanted.top_ids.tolist()
        assert one.teacher.top_logprobs.tolist() == wanted.top_logprobs.tolist()
        assert one.teacher.policy_version == wanted.policy_version == 0


def two(session_id: str, tokens: int = 9) -> session_pb2.SessionRecord:
    """A session with two trajectories."""
    session = record(session_id)
    session.trajectories.append(trajectory(session_id, tokens))
    session.trajectories[1].trajectory_id = f"{session_id}-2"
    return session


async def scored(school: School) -> float:
    """Returns how many trajectories the collector's process had scored."""
    assert school.collector is not None
    values = await school.collector.samples()
    return values.get('rollmesh_collector_teacher_scores_total{outcome="scored"}', 0.0)


async def test_sessions_and_groups_come_with_scores_and_each_is_scored_once(
    school: School,
) -> None:
    await school.teacher()
    await school.ingest(two("s1"), record("s2", "g", 0, 2), record("s3", "g", 1, 2))
    async with school.client() as client:
        by_session = sessions_of(await take(client, 3))
        assert {one.session_id for one in by_session} == {"s1", "s2", "s3"}
        by_group = sessions_of(await take(client, 2, consumer="groups", unit="group"))
        wider = sessions_of(
            await take(client, 3, consumer="wider", options=SubscribeOptions(teacher="teacher"))
        )
        plain = sessions_of(await take(client, 3, consumer="plain", options=None))
        for session in (*by_session, *by_group):
            await check(client, session)
        for session in wider:
            await check(client, session, 0)
        assert all(one.teacher is None for session in plain for one in session.trajectories)
        changed = await client.changed_sessions()
        stored = {
            (one.trajectory_id, bool(one.scores.top_ids_u32le)): one.scores.logprobs_f32le
            for each in changed
            for one in each.scores
        }
        assert stored == {
            (one.trajectory_id, is_wide): one.teacher.logprobs[one.teacher.start :].tobytes()
            for is_wide, sessions in ((True, by_session), (False, wider))
            for session in sessions
            for one in session.trajectories
            if one.teacher is not None
        }
    assert await scored(school) == 8  # 4 trajectories for each top_k


async def test_units_wait_for_an_absent_teacher_and_cost_no_attempt(school: School) -> None:
    await school.ingest(record("s1"), record("s2"))
    async with school.client() as client:
        waiting = asyncio.create_task(take(client, 2))
        await school.until_unscored(2)
        await school.teacher()
        found = await waiting
        assert [one.attempt for one in found] == [1, 1]
        for session in sessions_of(found):
            await check(client, session)
        await school.until_unscored(0)


async def test_a_collector_that_is_killed_scores_nothing_twice_that_was_stored(
    school: School,
) -> None:
    await school.ingest(*(record(f"s{at}") for at in range(6)))
    await school.teacher(**SLOW)
    async with school.client() as client:
        waiting = asyncio.create_task(take(client, 6))

        async def some_are_scored() -> bool:
            return await scored(school) >= 2

        await until(some_are_scored)
        await school.collect()
        found = sessions_of(await waiting)
        assert sorted(one.session_id for one in found) == [f"s{at}" for at in range(6)]
        assert await scored(school) <= 4
        for session in found:
            await check(client, session)


async def test_a_consumer_that_returns_gets_the_scores_too(school: School) -> None:
    await school.ingest(record("s1"))
    async with school.client() as client:
        waiting = asyncio.create_task(take(client, 1))
        await school.until_unscored(1)
        waiting.cancel()
        await school.until_unscored(0)
        await school.teacher()
        (session,) = sessions_of(await take(client, 1))
        await check(client, session)


async def test_a_trajectory_that_no_teacher_can_score_is_left_out_with_its_reason(
    school: School,
) -> None:
    await school.teacher()
    long, pictured = two("long", CONTEXT + 1), with_images(two("pictured"), b"image")
    pictured.trajectories[0].ClearField("images")
    await school.ingest(long, pictured, tree_record("tree"), record("last"))
    async with school.client() as client:
        found = await take(client, 3)
        reason = collector_pb2.FILTER_REASON_TEACHER
        for delivery in found:
            (session,) = delivery.sessions
            await check(client, session)
            assert len(session.trajectories) == 1
            left_out = [(one.reason, one.count) for one in delivery.removed]
            assert left_out == ([] if session.session_id == "last" else [(reason, 1)])
        (stats,) = (await school.stats()).consumers
        filtered = [(one.reason, one.units) for one in stats.filtered]
        assert (collector_pb2.FILTER_REASON_NOTHING_LEFT, 1) in filtered
        async with school.stub() as stub:
            await stub.Seek(
                collector_pb2.SeekRequest(
                    consumer="c",
                    position=collector_pb2.Position(end=collector_pb2.LOG_END_EARLIEST),
                )
            )
        again = await take(client, 3)
        assert sorted(one.delivery_id for one in again) == sorted(one.delivery_id for one in found)


async def test_a_teacher_with_another_vocabulary_ends_the_stream_and_loses_nothing(
    school: School,
) -> None:
    await school.teacher(vocabulary_tokens=500)
    await school.ingest(record("s1"))
    async with school.client() as client:
        with pytest.raises(
            InvalidFieldError, match=r"consumer\.teacher\.model: .* has no tokenizer"
        ):
            await take(client, 1)
        await school.fleet.engines["t1"].kill()
        await school.fleet.until_left("t1")
        await school.teacher("t2")
        (session,) = sessions_of(await take(client, 1))
        await check(client, session)


async def test_a_top_k_that_the_teacher_does_not_offer_ends_the_stream_and_loses_nothing(
    school: School,
) -> None:
    small: dict[str, Any] = {"vocabulary_tokens": 50}
    await school.fleet.engine("s1", model="small", **small)
    await school.teacher(**small)
    await school.ingest(record("s1"), record("s2"), model="small")
    async with school.client() as client:
        wide = SubscribeOptions(teacher="teacher", top_k=51)
        says = r"^consumer\.teacher\.top_k: is 51; give at most 50$"
        for _ in range(2):
            with pytest.raises(InvalidFieldError, match=says) as caught:
                await take(client, 1, options=wide)
            assert caught.value.field == "consumer.teacher.top_k"
        narrow = SubscribeOptions(teacher="teacher", top_k=50)
        found = await take(client, 2, options=narrow)
        assert [one.attempt for one in found] == [1, 1]
        for session in sessions_of(found):
            await check(client, session, 50)


async def test_another_teacher_scores_what_waited_for_the_first_one(school: School) -> None:
    await school.ingest(record("s1"))
    async with school.client() as client:
        absent = SubscribeOptions(teacher="absent")
        waiting = asyncio.create_task(take(client, 1, options=absent))
        await school.until_unscored(1)
        await school.teacher()
        change = collector_pb2.UpdateConsumerRequest(
            consumer=collector_pb2.Consumer(
                name="c", teacher=collector_pb2.Teacher(model="teacher", top_k=3)
            )
        )
        async with school.stub() as stub:
            await stub.UpdateConsumer(change)
        (session,) = sessions_of(await waiting)
        await check(client, session)


async def test_scores_go_with_their_session(school: School) -> None:
    """Scores count as stored bytes, and are removed with their session."""
    await school.teacher()
    await school.collect(retain_settled_ms=0)
    await school.ingest(record("s1"))
    before = (await school.stats()).stored_bytes
    async with school.client() as client:
        found = await take(client, 1)
        assert len(found) == 1

        async def it_is_removed() -> bool:
            return (await school.stats()).removed_sessions == 1

        await until(it_is_removed)
        assert (await school.stats()).stored_bytes <= before
