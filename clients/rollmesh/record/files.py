"""The record as files: Parquet by table and day, images by hash, each session once.

A batch of sessions becomes durable in this order: its images, its nodes and trajectories, then its
sessions. A session is in the record from the moment at which the file with its row has its name.
Files of a batch that did not come so far are removed by the next writer.
"""

import fcntl
import os
import shutil
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias

import pyarrow as arrow
from pyarrow import compute, parquet

from rollmesh.record import aside, images
from rollmesh.record.schema import VERSION, VERSION_KEY, schema_of
from rollmesh.record.tables import Tables, record_of, tables_of, with_versions
from rollmesh.runtime import clock, owner_only
from rollmesh.runtime.codec.records import apply_rewards
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.v1 import session_pb2

_Row: TypeAlias = dict[str, Any]
_LOCK, _INDEX, _WRITING, _IMAGES = "_lock", "_index.sqlite", "_writing", "images"
PARTS = ("nodes", "trajectories")
"""The files of these tables are renamed before the files of `COMMITS`."""
COMMITS = ("sessions", "rewards")
_NAMES = "date=*/[0-9]*-????????.parquet"
_ARRAYS = ("token_ids", "logprobs", "loss_mask")
_OF_SPANS = {"policy_versions", "policy_runs"}
"""Columns for other readers. A session is read by its spans."""
_UNWRITABLE = (RollmeshError, ValueError, TypeError, LookupError, ArithmeticError)
"""Errors of a session's conversion."""
_LAST_MS = 253_402_300_799_000  # the end of the year 9999
_PIECE_ROWS, _PIECE_TOKENS = 4096, 2**20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (session_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class Writer:
    """The only writer of a record's folder. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder, and removes the unfinished files of a killed writer.

        Raises:
            ConfigError: Another process writes the record, or the folder cannot be written.
        """
        self.folder = folder
        self.sessions = self.bytes = 0
        """Number of sessions given to the batch, known ones included, and the size of all."""
        self._rows: dict[tuple[str, str], list[_Row]] = {}  # by table and day
        self._images: dict[str, session_pb2.SessionImage] = {}
        self._ids: set[str] = set()
        self.refused: dict[str, aside.Refused] = {}
        """Sessions of the batch that the record cannot hold, by id."""
        self._name = ""
        try:
            owner_only.make_folder(folder)
            with ExitStack() as stack:
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._index = sqlite3.connect(folder / _INDEX, check_same_thread=False)
                stack.callback(self._index.close)
                self._index.executescript(_SCHEMA)
                self._clean()
                self._catch_up()
                self._held = stack.pop_all()
        except BlockingIOError as error:
            raise ConfigError(f"to: another process writes {folder}; stop it") from error
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"to: {folder}: {error}") from error

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the folder back. A batch that was not published is dropped."""
        self._held.close()

    def add(self, record: session_pb2.SessionRecord) -> None:
        """Adds a session to the batch. A known session adds only its rewards.

        A session that cannot be converted is among `refused`.
        """
        day = _day(record.closed_unix_ms)
        self.sessions += 1
        self.bytes += record.ByteSize()
        if record.session_id in self._ids or self._has(record.session_id):
            if (row := _rewards(record)) is not None:
                self._rows.setdefault(("rewards", day), []).append(row)
            return
        try:
            tables = tables_of(record)
        except _UNWRITABLE as error:
            reason = f"{type(error).__name__}: {error}"
            self.refused[record.session_id] = aside.Refused(reason, record.SerializeToString())
            return
        self._ids.add(record.session_id)
        self._images |= {image.sha256: image for image in record.images}
        self._rows.setdefault(("sessions", day), []).append(tables.session)
        self._rows.setdefault(("trajectories", day), []).extend(tables.trajectories)
        self._rows.setdefault(("nodes", day), []).extend(tables.nodes)

    def set_aside(self) -> list[str]:
        """Writes the refused sessions of the batch beside the record. Durable.

        Returns:
            The new ids.

        Raises:
            InvalidFieldError: Too many sessions. Nothing was written.
            OSError: One cannot be written.
        """
        return aside.keep(self.refused, self.folder, self.sessions)

    def write(self) -> None:
        """Writes the files of the batch beside the record, and the images into it. Durable."""
        self._name = f"{clock.unix_ms():013d}-{uuid.uuid4().hex[:8]}.parquet"
        images.write(self._images.values(), self.folder / _IMAGES)
        (self.folder / _WRITING).mkdir(mode=0o700, exist_ok=True)
        for (table, day), rows in self._rows.items():
            path = self._unnamed(table, day)
            with path.open("wb") as file:
                schema = schema_of(table)
                with parquet.ParquetWriter(file, schema, compression="zstd") as to:
                    for piece in _pieces(table, rows):
                        to.write_table(arrow.Table.from_pylist(piece, schema))
                file.flush()
                os.fsync(file.fileno())

    def publish(self, tables: Sequence[str]) -> None:
        """Gives the written files of some tables their names, in this order. Durable."""
        for table in tables:
            for day in (day for of, day in self._rows if of == table):
                path = self.folder / table / f"date={day}" / self._name
                owner_only.make_folder(path.parent)
                self._unnamed(table, day).replace(path)
                for folder in (path.parent, path.parent.parent, self.folder):
                    images.sync(folder)

    def finish(self) -> tuple[int, list[str]]:
        """Begins the next batch.

        Returns:
            The number of sessions that were new, and the files of the batch as paths in the folder.
        """
        days = [day for table, day in self._rows if table == "sessions"]
        names = [f"sessions/date={day}/{self._name}" for day in days]
        self._remember(names, self._ids)
        self.sessions = self.bytes = 0
        found = len(self._ids), [f"{table}/date={day}/{self._name}" for table, day in self._rows]
        for kept in (self._rows, self._images, self._ids, self.refused):
            kept.clear()
        return found

    def commit(self) -> list[str]:
        """Writes the batch, publishes it, and begins the next one. Returns its files.

        Raises:
            ConfigError: A file cannot be written.
            InvalidFieldError: Too many sessions cannot be converted.
        """
        try:
            self.set_aside()
            self.write()
            self.publish(PARTS)
            self.publish(COMMITS)
        except OSError as error:
            raise ConfigError(f"to: {self.folder}: {error}") from error
        return self.finish()[1]

    def _unnamed(self, table: str, day: str) -> Path:
        return self.folder / _WRITING / f"{table}-{day}-{self._name}"

    def _has(self, session_id: str) -> bool:
        found = self._index.execute("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,))
        return found.fetchone() is not None

    def _remember(self, files: Iterable[str], session_ids: Iterable[str]) -> None:
        with self._index:
            rows = [(one,) for one in session_ids]
            self._index.executemany("INSERT OR IGNORE INTO sessions VALUES (?)", rows)
            self._index.executemany("INSERT OR IGNORE INTO files VALUES (?)", [(f,) for f in files])

    def _clean(self) -> None:
        """Removes files of a batch whose sessions have no file. Others' files stay."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder / _WRITING)
        for table in PARTS:
            for path in (self.folder / table).glob(_NAMES):
                if not (self.folder / "sessions" / path.parent.name / path.name).exists():
                    path.unlink()

    def _catch_up(self) -> None:
        """Reads the ids of sessions whose files the index does not know: of a killed writer."""
        known = {name for (name,) in self._index.execute("SELECT name FROM files")}
        for path in (self.folder / "sessions").glob(_NAMES):
            name = path.relative_to(self.folder).as_posix()
            if name not in known:
                found = parquet.ParquetFile(path).read(["session_id"])
                self._remember([name], found.column("session_id").to_pylist())


