"""The database: acknowledged writes are kept, and an error fails only its own call."""

import asyncio
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime import Database
from rollmesh.runtime.errors import (
    RollmeshError,
    SessionUnknownError,
    ShuttingDownError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreLostError,
)
from tests.paths import ROOT
from tests.runtime.writer import SCHEMA, VERSION, inserting


def rows_of(connection: sqlite3.Connection) -> list[int]:
    return [row for (row,) in connection.execute("SELECT id FROM rows ORDER BY id")]


def raising(error: Exception, row: int) -> Callable[[sqlite3.Connection], None]:
    """Returns a work that writes a row and then fails."""

    def work(connection: sqlite3.Connection) -> None:
        inserting(row)(connection)
        raise error

    return work


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database(tmp_path / "deep" / "store.sqlite", SCHEMA, VERSION) as opened:
        yield opened


@asynccontextmanager
async def busy(database: Database) -> AsyncIterator[None]:
    """Keeps the thread at work while the block runs: what the block asks for waits together."""
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work(connection: sqlite3.Connection) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(30)

    async with asyncio.TaskGroup() as group:
        group.create_task(database.run(work))
        try:
            await begun.wait()
            yield
        finally:
            go_on.set()


async def waiting_together(
    database: Database, *works: Callable[[sqlite3.Connection], Any]
) -> list[Any]:
    """Returns the results and errors of works that wait at the same time."""
    async with busy(database):
        running = [database.run(work) for work in works]
        results = asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)  # one turn of the loop: the works are queued
    return await results


