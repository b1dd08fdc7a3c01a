import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.client import Client, MeshAddresses, sync
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.client.conftest import addresses_of, length


@pytest.fixture
async def collector(tmp_path: Path) -> AsyncIterator[str]:
    """Address of a collector process that stores below `tmp_path`."""
    command = (
        "-m",
        "rollmesh.collector",
        "--port",
        "0",
        "--router",
        "",
        "--data-dir",
        str(tmp_path),
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=PIPE, stderr=DEVNULL
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield f"127.0.0.1:{json.loads(line.removeprefix('READY '))['port']}"
    finally:
        process.kill()
        await process.communicate()


def test_the_sync_client_can_all_that_the_async_one_can() -> None:
    free = {"evaluate", "rollout", "rollout_groups"}  # functions that take the async client
    able = {name for name in dir(Client) if not name.startswith("_")} | free
    assert {name for name in dir(sync.Client) if not name.startswith("_")} == able


async def test_the_sync_client_reads_a_group_and_acknowledges_it(collector: str) -> None:
    async with open_channel(collector) as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        for index in range(2):
            record = session_pb2.SessionRecord(
                session_id=f"5e55{index}",
                group_id="g",
                sample_index=index,
                group_size=2,
                outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
                reward=float(index),
            )
            await stub.Ingest(collector_pb2.IngestRequest(sessions=[record]))

    def work() -> tuple[list[float | None], list[int]]:
        addresses = MeshAddresses(router="", gateway="", collector=collector, sidecar="")
        with sync.Client(addresses) as client:
            with client.subscribe("trainer", unit="group") as groups:
                delivery = next(groups)
                groups.acknowledge(delivery)
            consumers = client.stats().consumers
            rewards = [session.reward for session in delivery.sessions]
            return rewards, [consumer.acknowledged for consumer in consumers]

    async with asyncio.timeout(60):
        rewards, acknowledged = await asyncio.to_thread(work)
    assert (rewards, acknowledged) == ([0.0, 1.0], [1])


async def test_what_on_sample_raises_ends_a_rollout_without_async(address: str) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("mine")

    def work() -> None:
        with (
            sync.Client(addresses_of(gateway=address)) as client,
            client.rollout_groups(["p", "q"], runner=length, n=1, on_sample=broken) as groups,
        ):
            for _ in groups:
                pass

    async with asyncio.timeout(30):
        with pytest.raises(ZeroDivisionError, match="mine"):
            await asyncio.to_thread(work)