def _pieces(table: str, rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Yields the rows of a table in pieces, which bound the memory of a write."""
    piece, tokens = list[_Row](), 0
    for row in rows:
        piece.append(with_versions(row) if table == "nodes" else row)
        tokens += len(row["token_ids"]) if table == "nodes" else 0
        if len(piece) == _PIECE_ROWS or tokens >= _PIECE_TOKENS:
            yield piece
            piece, tokens = [], 0
    if piece:
        yield piece


def _rewards(record: session_pb2.SessionRecord) -> _Row | None:
    """Returns the row of a session's rewards. None if it has none."""
    found = {
        run.node_id: run.reward
        for one in record.trajectories
        for run in one.segments
        if run.HasField("reward")
    }
    found |= {node.node_id: node.reward for node in record.tree.nodes if node.HasField("reward")}
    row = {
        "session_id": record.session_id,
        "recorded_unix_ms": clock.unix_ms(),
        "reward": record.reward if record.HasField("reward") else None,
        "trajectory_rewards": [
            {"trajectory_id": one.trajectory_id, "reward": one.reward}
            for one in record.trajectories
            if one.HasField("reward")
        ],
        "turn_rewards": [{"node_id": id_, "reward": reward} for id_, reward in found.items()],
    }
    is_rewarded = row["reward"] is not None or row["trajectory_rewards"] or found
    return row if is_rewarded else None


def _day(unix_ms: int) -> str:
    unix_ms = min(max(unix_ms, 0), _LAST_MS)  # as a client may have sent it
    return datetime.fromtimestamp(unix_ms / 1000, UTC).date().isoformat()


# Reading.


def read_records(
    folder: str | Path, *, since: date | None = None, until: date | None = None
) -> Iterator[session_pb2.SessionRecord]:
    """Yields the sessions of a record with their last rewards, by day and in order of writing.

    Args:
        folder: The record's.
        since: The first day, in UTC. None: the oldest.
        until: The last day. None: the newest.

    Raises:
        InvalidFieldError: A newer release has written a file.
        OSError: A file is missing or damaged.
    """
    root = Path(folder)
    days = [since.isoformat() if since else "", until.isoformat() if until else "9999"]
    rewards = read_rewards(_files(root, "rewards", days))
    for path in _files(root, "sessions", days):
        for tables in read_tables(path):
            yield _record(root, tables, rewards)


def read_session(path: Path, session_id: str) -> session_pb2.SessionRecord | None:
    """Returns a session of a file with its last rewards, or None. Other sessions are not decoded.

    Args:
        path: A file of `sessions`.
        session_id: The session.

    Raises:
        InvalidFieldError: A newer release has written a file.
        OSError: A file is missing or damaged.
    """
    root, day = path.parents[2], path.parent.name.removeprefix("date=")
    rewards = read_rewards(_files(root, "rewards", [day, day]), session_id)
    found = next(read_tables(path, session_id), None)
    return None if found is None else _record(root, found, rewards)


def read_tables(path: Path, session_id: str = "") -> Iterator[Tables]:
    """Yields the rows of the sessions of a file of `sessions`, or of one. Raises as `read_session`.

    Args:
        path: The file.
        session_id: The only session to read. Empty means all.
    """
    sessions = _read(path, session_id).to_pylist()
    files = [path.parents[2] / table / path.parent.name / path.name for table in PARTS]
    if any(map(_has_parts, sessions)):
        for file in files:
            file.stat()
    parts = [_by_session(file, session_id) for file in files]
    for row in sessions:
        nodes, trajectories = (part.pop(row["session_id"], []) for part in parts)
        yield Tables(row, trajectories, nodes)


def read_rewards(paths: Iterable[Path], session_id: str = "") -> dict[str, _Row]:
    """Returns the last row of each session in files of `rewards`, or that of one session.

    Raises as `read_session`.
    """
    rewards: dict[str, _Row] = {}
    for path in paths:
        for row in _read(path, session_id).to_pylist():
            last = rewards.setdefault(row["session_id"], row)
            if last["recorded_unix_ms"] <= row["recorded_unix_ms"]:
                rewards[row["session_id"]] = row
    return rewards


def _record(root: Path, tables: Tables, rewards: Mapping[str, _Row]) -> session_pb2.SessionRecord:
    found = {
        one["sha256"]: images.read(root / _IMAGES, one["sha256"], one["media_type"])
        for one in tables.session["images"]
    }
    record = record_of(tables, found)
    if (late := rewards.get(record.session_id)) is not None:
        apply_rewards(record, _late(late))
    return record


def _has_parts(row: _Row) -> bool:
    """Says whether a session must have rows in the files of `PARTS`."""
    return bool(row["turns"] and row["outcome"] == "COMPLETED" and row["capture"] == "TOKENS")


def _files(root: Path, table: str, days: Sequence[str]) -> list[Path]:
    found = sorted((root / table).glob("date=*/*.parquet"))
    first, last = days
    return [one for one in found if first <= one.parent.name.removeprefix("date=") <= last]


def _read(path: Path, session_id: str = "") -> Any:
    """Reads a file, or the rows of one session of it.

    Raises:
        InvalidFieldError: Its version is newer.
    """
    file = parquet.ParquetFile(path)
    version = int((file.schema_arrow.metadata or {}).get(VERSION_KEY, b"0"))
    if not 1 <= version <= VERSION:
        raise InvalidFieldError(
            "record", f"{path} has version {version}, and this release reads {VERSION}; update it"
        )
    columns = [name for name in file.schema_arrow.names if name not in _OF_SPANS]
    if not session_id:
        return file.read(columns)
    groups = [
        at
        for at in range(file.num_row_groups)
        if session_id in set(file.read_row_group(at, ["session_id"]).column(0).to_pylist())
    ]
    found = file.read_row_groups(groups, columns)
    return found.filter(compute.equal(found.column("session_id"), session_id))


def _by_session(path: Path, session_id: str) -> dict[str, list[_Row]]:
    """Returns the rows of a file by session, their token columns as arrays. Empty without one."""
    found: dict[str, list[_Row]] = {}
    if path.exists():
        table = _read(path, session_id).combine_chunks()
        arrays = {name: table.column(name) for name in _ARRAYS if name in table.column_names}
        rows = table.drop_columns(list(arrays)).to_pylist()
        for name, column in arrays.items():
            for at, values in enumerate(_lists(column)):
                rows[at][name] = values
        for row in rows:
            found.setdefault(row["session_id"], []).append(row)
    return found


def _lists(column: Any) -> Iterator[Any]:
    """Yields the lists of a column as NumPy arrays."""
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        ends = chunk.offsets.to_numpy()
        for start, end in pairwise(ends):
            yield values[start:end]


def _late(row: Mapping[str, Any]) -> session_pb2.SessionRewards:
    trajectories = {one["trajectory_id"]: one["reward"] for one in row["trajectory_rewards"]}
    turns = {one["node_id"]: one["reward"] for one in row["turn_rewards"]}
    return session_pb2.SessionRewards(
        reward=row["reward"], trajectory_rewards=trajectories, turn_rewards=turns
    )
