"""Arrays of large calls, which the SQLite store keeps in files."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmesh.collector import Arrival, Retention, Store, open_sqlite as open_store
from rollmesh.runtime.errors import (
    InvalidFieldError,
    SessionDamagedError,
    StoreError,
    StoreFullError,
)
from rollmesh.v1 import session_pb2
from tests.collector.records import record, trajectory
from tests.collector.stores import KEEP, Reader, sessions_of

TOKENS = 80_000
"""Of a session. Two of them are large, one is not."""
NOW = Retention(settled_ms=0, max_bytes=2**30)


def long_record(
    session_id: str, group: str = "", index: int = 0, size: int = 1
) -> session_pb2.SessionRecord:
    made = record(session_id, group, index, size)
    made.trajectories[0].CopyFrom(trajectory(session_id, TOKENS))
    return made


async def ingest(store: Store, sessions: Sequence[session_pb2.SessionRecord]) -> list[bool]:
    return await store.ingest([Arrival(session) for session in sessions], 0)


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "arrays").iterdir()}


async def test_the_arrays_of_a_large_call_are_in_one_file_and_come_back_after_a_restart(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path, KEEP) as store:
        await ingest(store, [long_record("a"), record("b"), long_record("c")])
        assert files(tmp_path) == {"1"}
        assert (await store.counts()).stored_bytes > 2 * 9 * TOKENS
    async with open_store(tmp_path, KEEP) as store:
        assert await store.session("a", arrays=True) == long_record("a")
        assert await store.session("b", arrays=True) == record("b")
        reader = await Reader.open(store)
        loaded = [await reader.load(unit) for unit in await reader.fetch()]
        sessions = [session for one in loaded for session in sessions_of(one)]
        assert sessions == [long_record("a"), record("b"), long_record("c")]
        await ingest(store, [long_record("d"), long_record("e")])
        assert files(tmp_path) == {"1", "2"}
    assert (tmp_path / "collector.sqlite").stat().st_size < 9 * TOKENS


async def test_a_call_that_is_not_large_gets_no_file(tmp_path: Path) -> None:
    async with open_store(tmp_path, KEEP) as store:
        await ingest(store, [long_record("a"), record("b")])
        assert files(tmp_path) == set()
        assert await store.session("a", arrays=True) == long_record("a")


async def test_a_file_goes_after_the_last_of_its_sessions(tmp_path: Path) -> None:
    async with open_store(tmp_path, NOW) as store:
        empty = (await store.counts()).stored_bytes
        await ingest(store, [long_record("a"), long_record("b")])
        reader = await Reader.open(store)
        await reader.take()
        await reader.settle("a")
        assert await store.retain(1) == 1
        assert files(tmp_path) == {"1"}
        assert await store.session("b", arrays=True) == long_record("b")
        await reader.settle("b")
        assert await store.retain(1) == 1
        assert files(tmp_path) == set()
        assert (await store.counts()).stored_bytes < empty + 9 * TOKENS


async def test_repeats_leave_no_file(tmp_path: Path) -> None:
    async with open_store(tmp_path, KEEP) as store:
        await ingest(store, [long_record("a"), long_record("b")])
        before = (await store.counts()).stored_bytes
        assert await ingest(store, [long_record("a"), long_record("b")]) == [True, True]
        assert files(tmp_path) == {"1"}
        assert (await store.counts()).stored_bytes == before
        assert await ingest(store, [long_record("a"), long_record("c")]) == [True, False]
        assert await store.session("c", arrays=True) == long_record("c")


async def test_a_refused_session_leaves_no_file(tmp_path: Path) -> None:
    async with open_store(tmp_path, KEEP) as store:
        with pytest.raises(InvalidFieldError, match="group_size"):
            await ingest(store, [long_record("a", "g", 0, 2), long_record("b", "g", 1, 3)])
        assert files(tmp_path) == set()
    async with open_store(tmp_path, Retention(settled_ms=0, max_bytes=9 * TOKENS)) as store:
        with pytest.raises(StoreFullError):
            await ingest(store, [long_record("a"), long_record("b")])
        assert files(tmp_path) == set()
        assert (await store.counts()).stored_bytes < 9 * TOKENS


async def test_unnamed_files_of_a_killed_collector_are_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path, KEEP) as store:
        await ingest(store, [long_record("a"), long_record("b")])
    (tmp_path / "arrays" / "2").write_bytes(b"written, and never committed")
    async with open_store(tmp_path, KEEP) as store:
        assert files(tmp_path) == {"1"}
        await ingest(store, [long_record("c"), long_record("d")])
        assert await store.session("c", arrays=True) == long_record("c")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param(errno.ENOSPC, StoreFullError, id="full"),
        pytest.param(errno.EIO, StoreError, id="broken"),
    ],
)
async def test_a_file_that_does_not_reach_the_disk_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    async with open_store(tmp_path, KEEP) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(error):
                await ingest(store, [long_record("a"), long_record("b")])
        assert files(tmp_path) == set()
        assert (await store.counts()).sessions == 0
        assert await ingest(store, [long_record("a"), long_record("b")]) == [False, False]


@pytest.mark.parametrize("left", [pytest.param(100, id="cut"), pytest.param(None, id="gone")])
async def test_a_damaged_file_is_a_typed_error(tmp_path: Path, left: int | None) -> None:
    async with open_store(tmp_path, KEEP) as store:
        await ingest(store, [long_record("a"), long_record("b")])
        if left is None:
            (tmp_path / "arrays" / "1").unlink()
        else:
            os.truncate(tmp_path / "arrays" / "1", left)
        with pytest.raises(SessionDamagedError):
            await store.session("b", arrays=True)
        assert (await store.session("b", arrays=False)).session_id == "b"
