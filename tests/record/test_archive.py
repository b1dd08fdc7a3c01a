"""The archive: a consumer that writes each session once, whatever kills it."""

import asyncio
import json
import random
import resource
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2
from tests.collector.collectors import TIMEOUT_S, collector_at, ingest, ingest_all
from tests.collector.records import record
from tests.processes import ServiceProcess, reserved_port, running, started
from tests.waiting import until

pytest.importorskip("pyarrow")
from pyarrow import parquet

from rollmesh.record import read_records

BOUNDARIES = ("before-aside", "before-write", "after-write", "between-names", "before-ack")


@pytest.fixture
async def collector(tmp_path: Path) -> AsyncIterator[str]:
    async with collector_at(tmp_path / "collector") as address:
        yield address


@pytest.fixture
async def stub(collector: str) -> AsyncIterator[Any]:
    async with open_channel(collector) as channel:
        yield collector_pb2_grpc.CollectorServiceStub(channel)


def archive(
    folder: Path, collector: str, **flags: object
) -> AbstractAsyncContextManager[ServiceProcess]:
    """Runs an archive that writes to the folder's `record`."""
    given = {"to": folder / "record", "collector": collector, "seconds": 1, **flags}
    return started("record.archive", folder, **given)


async def standing(stub: Any, consumer: str = "archive") -> pb.ConsumerStats:
    stats = await stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)
    return next((one for one in stats.consumers if one.name == consumer), pb.ConsumerStats())


async def settled(stub: Any, count: int) -> None:
    """Waits until the archive has acknowledged so many sessions."""

    async def look() -> bool:
        return (await standing(stub)).acknowledged >= count

    await until(look)


def recorded(folder: Path) -> Counter[str]:
    return Counter(one.session_id for one in read_records(folder / "record"))


def rewarded(folder: Path) -> list[tuple[str, float]]:
    return [(one.session_id, one.reward) for one in read_records(folder / "record")]


def disagreeing(session_id: str) -> session_pb2.SessionRecord:
    """A session whose trajectories differ about a node."""
    session = record(session_id)
    other = session.trajectories.add()
    other.CopyFrom(session.trajectories[0])
    other.trajectory_id = f"{session_id}-2"
    other.tokens.token_ids_u32le = bytes(len(other.tokens.token_ids_u32le))
    return session


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_a_killed_archive_writes_each_session_once(
    tmp_path: Path, collector: str, stub: Any, boundary: str
) -> None:
    await ingest_all(stub, "a", "b", "c")
    async with archive(tmp_path, collector, fault=f"archive-{boundary}", sessions=2) as process:
        assert await process.wait_line("FAULT")
        assert (await standing(stub)).acknowledged == 0
        await process.kill()
    await ingest_all(stub, "d")
    async with archive(tmp_path, collector) as process:
        await settled(stub, 4)
        assert await process.terminate() == 0
    assert recorded(tmp_path) == Counter("abcd")
    names = {path.name for path in (tmp_path / "record" / "sessions").rglob("*.parquet")}
    assert {path.name for path in (tmp_path / "record" / "nodes").rglob("*.parquet")} == names


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_an_unwritable_session_is_set_aside_once(
    tmp_path: Path, collector: str, stub: Any, boundary: str
) -> None:
    poison = disagreeing("../poison")
    await ingest(stub, poison)
    await ingest_all(stub, "a", "b")
    async with archive(tmp_path, collector, fault=f"archive-{boundary}", sessions=3) as process:
        assert await process.wait_line("FAULT")
        assert (await standing(stub)).acknowledged == 0
        await process.kill()
    async with archive(tmp_path, collector) as process:
        await settled(stub, 3)
        assert await process.terminate() == 0
    assert recorded(tmp_path) == Counter("ab")
    folder = tmp_path / "record" / "_set_aside"
    (line,) = map(json.loads, (folder / "reasons.jsonl").read_text().splitlines())
    assert line["session_id"] == "../poison"
    assert "differs" in line["reason"]
    kept = session_pb2.SessionRecord.FromString((folder / line["file"]).read_bytes())
    assert kept.trajectories == poison.trajectories
    assert {one.name for one in folder.iterdir()} == {"reasons.jsonl", "..%2Fpoison.binpb"}


