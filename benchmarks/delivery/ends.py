"""The two ends of a delivery as processes: the gateway's outbox and a trainer.

    python -m benchmarks.delivery.ends outbox|trainer

Each reads plans from standard input, one JSON object per line, and answers each with one line.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.delivery.journal import write_closed
from benchmarks.delivery.rows import Shape, sessions
from benchmarks.harness.memory import peak_mb
from rollmesh.batches import ragged, rows_of, to_torch
from rollmesh.client import Delivery, Subscription
from rollmesh.gateway import (
    Journal,
    ModelFiles,
    Outbox,
    Transaction,
    count_undelivered,
    open_sqlite,
)
from rollmesh.mesh import CollectorDirectory
from rollmesh.runtime.process import keep_freed_memory
from rollmesh.v1 import session_pb2

_PRELOADED, _CHUNK = 2048, 256
_LOOK_S = 0.02
Figures = dict[str, Any]
Records = Iterator[session_pb2.SessionRecord]


async def hand_over(plan: Figures, started: Callable[[], None]) -> Figures:
    """Hands over closed sessions with the gateway's own outbox, from a separate journal.

    As many sessions as a gateway holds at most are in the journal before the clock starts. The rest
    are closed while it runs. With `every_s`, sessions are closed one at a time at this interval.
    """
    records: Records = sessions(Shape(**plan["shape"]), plan["prefix"])
    with tempfile.TemporaryDirectory(prefix="bench-outbox-") as folder:
        async with open_sqlite(Path(folder), ModelFiles("", ""), Path(folder)) as database:
            collectors = CollectorDirectory("", plan["collector"])
            outbox = Outbox(
                database,
                collectors,
                remembered=_CHUNK,
            )
            if "every_s" not in plan:
                await _close(database, list(islice(records, _PRELOADED)))
            await outbox.restore()
            started()
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(outbox.run())
                if "every_s" in plan:
                    stamps = await _close_slowly(database, outbox, records, plan["every_s"])
                else:
                    stamps = {}
                    await _close_all(database, outbox, records)
                while await database.run(count_undelivered):  # noqa: ASYNC110 - the outbox has no event
                    await asyncio.sleep(_LOOK_S)
                ended = time.monotonic()
                running.cancel()
            await collectors.aclose()
    return {"began": began, "ended": ended, "stamps": stamps, "peak_mb": peak_mb("self")}


async def _close(database: Journal, records: list[session_pb2.SessionRecord]) -> None:
    def write(tx: Transaction) -> None:
        for record in records:
            write_closed(tx, record)

    await database.run(write)


async def _close_all(database: Journal, outbox: Outbox, records: Records) -> None:
    chunk = list(islice(records, _CHUNK))
    while chunk and not outbox.undelivered:  # noqa: ASYNC110 - the outbox has no event
        await asyncio.sleep(_LOOK_S)
    while chunk:
        while outbox.undelivered > _PRELOADED:  # noqa: ASYNC110 - the outbox has no event
            await asyncio.sleep(_LOOK_S)
        await _close(database, chunk)
        for _ in chunk:
            outbox.added()
        chunk = list(islice(records, _CHUNK))


async def _close_slowly(
    database: Journal, outbox: Outbox, records: Records, every_s: float
) -> dict[str, float]:
    stamps: dict[str, float] = {}
    for record in records:
        await asyncio.sleep(every_s)
        stamps[record.session_id] = time.monotonic()
        await _close(database, [record])
        outbox.added()
    return stamps


async def train(plan: Figures, started: Callable[[], None]) -> Figures:
    """Builds tensors from deliveries, batch by batch, and acknowledges them.

    With `hold` it reads nothing from its subscription until it gets a line of input.
    """
    marks: list[tuple[float, int]] = []
    stamps: dict[str, float] = {}
    batch: list[Delivery] = []
    rows = done = 0
    async with (
        Subscription(
            plan["collector"], consumer="trainer", unit="group", credits=plan["credits"]
        ) as subscription,
        asyncio.TaskGroup() as group,
    ):
        started()
        if plan.get("hold"):
            await asyncio.to_thread(sys.stdin.readline)
        held_mb = peak_mb("self")
        async for delivery in subscription:
            batch.append(delivery)
            rows += len(delivery.sessions)
            if rows - done < plan["batch"] and rows < plan["rows"]:
                continue
            tensors = to_torch(ragged(rows_of(batch)))
            now = time.monotonic()
            marks.append((now, len(tensors["num_tokens"])))
            if plan.get("stamped"):
                stamps |= {one.session_id: now for source in batch for one in source.sessions}
            group.create_task(subscription.acknowledge(*batch))
            batch, done = [], rows
            if rows >= plan["rows"]:
                break
    return {
        "marks": marks,
        "ended": time.monotonic(),
        "stamps": stamps,
        "peak_mb": peak_mb("self"),
        "held_mb": held_mb,
    }


async def main() -> None:
    """Runs plans until standard input ends."""
    work = {"outbox": hand_over, "trainer": train}[sys.argv[1]]
    if work is hand_over:
        keep_freed_memory()  # as every service does
    while line := await asyncio.to_thread(sys.stdin.readline):
        plan = json.loads(line)
        result = await work(plan, lambda: print("STARTED", flush=True))
        print("DONE", json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
