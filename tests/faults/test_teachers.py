"""Teachers that are killed at each boundary, drained, or given new weights while they score."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rollmesh.client import SubscribeOptions
from rollmesh.collector import Store, Teachers
from rollmesh.mesh import ScoringEngines
from rollmesh.v1 import collector_pb2 as pb, trajectory_pb2
from tests.collector.records import record, trajectory
from tests.collector.stores import Reader, ingest, sqlite_store
from tests.controls import RESUME, pause
from tests.faults.proxy import proxy_to
from tests.mesh.fleet.test_scoring import fleet_in, until_busy
from tests.mesh.fleet.test_teachers import School, scored, sessions_of, take
from tests.processes import reserved_port

TOKENS, TOP_K = 2000, 256
"""The scores of a trajectory take four messages of at most 1 MiB."""
PASSED = 1_500_000
"""Bytes of an answer that end in its second message."""
SIZES: dict[str, Any] = {"vocabulary_tokens": TOKENS, "max_context_tokens": TOKENS}
TEACHER = pb.Teacher(model="teacher", top_k=TOP_K)


class Watched:
    """A store with an act at a point of the first scoring."""

    def __init__(self, store: Store, point: str, act: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._acts = {point: act}
        self.stored: list[tuple[tuple[str, int], bytes]] = []

    async def unscored(self, *given: Any) -> Any:
        found = await self._store.unscored(*given)
        await self._reach("before the request")
        return found

    async def add_scores(self, teacher: pb.Teacher, key: tuple[str, int], scores: bytes) -> None:
        await self._reach("after the answer")
        await self._store.add_scores(teacher, key, scores)
        self.stored.append((key, scores))

    async def _reach(self, point: str) -> None:
        if (act := self._acts.pop(point, None)) is not None:
            await act()


@pytest.mark.parametrize("point", ["before the request", "in mid-answer", "after the answer"])
async def test_the_scores_of_a_teacher_that_is_killed_are_whole_and_stored_once(
    tmp_path: Path, point: str
) -> None:
    async with fleet_in(tmp_path) as fleet, sqlite_store(tmp_path / "store") as store:
        holder = reserved_port()
        port = int(holder.getsockname()[1])
        proxy = await fleet.enter(proxy_to(f"127.0.0.1:{port}"))
        with holder:
            await fleet.engine("p1", **SIZES)
            teacher = {"model": "teacher", **SIZES}
            await fleet.engine("t1", port=port, advertise=proxy.address, **teacher)
        session = record("s")
        session.model = "policy"
        session.trajectories[0].CopyFrom(trajectory("s", TOKENS))
        await ingest(store, session, 0)
        reader = await Reader.open(store, teacher=TEACHER)
        (unit,) = await reader.fetch()
        watched = Watched(store, point, fleet.engines["t1"].kill)
        engines = ScoringEngines(fleet.router.address)
        async with aclosing(engines), asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            teachers = Teachers(cast("Store", watched), engines)
            if point == "in mid-answer":
                proxy.most = PASSED
            tasks.create_task(teachers.score(reader.settings, unit, lambda: True))
            if point == "in mid-answer":
                await proxy.is_full.wait()
                await fleet.engines["t1"].kill()
            if point != "after the answer":
                await fleet.engine("t2", **teacher)
        assert await store.unscored(reader.settings, unit, "s") == []
        ((key, stored),) = watched.stored
        assert key == ("s", 0)
        scores, ids = trajectory_pb2.TeacherScores.FromString(stored), np.arange(2, TOKENS)
        logprobs = np.frombuffer(scores.logprobs_f32le, "<f4")
        top_ids = np.frombuffer(scores.top_ids_u32le, "<u4").reshape(-1, TOP_K)
        assert logprobs.tolist() == pytest.approx((ids % 97 / -50).tolist())
        assert top_ids[:, 0].tolist() == ids.tolist()
        assert len(scores.top_logprobs_f32le) == 4 * TOP_K * len(ids)


async def test_a_trajectory_that_takes_longer_gets_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.collector.scoring._TIMEOUT_S", 0.1)
    async with fleet_in(tmp_path) as fleet, sqlite_store(tmp_path / "store") as store:
        await fleet.engine("p1")
        await fleet.engine("t1", model="teacher", tokens_per_second=1)
        session = record("s")
        session.model = "policy"
        await ingest(store, session, 0)
        teacher = pb.Teacher(model="teacher", top_k=2)
        reader = await Reader.open(store, teacher=teacher)
        (unit,) = await reader.fetch()
        engines = ScoringEngines(fleet.router.address)
        async with aclosing(engines), asyncio.timeout(180):
            await Teachers(store, engines).score(reader.settings, unit, lambda: True)
        assert await store.unscored(reader.settings, unit, "s") == []


@pytest.mark.long
async def test_of_two_teachers_one_is_drained_and_one_gets_weights_while_they_score(
    tmp_path: Path,
) -> None:
    """Both are paused, so that all of it comes before their first answer."""
    with reserved_port() as holder:
        async with fleet_in(tmp_path) as fleet:
            school = School(fleet, int(holder.getsockname()[1]), "sqlite")
            await fleet.engine("p1")
            await school.collect()
            await school.teacher("t1", grace_ms=100)
            await school.teacher("o1", model="other")
            stubs = {one: await fleet.stub(one) for one in ("t1", "o1")}
            for stub in stubs.values():
                await stub.ControlEngines(pause())
            await school.ingest(*(record(f"s{at}") for at in range(8)))
            other = SubscribeOptions(teacher="other", top_k=2)
            async with school.client() as client, asyncio.TaskGroup() as tasks:
                first = tasks.create_task(take(client, 8))
                second = tasks.create_task(take(client, 8, consumer="d", options=other))
                for stub in stubs.values():
                    await until_busy(stub)
                await client.push_weights({"w": np.zeros(1, np.float32)}, 5, model="other")
                await stubs["o1"].ControlEngines(RESUME)
                await school.teacher("t2")
                assert await fleet.engines["t1"].terminate() == 0
            for task, version, width in ((first, 0, 3), (second, 5, 2)):
                found = sessions_of(task.result())
                assert sorted(one.session_id for one in found) == [f"s{at}" for at in range(8)]
                for session in found:
                    (row,) = session.trajectories
                    assert row.teacher is not None
                    assert row.teacher.policy_version == version
                    assert row.teacher.logprobs[2:].tolist() == pytest.approx(
                        (row.token_ids[2:] % 97 / -50).tolist()
                    )
                    assert row.teacher.top_ids.shape == (len(row.token_ids), width)
            assert await scored(school) == 16