@pytest.mark.parametrize("acknowledged", [1, 2, 21, 400])
async def test_acknowledged_rows_survive_a_kill(tmp_path: Path, acknowledged: int) -> None:
    path = tmp_path / "store.sqlite"
    command = [sys.executable, "-m", "tests.runtime.writer", str(path), str(acknowledged)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    output, _ = await child.communicate()
    assert child.returncode == -signal.SIGKILL
    printed = {int(line) for line in output.splitlines()}
    assert len(printed) == acknowledged
    async with Database(path, SCHEMA, VERSION) as database:
        assert printed <= set(await database.run(rows_of))


async def test_works_that_wait_together_share_one_commit(database: Database) -> None:
    statements: list[str] = []
    await database.run(lambda connection: connection.set_trace_callback(statements.append))
    statements.clear()
    results = await waiting_together(database, *(inserting(row) for row in range(50)))
    assert results == list(range(50))
    assert statements.count("COMMIT") <= 3  # the tracer's, the busy one's, and one for all


@pytest.mark.parametrize("error", [SessionUnknownError("no such session"), KeyError("any")])
async def test_a_failed_job_fails_alone(database: Database, error: Exception) -> None:
    results = await waiting_together(database, inserting(1), raising(error, 2), inserting(3))
    assert results == [1, error, 3]
    assert await database.run(rows_of) == [1, 3]


async def test_a_broken_constraint_is_a_store_error_of_its_job(database: Database) -> None:
    first, second, third = await waiting_together(
        database, inserting(1), inserting(1), inserting(2)
    )
    assert (first, type(second), third) == (1, StoreError, 2)
    assert await database.run(rows_of) == [1, 2]


async def test_a_full_disk_is_an_error_with_a_delay_and_keeps_earlier_rows(
    database: Database,
) -> None:
    def filling(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE more (data BLOB)")
        connection.execute("INSERT INTO more VALUES (zeroblob(1000000))")

    await database.run(inserting(1))
    await database.run(lambda connection: connection.execute("PRAGMA max_page_count = 20").close())
    results = await waiting_together(database, inserting(2), filling, inserting(3))
    acknowledged = [result for result in results if isinstance(result, int)]
    refused = [result for result in results if not isinstance(result, int)]
    assert [type(error) for error in refused] == [StoreFullError] * len(refused)
    assert results[1] in refused
    assert all(error.retry_delay_ms for error in refused)
    assert await database.run(rows_of) == [1, *acknowledged]


async def test_too_much_waiting_is_refused_with_a_delay(database: Database) -> None:
    works = [inserting(row) for row in range(5000)]
    results = await waiting_together(database, *works)
    refused = [result for result in results if isinstance(result, StoreFullError)]
    kept = [result for result in results if isinstance(result, int)]
    assert refused
    assert all(error.retry_delay_ms for error in refused)
    assert len(kept) + len(refused) == 5000
    assert await database.run(rows_of) == kept


async def test_a_cancelled_caller_disturbs_no_other(database: Database) -> None:
    async with asyncio.TaskGroup() as group:
        async with busy(database):
            patient = group.create_task(database.run(inserting(1)))
            impatient = group.create_task(database.run(inserting(2)))
            await asyncio.sleep(0)
            impatient.cancel()
    assert patient.result() == 1
    assert impatient.cancelled()
    assert 1 in await database.run(rows_of)


async def test_closing_finishes_queued_jobs(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    async with asyncio.TaskGroup() as group:
        async with Database(path, SCHEMA, VERSION) as database:
            tasks = [group.create_task(database.run(inserting(row))) for row in range(1000)]
            await asyncio.sleep(0)  # one turn of the loop: the works are queued
    assert [task.result() for task in tasks] == list(range(1000))
    async with Database(path, SCHEMA, VERSION) as database:
        assert await database.run(rows_of) == list(range(1000))


async def test_a_closed_database_refuses_work(tmp_path: Path) -> None:
    async with Database(tmp_path / "store.sqlite", SCHEMA, VERSION) as database:
        pass
    async with asyncio.timeout(60):
        with pytest.raises(RollmeshError):
            await database.run(rows_of)


async def test_a_file_that_is_open_elsewhere_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    async with Database(path, SCHEMA, VERSION) as database:
        with pytest.raises(StoreInUseError, match=f"{path}: is open in another.*another data_dir"):
            async with Database(path, SCHEMA, VERSION):
                pass
        await database.run(inserting(1))
    async with Database(path, SCHEMA, VERSION) as database:
        assert await database.run(rows_of) == [1]


async def test_a_file_that_could_not_be_opened_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"this is no database" * 100)
    for _ in range(2):
        with pytest.raises(StoreError, match=f"{path}: .*not a database"):
            async with Database(path, SCHEMA, VERSION):
                pass


async def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "store.sqlite"
    with pytest.raises(StoreError, match=str(path)):
        async with Database(path, SCHEMA, VERSION):
            pass


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and mode of the files of a store. The lock file means nothing by itself."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mode)
        for path in folder.iterdir()
        if path.suffix != ".lock"
    }


@pytest.mark.parametrize(
    ("other", "writer"), [(VERSION + 1, "an earlier"), (VERSION - 1, "a later")]
)
@pytest.mark.parametrize("killed", [False, True])
async def test_a_file_of_another_version_is_refused_and_not_a_byte_of_it_changes(
    tmp_path: Path, other: int, writer: str, *, killed: bool
) -> None:
    folder = tmp_path / "it's 100% #1?"
    path = folder / "store.sqlite"
    async with Database(path, SCHEMA, VERSION) as database:
        await database.run(inserting(1))
        found = state_of(folder)
    if killed:  # with rows that are in the write-ahead log alone
        assert found["store.sqlite-wal"][0]
        for name, (content, _) in found.items():
            (folder / name).write_bytes(content)
    path.chmod(0o640)
    before = state_of(folder)
    with pytest.raises(StoreError) as refused:
        async with Database(path, SCHEMA, other):
            pass
    assert refused.value.message == (
        f"{path} has version {VERSION}, this release needs {other}; nothing was changed. "
        f"It was written by {writer} release: start the service of that release, which serves and "
        "delivers what it holds; or name another place for it"
    )
    assert state_of(folder) == before
    async with Database(path, SCHEMA, VERSION) as database:
        assert await database.run(rows_of) == [1]


async def test_files_of_versions_before_are_upgraded_step_by_step_and_no_earlier_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.sqlite"
    first, second = (f"ALTER TABLE rows ADD COLUMN {name} INTEGER" for name in ("one", "two"))
    async with Database(path, SCHEMA, VERSION) as database:
        await database.run(inserting(1))
    with pytest.raises(StoreError, match="nothing was changed"):
        async with Database(path, SCHEMA, VERSION + 2, upgrades=[second]):
            pass
    with pytest.raises(StoreError):  # a change fails: the version stays
        async with Database(path, SCHEMA, VERSION + 2, upgrades=[first, "x"]):
            pass
    for _ in range(2):
        async with Database(path, SCHEMA, VERSION + 2, upgrades=[first, second]) as database:
            found = await database.run(lambda db: db.execute("SELECT * FROM rows").fetchall())
            assert [row[-2:] for row in found] == [(None, None)]
    async with Database(path, SCHEMA, VERSION + 3, upgrades=["ALTER TABLE rows DROP COLUMN one"]):
        pass


async def test_a_file_of_another_program_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE theirs (n)")
    before = state_of(tmp_path)
    with pytest.raises(StoreError, match="version 0"):
        async with Database(path, SCHEMA, VERSION):
            pass
    assert state_of(tmp_path) == before


async def test_every_commit_is_synced_to_disk(database: Database) -> None:
    def settings(connection: sqlite3.Connection) -> tuple[str, int]:
        (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        return journal, synchronous

    assert await database.run(settings) == ("wal", 2)


async def test_removed_rows_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    schema = "CREATE TABLE IF NOT EXISTS blobs (data BLOB)"
    async with Database(path, schema, VERSION, page_bytes=16_384) as database:
        await database.run(lambda db: db.execute("INSERT INTO blobs VALUES (zeroblob(4000000))"))
    async with Database(path, schema, VERSION) as database:
        (page,) = await database.run(lambda db: db.execute("PRAGMA page_size").fetchone())
        assert page == 16_384  # a file keeps its own
        await database.run(lambda db: db.execute("DELETE FROM blobs").close())
        assert path.with_name("store.sqlite-wal").stat().st_size < 400_000


async def test_callers_of_a_database_whose_thread_dies_get_an_error(tmp_path: Path) -> None:
    def deadly(_db: sqlite3.Connection) -> None:
        raise SystemExit

    async with asyncio.timeout(60):
        database = Database(tmp_path / "store.sqlite", SCHEMA, VERSION)
        async with database:
            works = (database.run(work) for work in (deadly, rows_of))
            for result in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(result, StoreError)
            with pytest.raises(StoreError, match="restart"):
                await database.run(rows_of)


@pytest.mark.parametrize("name", ["store.sqlite", "store.sqlite-wal", "store.sqlite.lock"])
async def test_a_file_that_is_removed_while_it_is_open_is_noticed_and_nothing_is_acknowledged(
    tmp_path: Path, name: str
) -> None:
    async with Database(tmp_path / "store.sqlite", SCHEMA, VERSION) as database:
        await database.run(inserting(1))
        (tmp_path / name).unlink()
        with pytest.raises(StoreLostError, match=f"{name}: was removed"):
            await database.run(inserting(2))
        async with asyncio.timeout(120):
            assert name in await database.lost()


async def test_a_folder_that_is_removed_under_an_idle_database_is_noticed(tmp_path: Path) -> None:
    async with Database(tmp_path / "deep" / "store.sqlite", SCHEMA, VERSION) as database:
        await database.run(inserting(1))
        shutil.rmtree(tmp_path / "deep")
        async with asyncio.timeout(120):
            assert "was removed or replaced" in await database.lost()


async def test_an_opening_that_is_cancelled_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for turns in range(20):  # the file is opened meanwhile, sooner or later
        database = Database(path, SCHEMA, VERSION)
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(database.__aenter__())
            for _ in range(turns * turns + 1):
                await asyncio.sleep(0)
            opening.cancel()
        if not opening.cancelled():
            await database.__aexit__(None, None, None)
        assert f"sqlite-{path.stem}" not in [one.name for one in threading.enumerate()]
    async with Database(path, SCHEMA, VERSION) as database:
        await database.run(inserting(1))


async def test_a_store_takes_no_job_from_the_moment_that_it_closes(tmp_path: Path) -> None:
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))

    async def be_late() -> None:
        try:
            with pytest.raises(ShuttingDownError):
                await store.run(inserting(1))
        finally:
            go_on.set()

    async with asyncio.TaskGroup() as group:
        async with Database(tmp_path / "store.sqlite", SCHEMA, VERSION) as store:
            loop.run_in_executor(None, go_on.wait, 30)  # no thread can end the store yet
            group.create_task(be_late())  # it runs once the store is closing
