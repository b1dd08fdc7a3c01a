"""Streams that end after the service that served them."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import Subscriptions
from rollmesh.runtime.errors import ConsumerMovedError
from rollmesh.v1 import collector_pb2 as pb
from tests.collector.records import record
from tests.collector.stores import Reader, fill, sqlite_store


async def requests(last: asyncio.Event) -> AsyncIterator[pb.SubscribeRequest]:
    """Asks for one delivery, and ends when it is told to."""
    yield pb.SubscribeRequest(hello=pb.SubscribeHello(consumer="c"))
    yield pb.SubscribeRequest(grant=pb.GrantCredits(credits=1))
    await last.wait()


async def test_a_stream_closed_after_the_tasks_of_its_collector_leaves_nothing_undone(
    tmp_path: Path,
) -> None:
    last = asyncio.Event()
    async with sqlite_store(tmp_path) as store:
        await Reader.open(store, "c")
        await fill(store, [record("s")])
        async with asyncio.TaskGroup() as tasks:
            stream: Any = Subscriptions(store, tasks).stream(requests(last))
            assert (await anext(stream)).WhichOneof("part") == "delivery"
            last.set()
        await stream.aclose()
    gc.collect()  # a coroutine that nothing awaited would fail this test


@pytest.mark.parametrize("is_over", [True, False], ids=["moved", "being moved"])
async def test_a_unit_that_was_judged_before_its_consumer_was_moved_is_judged_again(
    tmp_path: Path, *, is_over: bool
) -> None:
    """The trainer goes back to a checkpoint while a unit is loaded that was too old for it."""
    last, begun = asyncio.Event(), asyncio.Event()
    async with sqlite_store(tmp_path) as store, asyncio.TaskGroup() as tasks:
        streams = Subscriptions(store, tasks)
        rules = pb.DeliveryFilter(max_policy_lag=1)
        unit = pb.DELIVERY_UNIT_SESSION
        trainer = pb.Consumer(name="c", unit=unit, filter=rules, policy_version=1, lease_ms=60_000)
        await streams.create(trainer, None)
        saved = pb.CreateCheckpointRequest(consumer="c", checkpoint_id="k")
        await store.create_checkpoint(saved, 0)
        await streams.update(pb.Consumer(name="c", policy_version=5))
        await fill(store, [record("s")])
        load, back = store.load, pb.RestoreCheckpointRequest(consumer="c", checkpoint_id="k")

        async def restored() -> object:
            begun.set()
            return await store.restore_checkpoint(back)

        async def moved_meanwhile(*args: Any) -> Any:
            found = await load(*args)
            moving = tasks.create_task(streams.move("c", restored()))
            await begun.wait()
            if is_over:
                await moving
            return found

        store.load = moved_meanwhile  # type: ignore[assignment, method-assign]
        with pytest.raises(ConsumerMovedError):
            await anext(streams.stream(requests(last)))
        last.set()
        standing = await store.standing("c")
    assert (standing.ready, list(standing.filtered)) == (1, [])
