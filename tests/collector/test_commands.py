"""The collector's command line, as people run it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import read_position
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc
from tests.collector.collectors import GROUP, TIMEOUT_S, ingest_all, subscribing
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record
from tests.processes import ServiceProcess, reserved_port, running


@pytest.fixture
async def collector(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running("collector", tmp_path, port=0, data_dir=tmp_path / "data") as process:
        async with open_channel(process.address) as channel:
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest_all(stub, "a", "b")
            open_group = record("c", "g", 0, 2)
            await stub.Ingest(pb.IngestRequest(sessions=[open_group]), timeout=TIMEOUT_S)
            late = record("late", "a", 0, 1)
            await stub.Ingest(pb.IngestRequest(sessions=[late]), timeout=TIMEOUT_S)
            async with subscribing(stub, "trainer", GROUP, credits_=2) as stream:
                assert await stream.delivered(2) == ["a", "b"]
                await stream.acknowledge("a")
                await stream.acknowledged()
        yield process


def tool(collector: ServiceProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "rollmesh.cli", "collector", *words),
            *("--collector", collector.address),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
async def test_a_read_continues_at_another_collector_when_its_own_dies(tmp_path: Path) -> None:
    """The list does not fit the buffers between them: it is read while the collector dies."""
    sessions = [record(f"{at:04}") for at in range(1500)]
    for session in sessions:
        session.metadata["note"] = "x" * 4096
    async with postgres_database() as database, AsyncExitStack() as stack:
        port = stack.enter_context(reserved_port())
        heir = f"127.0.0.1:{port.getsockname()[1]}"  # nobody is there yet
        first = await stack.enter_async_context(
            running("collector", tmp_path / "first", store=database.url)
        )
        async with open_channel(first.address) as channel:
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            for at in range(0, len(sessions), 100):
                some = pb.IngestRequest(sessions=sessions[at : at + 100])
                await stub.Ingest(some, timeout=TIMEOUT_S)
        reading = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.cli", "collector", "inspect", "--sessions"),
            *("--collector", f"{first.address},{heir}"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert reading.stdout is not None
        line = await reading.stdout.readline()
        flags = {"store": database.url, "port": heir.rpartition(":")[2]}
        await stack.enter_async_context(running("collector", tmp_path / "heir", **flags))
        await first.kill()
        rest = await reading.stdout.read()
        assert await reading.wait() == 0
    found = [json.loads(one)["session_id"] for one in [line, *rest.splitlines()]]
    assert found == [one.session_id for one in sessions]


async def test_inspect_shows_counts_groups_filtered_and_sessions(collector: ServiceProcess) -> None:
    flags = ("--consumers", "--groups", "--filtered", "trainer")
    stats, consumer, group, entry = lines(tool(collector, "inspect", *flags))
    assert (stats["sessions"], stats["consumers"][0]["acknowledged"]) == (4, 1)
    assert (consumer["name"], consumer["unit"]) == ("trainer", "GROUP")
    assert (group["group_id"], group["samples"], group["group_size"]) == ("g", 1, 2)
    assert (entry["session_id"], entry["reason"]) == ("late", "SURPLUS")
    (session,) = lines(tool(collector, "inspect", "--session", "c"))
    assert session["group_id"] == "g"
    assert "tokens" not in session["trajectories"][0]


async def test_a_tool_whose_reader_leaves_ends_without_a_traceback(
    collector: ServiceProcess,
) -> None:
    command = "set -o pipefail; $0 -m rollmesh.cli collector inspect $@ | head -n 0"
    flags = ("--sessions", "--collector", collector.address)
    shell = ["bash", "-c", command, sys.executable, *flags]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ended = await asyncio.create_subprocess_exec(*shell, **pipes)
    stdout, stderr = await ended.communicate()
    assert (ended.returncode, stdout, stderr) == (1, b"", b"")


@pytest.mark.long
async def test_inspect_tells_sessions_in_the_words_of_all_windows(
    collector: ServiceProcess,
) -> None:
    listed = tool(collector, "inspect", "--sessions", "--words", "--group-id=g").stdout.splitlines()
    whole = tool(collector, "inspect", "--session=c", "--words").stdout.splitlines()
    assert listed == whole[:1]
    assert "  c  COMPLETED  reward" in listed[0]
    assert whole[1].startswith("trajectory of node ")


async def test_inspect_lists_sessions(collector: ServiceProcess) -> None:
    listed = lines(tool(collector, "inspect", "--sessions"))
    assert [one["session_id"] for one in listed] == ["a", "b", "c", "late"]
    (one,) = lines(tool(collector, "inspect", "--sessions", "--group-id", "g"))
    assert (one["session_id"], one["outcome"], one["purpose"]) == ("c", "COMPLETED", "TRAIN")
    assert lines(tool(collector, "inspect", "--sessions", "--outcome", "FAILED")) == []
    for flags in (("--outcome", "FAILED"), ("--session", "c", "--purpose", "TRAIN")):
        ignored = tool(collector, "inspect", *flags)
        assert (ignored.returncode, ignored.stdout) == (2, "")
        assert f"{flags[-2]} selects sessions; give --sessions" in ignored.stderr
    (whole,) = lines(tool(collector, "inspect", "--session", "c"))
    assert whole.keys() - one.keys() == {"turns"}


async def test_replay_brings_acknowledged_units_back(collector: ServiceProcess) -> None:
    done = tool(collector, "replay", "--consumer", "trainer", "--from", "earliest")
    assert done.stdout == "trainer: 1 units redelivered, 0 skipped\n", done.stderr
    async with open_channel(collector.address) as channel:
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        async with subscribing(stub, "trainer", GROUP, credits_=2) as stream:
            assert await stream.delivered(2) == ["a", "b"]
    unknown = tool(collector, "replay", "--consumer", "x", "--from", "latest")
    assert (unknown.returncode, "'x' is not known" in unknown.stderr) == (1, True)
    assert tool(collector, "delete", "--consumer", "trainer").stdout == "trainer: deleted\n"
    gone = tool(collector, "delete", "--consumer", "trainer")
    assert (gone.returncode, "'trainer' is not known" in gone.stderr) == (1, True)


def inspect(*flags: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "rollmesh.cli", "collector", "inspect", *flags)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_a_router_knows_the_collectors(tmp_path: Path) -> None:
    async with running("router", tmp_path, data_dir=tmp_path / "router") as router:
        flags = ("--router", f"127.0.0.1:9,{router.address}")
        none = inspect(*flags)
        assert (none.returncode, "--collector" in none.stderr) == (1, True)
        data_dir = tmp_path / "data"
        async with (
            running("collector", tmp_path, router=router.address, data_dir=data_dir) as process,
            open_channel(process.address) as channel,
        ):
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            await stub.Ingest(pb.IngestRequest(sessions=[record("a")]), timeout=TIMEOUT_S)
            (stats,) = lines(inspect(*flags))
            assert stats["sessions"] == 1


@pytest.mark.long
async def test_another_collector_is_asked_if_one_is_away(collector: ServiceProcess) -> None:
    for addresses in (f"127.0.0.1:9,{collector.address}", f"{collector.address},127.0.0.1:9"):
        (stats,) = lines(inspect("--collector", addresses))
        assert stats["sessions"] == 4


@pytest.mark.parametrize(
    ("text", "position"),
    [
        pytest.param("earliest", pb.Position(end=pb.LOG_END_EARLIEST), id="earliest"),
        pytest.param("latest", pb.Position(end=pb.LOG_END_LATEST), id="latest"),
        pytest.param("17", pb.Position(unix_ms=17), id="time"),
        pytest.param("id:17", pb.Position(delivery_id="17"), id="unit"),
    ],
)
def test_positions_are_read(text: str, position: pb.Position) -> None:
    assert read_position(text) == position


@pytest.mark.parametrize("text", ["yesterday", "-5", "1.5", "", str(2**63)])
def test_a_position_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="from"):
        read_position(text)