async def test_many_unwritable_sessions_stop_the_archive(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    for at in range(21):
        await ingest(stub, disagreeing(f"{at}") if at < 3 else record(f"{at}"))
    async with archive(tmp_path, collector, sessions=21, seconds=60) as process:
        assert await process.exit_code() == 1
    assert "3 of 21 sessions cannot be written" in (tmp_path / "record.archive.log").read_text()
    assert (await standing(stub)).acknowledged == 0
    assert not (tmp_path / "record" / "_set_aside").exists()
    assert recorded(tmp_path) == Counter()


async def test_an_export_sets_a_session_aside_once(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    await ingest(stub, disagreeing("poison"))
    await ingest_all(stub, "a")
    lines = tmp_path / "record" / "_set_aside" / "reasons.jsonl"
    command = [sys.executable, "-m", "rollmesh.cli", "export", "--to", str(tmp_path / "record")]
    command += ["--collector", collector]

    async def export() -> tuple[int, str]:
        run = partial(subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_S)
        done = await asyncio.to_thread(run, check=False)
        assert "1 sessions cannot be written" in done.stderr
        return done.returncode, lines.read_text()

    code, first = await export()
    assert (code, first.count("poison.binpb")) == (1, 1)
    assert await export() == (1, first)
    lines.unlink()  # as after a kill between the session and its line
    assert await export() == (1, first)
    assert recorded(tmp_path) == Counter("a")


async def test_a_second_archive_of_a_folder_is_refused(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    async with archive(tmp_path, collector) as first:
        await first.wait_line("READY")
        async with archive(tmp_path, collector) as second:
            assert await second.exit_code() == 2
        assert "another process writes" in (tmp_path / "record.archive.log").read_text()
        await ingest_all(stub, "a")
        await settled(stub, 1)
    assert recorded(tmp_path) == Counter("a")


async def test_every_kind_of_session_is_archived(tmp_path: Path, collector: str, stub: Any) -> None:
    evaluated, retried, old = record("evaluated"), record("retried"), record("old")
    evaluated.purpose = session_pb2.SESSION_PURPOSE_EVAL
    retried.superseded = True
    old.trajectories[0].version_spans[0].policy_version = 7 * 10**12  # of another run
    text = session_pb2.SessionRecord(
        session_id="text",
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
        capture=session_pb2.CAPTURE_TEXT,
    )
    kinds = [evaluated, retried, old, text, record("alone", "")]
    for one in kinds:
        await ingest(stub, one)
    async with archive(tmp_path, collector) as process:
        await settled(stub, len(kinds))
        assert await process.terminate() == 0
    assert recorded(tmp_path) == Counter(one.session_id for one in kinds)


async def set_late(stub: Any, session_id: str, value: float, name: str = "advantages") -> None:
    """Sets a reward of a session, and what a trainer says of its six tokens."""
    rewards = session_pb2.SessionRewards(reward=value)
    late = pb.SetRewardsRequest(session_id=session_id, rewards=rewards, request_id=f"{value}")
    await stub.SetRewards(late, timeout=TIMEOUT_S)
    values = np.full(6, value, "<f4").tobytes()
    one = pb.Annotation(name=name, trajectory_id=f"{session_id}-1", values_f32le=values)
    asked = pb.AnnotateRequest(session_id=session_id, annotations=[one])
    await stub.Annotate(asked, timeout=TIMEOUT_S)


def late_rows(folder: Path) -> Counter[tuple[str, str, float]]:
    found: Counter[tuple[str, str, float]] = Counter()
    for path in (folder / "record" / "rewards").rglob("*.parquet"):
        rows = parquet.read_table(path, partitioning=None).to_pylist()
        found.update(("reward", one["session_id"], one["reward"]) for one in rows)
    for path in (folder / "record" / "annotations").rglob("*.parquet"):
        rows = parquet.read_table(path, partitioning=None).to_pylist()
        found.update((one["name"], one["session_id"], one["values"][5]) for one in rows)
    return found


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_late_rewards_and_annotations_are_recorded_once_without_a_replay(
    tmp_path: Path, collector: str, stub: Any, boundary: str
) -> None:
    await ingest_all(stub, "a", "b")
    await set_late(stub, "b", 3.0)  # before the archive has the session
    async with archive(tmp_path, collector) as process:
        await settled(stub, 2)
        first = Counter({("advantages", "b", 3.0): 1})
        await until(lambda: late_rows(tmp_path) == first)
        await process.kill()
    await set_late(stub, "a", 5.0)
    async with archive(tmp_path, collector, fault=f"archive-{boundary}") as process:
        assert await process.wait_line("FAULT")
        await process.kill()
    found = first + Counter({("reward", "a", 5.0): 1, ("advantages", "a", 5.0): 1})
    async with archive(tmp_path, collector) as process:
        await until(lambda: late_rows(tmp_path) == found)
        await set_late(stub, "b", 7.0)
        found += Counter({("reward", "b", 7.0): 1, ("advantages", "b", 7.0): 1})
        await until(lambda: late_rows(tmp_path) == found)
        assert await process.terminate() == 0
    assert rewarded(tmp_path) == [("a", 5.0), ("b", 7.0)]


async def test_late_values_of_many_sessions_come_in_several_batches(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    names = [f"{at:02}" for at in range(40)]
    await ingest_all(stub, *names)
    async with archive(tmp_path, collector) as process:
        await settled(stub, 40)
        await process.terminate()
    for name in names:
        await set_late(stub, name, 5.0)
    async with archive(tmp_path, collector, sessions=20) as process:
        await until(lambda: len(late_rows(tmp_path)) == 80)
        assert await process.terminate() == 0
    assert set(late_rows(tmp_path).values()) == {1}
    assert len(list((tmp_path / "record" / "rewards").rglob("*.parquet"))) == 2


async def test_an_archive_stops_while_its_collector_is_away(tmp_path: Path) -> None:
    with reserved_port() as port:
        async with archive(tmp_path, f"127.0.0.1:{port.getsockname()[1]}") as process:
            await process.wait_line("READY")
            log = tmp_path / "record.archive.log"
            await until(lambda: log.exists() and "wait" in log.read_text())
            assert await process.terminate() == 0


async def test_rewards_that_come_late_are_recorded_by_a_replay(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    await ingest_all(stub, "a", "b")
    async with archive(tmp_path, collector, metrics_port=0) as process:
        process.metrics_port = json.loads(await process.wait_line("READY"))["metrics_port"]
        await settled(stub, 2)
        rewards = session_pb2.SessionRewards(reward=5.0)
        late = pb.SetRewardsRequest(session_id="b", rewards=rewards, request_id="1")
        await stub.SetRewards(late, timeout=TIMEOUT_S)
        seek = pb.SeekRequest(consumer="archive", position=pb.Position(end=pb.LOG_END_EARLIEST))
        sought = await stub.Seek(seek, timeout=TIMEOUT_S)
        assert sought.again == 2
        found = [("a", 0.0), ("b", 5.0)]
        await until(lambda: rewarded(tmp_path) == found)

        async def counted() -> bool:
            kinds = await process.samples("rollmesh_archive_sessions_total")
            return kinds == {
                'rollmesh_archive_sessions_total{kind="new"}': 2,
                'rollmesh_archive_sessions_total{kind="again"}': 2,
            }

        await until(counted)
        assert await process.terminate() == 0
    assert rewarded(tmp_path) == found


async def test_an_archive_survives_a_full_disk_by_ending(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    await ingest_all(stub, "a")
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "nodes").write_text("no folder")
    async with archive(tmp_path, collector) as process:
        assert await process.exit_code() == 1
    assert (await standing(stub)).acknowledged == 0
    (tmp_path / "record" / "nodes").unlink()
    async with archive(tmp_path, collector) as process:
        await settled(stub, 1)
    assert recorded(tmp_path) == Counter("a")


@pytest.mark.parametrize("what", ["a table", "the index"])
async def test_a_batch_that_cannot_be_written_whole_ends_the_archive_and_loses_nothing(
    tmp_path: Path, collector: str, stub: Any, what: str
) -> None:
    async with archive(tmp_path, collector) as process:
        await process.wait_line("READY")
        with closing(sqlite3.connect(tmp_path / "record" / "_index.sqlite")) as index:
            if what == "the index":
                index.execute("BEGIN IMMEDIATE")  # nobody else can write it
            else:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
            await ingest_all(stub, "a")
            assert await process.exit_code() == 1
    log = (tmp_path / "record.archive.log").read_text()
    assert f"rollmesh archive: {tmp_path / 'record'}: " in log
    assert "Traceback" not in log
    assert (await standing(stub)).acknowledged == 0
    assert recorded(tmp_path) == (Counter("a") if what == "the index" else Counter())
    async with archive(tmp_path, collector) as process:
        await settled(stub, 1)
        assert await process.terminate() == 0
    assert recorded(tmp_path) == Counter("a")
    assert not list((tmp_path / "record" / "_writing").glob("*"))


async def test_sessions_that_keep_coming_do_not_hold_back_the_first(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    count = 0
    async with archive(tmp_path, collector) as process:

        async def look() -> bool:
            nonlocal count
            await ingest_all(stub, f"{count:04}")
            count += 1
            return (await standing(stub)).acknowledged > 0

        await until(look)
        assert await process.terminate() == 0
    assert recorded(tmp_path)["0000"] == 1


async def test_many_sessions_make_files_of_bounded_size(
    tmp_path: Path, collector: str, stub: Any
) -> None:
    await asyncio.gather(*(ingest(stub, record(f"{at:03}")) for at in range(50)))
    async with archive(tmp_path, collector, sessions=20) as process:
        await settled(stub, 50)
        await process.terminate()
    assert recorded(tmp_path) == Counter(f"{at:03}" for at in range(50))
    files = list((tmp_path / "record" / "sessions").rglob("*.parquet"))
    assert len(files) == 3


async def test_an_archive_follows_its_collector_to_another_port(tmp_path: Path) -> None:
    async with running("router", tmp_path / "router") as router, AsyncExitStack() as stack:
        flags = {"router": router.address, "data_dir": tmp_path / "data"}
        log = tmp_path / "record.archive.log"

        async def collector() -> tuple[ServiceProcess, Any]:
            process = await stack.enter_async_context(running("collector", tmp_path, **flags))
            channel = await stack.enter_async_context(open_channel(process.address))
            return process, collector_pb2_grpc.CollectorServiceStub(channel)

        first, stub = await collector()
        await ingest_all(stub, "a", "b")
        found = {"router": router.address, "to": tmp_path / "record", "seconds": 1}
        async with started("record.archive", tmp_path, **found) as process:
            await settled(stub, 2)
            await first.kill()
            second, stub = await collector()
            assert second.address != first.address
            await ingest_all(stub, "c")
            await set_late(stub, "a", 5.0)
            await settled(stub, 3)
            late = Counter({("reward", "a", 5.0): 1, ("advantages", "a", 5.0): 1})
            await until(lambda: late_rows(tmp_path) == late)
            assert await process.terminate() == 0
        assert "Traceback" not in log.read_text()
    assert recorded(tmp_path) == Counter("abc")


@pytest.mark.long
async def test_kills_of_archive_and_collector_leave_each_session_once(tmp_path: Path) -> None:
    chance = random.Random(7)
    with reserved_port() as port:
        flags = {"port": port.getsockname()[1], "data_dir": tmp_path / "data"}
        address = f"127.0.0.1:{flags['port']}"
        count = kept = 0
        late: dict[str, float] = {}
        for life in range(12):
            async with AsyncExitStack() as stack:
                collector = await stack.enter_async_context(
                    running("collector", tmp_path / "collector", **flags)
                )
                channel = await stack.enter_async_context(open_channel(address))
                stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
                process = await stack.enter_async_context(archive(tmp_path, address, sessions=7))
                for _ in range(chance.randrange(10, 60)):
                    await ingest(stub, record(f"{count:04}"))
                    count += 1
                for name in {f"{chance.randrange(count):04}" for _ in range(5)}:
                    late[name] = life + 1.0
                    await set_late(stub, name, late[name])
                await settled(stub, kept := chance.randrange(kept, count))
                if life % 3 == 0:
                    await collector.kill()
                await process.kill()
        async with (
            running("collector", tmp_path / "collector", **flags),
            open_channel(address) as channel,
            archive(tmp_path, address),
        ):
            await settled(collector_pb2_grpc.CollectorServiceStub(channel), count)
            last = {("advantages", *one) for one in late.items()}
            await until(lambda: last <= late_rows(tmp_path).keys())
    assert set(late_rows(tmp_path).values()) == {1}
    assert {one: reward for one, reward in rewarded(tmp_path) if one in late} == late
    assert recorded(tmp_path) == Counter(f"{at:04}" for at in range(count))
