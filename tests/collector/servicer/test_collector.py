"""The collector as a process: contract, durability, resumption."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.client import Subscription
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.collector.records import record
from tests.processes import ServiceProcess, running


async def ingest(collector: ServiceProcess, session: session_pb2.SessionRecord) -> bool:
    """Returns whether it was known."""
    async with open_channel(collector.address) as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        with typed_errors():
            response = await stub.Ingest(
                collector_pb2.IngestRequest(sessions=[session]), timeout=60, wait_for_ready=True
            )
    (duplicate,) = response.duplicates
    return duplicate


async def stats(collector: ServiceProcess) -> collector_pb2.GetStatsResponse:
    async with open_channel(collector.address) as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        return await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=60)


def subscribe(
    collector: ServiceProcess, consumer: str = "t", unit: str = "session"
) -> Subscription:
    return Subscription(collector.address, consumer=consumer, unit=unit)  # type: ignore[arg-type]


async def take(subscription: Subscription, count: int) -> list[str]:
    async with asyncio.timeout(60):
        return [(await anext(subscription)).delivery_id for _ in range(count)]


@pytest.fixture
async def collector(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running("collector", tmp_path, port=0, data_dir=tmp_path / "data") as process:
        yield process


async def test_names_get_everything_and_streams_of_a_name_share(collector: ServiceProcess) -> None:
    ids = [f"s{at}" for at in range(8)]
    for id_ in ids:
        await ingest(collector, record(id_))
    async with subscribe(collector, "one") as one:
        assert await take(one, 8) == ids
    settings = {"consumer": "two", "unit": "session", "credits": 4}
    async with (
        Subscription(collector.address, **settings) as left,  # type: ignore[arg-type]
        Subscription(collector.address, **settings) as right,  # type: ignore[arg-type]
    ):
        async with asyncio.timeout(60):
            first = [await left._ready.get() for _ in range(4)]  # noqa: SLF001 - no new credits
            second = [await right._ready.get() for _ in range(4)]  # noqa: SLF001
    got = {delivery.delivery_id for delivery in (*first, *second)}  # type: ignore[union-attr]
    assert got == set(ids)


async def test_consumers_resume_at_a_restarted_collector(tmp_path: Path) -> None:
    flags = {"data_dir": tmp_path / "data"}
    async with running("collector", tmp_path, port=0, **flags) as first:
        for at in range(4):
            await ingest(first, record(f"s{at}"))
        async with subscribe(first) as subscription:
            async with asyncio.timeout(60):
                held = [await anext(subscription) for _ in range(2)]
                await subscription.acknowledge(held[0])
            await first.kill()
            async with running("collector", tmp_path, port=first.port, **flags) as second:
                await ingest(second, record("s4"))
                assert await take(subscription, 3) == ["s2", "s3", "s4"]  # s1 is held: not again
                async with asyncio.timeout(60):
                    await subscription.acknowledge(held[1])
    async with (
        running("collector", tmp_path, port=0, **flags) as third,
        subscribe(third) as successor,
    ):
        assert await take(successor, 3) == ["s2", "s3", "s4"]


async def test_a_trainer_killed_before_its_ack_leaves_all_to_its_successor(
    collector: ServiceProcess, tmp_path: Path
) -> None:
    for at in range(3):
        await ingest(collector, record(f"s{at}"))
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio, sys\n"
        "from rollmesh.client.deliveries import Subscription\n"
        "async def main():\n"
        "    async with Subscription(sys.argv[1], consumer='t', unit='session') as sessions:\n"
        "        held = [await anext(sessions) for _ in range(3)]\n"
        "        await sessions.acknowledge(held[0])\n"
        "        print('HOLDS', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, str(script), collector.address, stdout=asyncio.subprocess.PIPE
    )
    assert trainer.stdout is not None
    async with asyncio.timeout(60):
        assert await trainer.stdout.readline() == b"HOLDS\n"
    trainer.kill()
    await trainer.wait()
    async with subscribe(collector) as successor:
        assert await take(successor, 2) == ["s1", "s2"]


async def test_a_trainer_without_the_sdk_reads_groups_and_acknowledges(
    collector: ServiceProcess,
) -> None:
    for group in ("g1", "g2"):
        for index in range(2):
            await ingest(collector, record(f"{group}-{index}", group, index, 2))
    trainer = await asyncio.create_subprocess_exec(
        sys.executable,
        "examples/trainer_grpc_only.py",
        collector.address,
        "--groups=2",
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, _ = await trainer.communicate()
    assert json.loads(output) == {
        "groups": 2,
        "sessions": 4,
        "tokens": 24,
        "trained_tokens": 16,
        "reward_mean": 0.5,
    }
    consumers = (await stats(collector)).consumers
    assert [(one.name, one.acknowledged, one.ready) for one in consumers] == [("grpc-only", 2, 0)]
