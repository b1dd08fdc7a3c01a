"""The client has the engines of a mesh score tokens, and another one if one is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from rollmesh.batches import rows_of
from rollmesh.client import Client, MeshAddresses, Scores
from rollmesh.client.sync import Client as SyncClient
from rollmesh.runtime.errors import (
    InvalidFieldError,
    TokenOutOfVocabularyError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    trajectory_pb2,
)
from tests.batches.records import linear, session
from tests.controls import ABORT_ALL, KEEP, RESUME, pause
from tests.processes import ServiceProcess, running
from tests.waiting import until

_Entered = TypeVar("_Entered")
VOCABULARY = 400
STEP = {"tokens_per_second": 4, "lease_capacity": 2}
"""A sequence takes a quarter of a second, so what happens meanwhile happens in the middle."""


class Fleet:
    """A router and scripted engines."""

    def __init__(self, folder: Path, stack: AsyncExitStack, router: ServiceProcess) -> None:
        self.folder, self._stack = folder, stack
        self.router = router
        self.engines: dict[str, ServiceProcess] = {}

    async def engine(self, engine_id: str, **flags: object) -> None:
        own: dict[str, object] = {"backend": "scripted", "vocabulary_tokens": VOCABULARY}
        own |= {"engine_id": engine_id, "router": self.router.address}
        process = running("engine", self.folder / engine_id, **{**own, **flags})
        self.engines[engine_id] = await self.enter(process)

    async def enter(self, context: AbstractAsyncContextManager[_Entered]) -> _Entered:
        """Enters a context that ends with the fleet."""
        return await self._stack.enter_async_context(context)

    async def stub(self, engine_id: str) -> Any:
        channel = await self._stack.enter_async_context(
            open_channel(self.engines[engine_id].address)
        )
        return engine_pb2_grpc.EngineServiceStub(channel)

    async def until_left(self, engine_id: str) -> None:
        """Waits until the router no longer lists an engine."""
        async with open_channel(self.router.address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)

            async def look() -> bool:
                found = await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=60)
                return engine_id not in {one.hello.replica_id for one in found.replicas}

            await until(look)

    @property
    def addresses(self) -> MeshAddresses:
        return MeshAddresses(router=self.router.address, gateway="-", collector="-", sidecar="-")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_in(tmp_path) as fleet:
        yield fleet


@asynccontextmanager
async def fleet_in(folder: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            running("router", folder, data_dir=folder / "router")
        )
        yield Fleet(folder, stack, router)


def sequences(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.integers(2, VOCABULARY, 5 + at).astype(np.uint32) for at in range(count)]


def check(scores: Scores, ids: np.ndarray, start: int = 1) -> None:
    """What the scripted model says of these ids."""
    wanted = np.where(np.arange(len(ids)) < start, 0, (ids % 97) / -50)
    assert scores.logprobs.tolist() == pytest.approx(wanted.tolist())
    assert scores.start == start


async def test_an_engine_that_refuses_a_sequence_is_asked_as_before(fleet: Fleet) -> None:
    for name in ("e1", "e2"):
        await fleet.engine(name)
    (ids,) = sequences(1)
    async with Client(fleet.addresses) as client:
        with pytest.raises(TokenOutOfVocabularyError):
            await client.score([VOCABULARY + 1])
        assert {(await client.score(ids)).engine_id for _ in range(40)} == {"e1", "e2"}


async def test_a_sequence_a_batch_and_rows_are_scored_as_arrays(fleet: Fleet) -> None:
    await fleet.engine("e1")
    async with Client(fleet.addresses) as client:
        (ids,) = sequences(1)
        one = await client.score(ids, top_k=3)
        check(one, ids)
        assert (one.logprobs.dtype, one.top_ids.dtype) == (np.float32, np.int64)
        assert (one.top_logprobs.dtype, one.top_ids.shape) == (np.float32, (5, 3))
        assert one.top_ids[0].tolist() == [-1, -1, -1]
        assert one.top_ids[1:, 0].tolist() == ids[1:].tolist()
        assert one.top_logprobs[0].tolist() == [-np.inf] * 3
        assert (one.policy_version, one.engine_id) == (0, "e1")
        check(await client.score(ids.tolist(), start=3, model="policy"), ids, 3)

        again = await client.score(ids, ids=one.top_ids)
        assert again.top_ids.tolist() == one.top_ids.tolist()
        assert again.top_logprobs == pytest.approx(one.top_logprobs)

        batch = sequences(4)
        for scores, wanted in zip(await client.score(batch), batch, strict=True):
            check(scores, wanted)
        padded = [np.full((len(one), 2), -1) for one in batch]
        given = await client.score(batch, ids=padded, start=[1, 2, 3, 4])
        for start, (scores, wanted) in enumerate(zip(given, batch, strict=True), 1):
            check(scores, wanted, start)
            assert (scores.top_logprobs == -np.inf).all()
        assert await client.score(batch[:0]) == []

        trajectories = [linear("t1", 3, 4), linear("t2", 5, 2)]
        rows = rows_of([session("s", trajectories)])
        for source in (rows, trajectories):
            starts = [one.prompt_tokens for one in trajectories]
            found = await client.score(source, start=starts)
            for scores, trajectory in zip(found, trajectories, strict=True):
                check(scores, trajectory.token_ids, trajectory.prompt_tokens)
                assert scores.logprobs[trajectory.loss_mask].all()
        check(await client.score(trajectories[0]), trajectories[0].token_ids)

    def blocking() -> tuple[Scores, Any]:
        with SyncClient(fleet.addresses) as client:
            return client.score(ids), client.score(batch, top_k=1)

    alone, several = await asyncio.to_thread(blocking)
    check(alone, ids)
    check(several[3], batch[3])


async def test_what_cannot_be_scored_is_refused_by_its_name(fleet: Fleet) -> None:
    await fleet.engine("e1")
    image = trajectory_pb2.TrajectoryImage(start=1, tokens=1)
    pictured = replace(linear("t", 3, 3), images=(image,))
    (ids,) = sequences(1)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([ids, pictured], {}, r"sequences\[1\]: has images"),
        ([0.5, 1.5], {}, r"sequences\[0\]: is no array of ids"),
        (np.array([1.5]), {}, r"sequences\[0\]: is no array of ids"),
        ([ids, [3, -1]], {}, r"sequences\[1\]: is no array of ids"),
        ([ids], {"start": [1, 2]}, "start: has 2 for 1 sequences"),
        ([ids], {"ids": []}, "ids: has 0 for 1 sequences"),
        (ids, {"ids": [[1]]}, "ids: has 1 rows"),
        (ids, {"ids": np.full((5, 1), -2)}, "ids: is no array of ids"),
        (ids, {"start": -1}, "start: cannot be -1"),
        (ids, {"top_k": -1}, "top_k: cannot be -1"),
        (ids, {"concurrency": 0}, "concurrency: is 0"),
        (ids, {"model": "teacher"}, "model: is 'teacher'; name one of the mesh's"),
        (ids, {"same_vocabulary_as": "other"}, "same_vocabulary_as: is 'other'; name"),
        (ids, {"start": 5}, "start: is 5 of 5 ids"),
        (ids, {"top_k": 257}, "top_k: is 257; give at most 256"),
        (ids, {"top_k": 1, "ids": np.ones((5, 1), int)}, "top_k: cannot be combined"),
    ]
    async with Client(fleet.addresses) as client:
        for given, options, says in cases:
            with pytest.raises(InvalidFieldError, match=says):
                await client.score(given, **options)
        with pytest.raises(TypeError, match="no option topk"):
            await client.score(ids, topk=3)  # type: ignore[call-overload]
        with pytest.raises(TokenOutOfVocabularyError) as caught:
            await client.score([ids, [5, VOCABULARY]])
        assert caught.value.__notes__ == ["in sequences[1]"]
        check(await client.score(ids), ids)


async def test_sequences_of_an_engine_that_is_killed_are_scored_by_another(fleet: Fleet) -> None:
    await asyncio.gather(fleet.engine("e1", **STEP), fleet.engine("e2", **STEP))
    batch = sequences(24)
    async with Client(fleet.addresses) as client, asyncio.timeout(120):
        scoring = asyncio.ensure_future(client.score(batch, concurrency=8, top_k=1))
        for engine_id in fleet.engines:
            await until_busy(await fleet.stub(engine_id))
        assert not scoring.done()
        await fleet.engines["e1"].kill()
        found = await scoring
    for scores, ids in zip(found, batch, strict=True):
        check(scores, ids)
    assert {one.engine_id for one in found} >= {"e2"}


async def until_busy(stub: Any) -> None:
    async def look() -> bool:
        return bool((await stub.GetInfo(engine_pb2.GetInfoRequest())).running)

    await until(look)


async def test_sequences_that_are_aborted_or_find_no_room_are_scored_again(fleet: Fleet) -> None:
    await fleet.engine("e1", **STEP, max_bytes_in_flight=500_000)  # one answer has 408,000
    batch = [np.tile(ids, 200)[:1000] for ids in sequences(6)]
    async with Client(fleet.addresses) as client, asyncio.timeout(120):
        scoring = asyncio.ensure_future(client.score(batch, concurrency=3, top_k=50))
        stub = await fleet.stub("e1")
        await until_busy(stub)
        await stub.ControlEngines(ABORT_ALL)
        for scores, ids in zip(await scoring, batch, strict=True):
            check(scores, ids)


async def test_a_paused_engine_is_asked_last_and_an_idle_one_first(fleet: Fleet) -> None:
    await asyncio.gather(fleet.engine("e1"), fleet.engine("e2"))
    stub = await fleet.stub("e1")
    await stub.ControlEngines(pause(KEEP))
    async with Client(fleet.addresses) as client, asyncio.timeout(120):

        async def is_known() -> bool:
            return any(one.hello.load.paused for one in (await client.replicas()).replicas)

        await until(is_known)
        assert {one.engine_id for one in await client.score(sequences(8))} == {"e2"}
        await fleet.engines["e2"].kill()
        waiting = asyncio.ensure_future(client.score(sequences(1)[0]))
        await until_busy(stub)
        await stub.ControlEngines(RESUME)
        assert (await waiting).engine_id == "e1"


async def test_sequences_are_spread_over_all_engines(fleet: Fleet) -> None:
    await asyncio.gather(*(fleet.engine(f"e{at}", **STEP) for at in range(3)))
    async with Client(fleet.addresses) as client, asyncio.timeout(120):
        found = await client.score(sequences(12), concurrency=6)
    assert {one.engine_id for one in found} == {"e0", "e1", "e2"}
