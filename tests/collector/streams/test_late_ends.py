"""Streams that end after the service that served them."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rollmesh.collector import Subscriptions
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
