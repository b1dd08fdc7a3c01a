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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import date
from itertools import chain, groupby, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Self, TypeAlias

import pyarrow as arrow
from pyarrow import compute, parquet

from rollmesh.record import beside, late
from rollmesh.record.schema import OF_SPANS, VERSION, VERSION_KEY, conform, schema_of
from rollmesh.record.tables import (
    Stored,
    Tables,
    has_parts,
    moment,
    record_of,
    tables_of,
    with_versions,
)
from rollmesh.runtime import clock, owner_only
from rollmesh.runtime.codec import (
    apply_rewards,
    check_conversations,
    check_session,
    context_in,
    messages_in,
)
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionDamagedError
from rollmesh.v1 import collector_pb2, session_pb2

_Row: TypeAlias = dict[str, Any]
_LOCK, _INDEX, _WRITING, _IMAGES = "_lock", "_index.sqlite", "_writing", "images"
PARTS = ("nodes", "trajectories")
"""The files of these tables are renamed before the files of `COMMITS`."""
COMMITS = ("sessions", *late.LATE_TABLES)
_NAMES = "date=*/[0-9]*-????????.parquet"
_ARRAYS = ("token_ids", "logprobs", "loss_mask", "values", "top_ids", "top_logprobs")
_UNWRITABLE = (
    *(RollmeshError, arrow.ArrowException),
    *(ValueError, TypeError, LookupError, ArithmeticError),
)
"""Errors of a session's conversion."""
_PIECE_ROWS, _PIECE_TOKENS = 4096, 2**20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (session_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS late (
  session_id TEXT, what TEXT, digest BLOB NOT NULL, was_read INTEGER NOT NULL,
  PRIMARY KEY (session_id, what)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS places (name TEXT PRIMARY KEY, place TEXT NOT NULL) WITHOUT ROWID;
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
        self._records: dict[str, session_pb2.SessionRecord] = {}
        self._late: dict[tuple[str, str], late.Last] = {}
        self.refused: dict[str, beside.Refused] = {}
        """Sessions of the batch that the record cannot hold, by id."""
        self.left_out = 0  # such sessions of all finished batches
        self._name = self._place = ""
        self._newest_ms = 0
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
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the folder back. A batch that was not published is dropped."""
        self._held.close()

    def add(self, record: session_pb2.SessionRecord) -> None:
        """Adds a session to the batch, as it was delivered. A known one adds only other rewards.

        A session that cannot be converted is among `refused`.
        """
        day, rewards = _day(record.closed_unix_ms), late.rewards_of(record)
        self.sessions += 1
        self.bytes += record.ByteSize()
        known = self._last(record.session_id, late.key_of("rewards", rewards))
        sql = "SELECT 1 FROM sessions WHERE session_id = ?"
        if (
            record.session_id in self._records
            or self._index.execute(sql, (record.session_id,)).fetchone()
        ):
            if known is None or not known.was_read:
                self._add_late("rewards", day, rewards, was_read=False)
            return
        try:
            tables = tables_of(record)
        except _UNWRITABLE as error:
            reason = f"{type(error).__name__}: {error}"
            self.refused[record.session_id] = beside.Refused(reason, record.SerializeToString())
            return
        self._records[record.session_id] = record
        if known is None:
            self._note("rewards", rewards, was_read=False)
        self._images |= {image.sha256: image for image in record.images}
        self._rows.setdefault(("sessions", day), []).append(tables.session)
        for table in PARTS:
            if rows := getattr(tables, table):
                self._rows.setdefault((table, day), []).extend(rows)

    def change(
        self,
        session: session_pb2.SessionRecord,
        annotations: Iterable[collector_pb2.Annotation] = (),
        scores: Iterable[collector_pb2.TrajectoryScores] = (),
    ) -> None:
        """Adds the rewards, annotations and scores of a session that the record does not have."""
        id_, day = session.session_id, _day(session.closed_unix_ms)
        self._add_late("rewards", day, late.rewards_of(session), was_read=True)
        for one in annotations:
            self.bytes += one.ByteSize()
            self._add_late("annotations", day, late.annotation_of(id_, one), was_read=True)
        for each in scores:
            self.bytes += each.ByteSize()
            self._add_late("scores", day, late.scores_of(id_, each), was_read=True)

    def _add_late(self, table: str, day: str, row: _Row, *, was_read: bool) -> None:
        last = self._last(row["session_id"], late.key_of(table, row))
        digest = late.digest_of(table, row)
        if digest != (last.digest if last else late.NO_REWARDS):
            row["recorded_unix_ms"] = self._next_ms()
            self._rows.setdefault((table, day), []).append(row)
        self._note(table, row, was_read=was_read)

    def _note(self, table: str, row: _Row, *, was_read: bool) -> None:
        last = late.Last(late.digest_of(table, row), was_read)
        self._late[row["session_id"], late.key_of(table, row)] = last

    def _next_ms(self) -> int:
        """Returns the time, and more than it returned before if the clock was set back."""
        self._newest_ms = max(clock.unix_ms(), self._newest_ms + 1)
        return self._newest_ms

    def _last(self, session_id: str, kind: str) -> late.Last | None:
        if (last := self._late.get((session_id, kind))) is not None:
            return last
        sql = "SELECT digest, was_read FROM late WHERE session_id = ? AND what = ?"
        row = self._index.execute(sql, (session_id, kind)).fetchone()
        return None if row is None else late.Last(row[0], bool(row[1]))

    @property
    def is_empty(self) -> bool:
        """Whether the batch has nothing to write."""
        return not (self._rows or self.refused)

    @property
    def place(self) -> str:
        """The place in a list of changes up to which the record has them. Set it to move it.

        It is durable with the next `finish`. A writer that was killed before reads changes again,
        and adds none twice.
        """
        row = self._index.execute("SELECT place FROM places WHERE name = 'changes'").fetchone()
        return self._place or (str(row[0]) if row else "")

    @place.setter
    def place(self, place: str) -> None:
        self._place = place

    def set_aside(self) -> list[str]:
        """Writes the refused sessions of the batch beside the record. Durable.

        Returns:
            The new ids.

        Raises:
            InvalidFieldError: Too many sessions. Nothing was written.
            OSError: One cannot be written.
        """
        return beside.set_aside(self.refused, self.folder, self.sessions)

    def write(self) -> None:
        """Writes the files of the batch beside the record, and the images into it. Durable.

        A session that Parquet cannot hold is among `refused`.

        Raises:
            OSError: A file cannot be written.
        """
        try:
            self._write()
        except _UNWRITABLE:
            if not self._refuse():
                raise
            self._write()

    def _refuse(self) -> bool:
        """Takes sessions out of the batch whose rows cannot be converted. Returns whether any."""
        for (table, _), rows in self._rows.items():
            for id_, own in groupby(rows, itemgetter("session_id")):
                try:
                    for piece in _pieces(table, own):
                        arrow.Table.from_pylist(piece, schema_of(table))
                except _UNWRITABLE as error:
                    if (record := self._records.pop(id_, None)) is not None:
                        reason = f"{type(error).__name__}: {error}"
                        self.refused[id_] = beside.Refused(reason, record.SerializeToString())
        for (table, day), rows in list(self._rows.items()):
            if table not in late.LATE_TABLES:
                rows[:] = [row for row in rows if row["session_id"] not in self.refused]
            if not rows:
                del self._rows[table, day]
        for key, last in list(self._late.items()):
            if key[0] in self.refused and not last.was_read:
                del self._late[key]  # it was delivered with these rewards, and is not kept
        return bool(self.refused)

    def _write(self) -> None:
        self._name = f"{self._next_ms():013d}-{uuid.uuid4().hex[:8]}.parquet"
        beside.write_images(self._images.values(), self.folder / _IMAGES)
        self._drop_unnamed()
        (self.folder / _WRITING).mkdir(mode=0o700)
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
                    beside.sync(folder)

    def finish(self) -> tuple[int, list[str]]:
        """Begins the next batch.

        Returns:
            The number of sessions that were new, and the files of the batch as paths in the folder.

        Raises:
            sqlite3.Error: The index cannot be written. The next writer makes it of the files.
        """
        files = [f"{table}/date={day}/{self._name}" for table, day in self._rows]
        self._remember([one for one in files if one.startswith(COMMITS)], self._records)
        found = len(self._records), files
        self.left_out += len(self.refused)
        self.sessions = self.bytes = 0
        for kept in (self._rows, self._images, self._records, self._late, self.refused):
            kept.clear()
        return found

    def commit(self) -> list[str]:
        """Writes the batch, publishes it, and begins the next one. Returns its files.

        Raises:
            ConfigError: A file cannot be written.
            InvalidFieldError: Too many sessions cannot be converted.
        """
        try:
            self.write()
            self.set_aside()
            self.publish(PARTS)
            self.publish(COMMITS)
            return self.finish()[1]
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"to: {self.folder}: {error}") from error

    def _unnamed(self, table: str, day: str) -> Path:
        return self.folder / _WRITING / f"{table}-{day}-{self._name}"

    def _drop_unnamed(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder / _WRITING)

    def _remember(self, files: Iterable[str], session_ids: Iterable[str]) -> None:
        with self._index:
            rows = [(one,) for one in session_ids]
            self._index.executemany("INSERT OR IGNORE INTO sessions VALUES (?)", rows)
            self._index.executemany("INSERT OR IGNORE INTO files VALUES (?)", [(f,) for f in files])
            last = [(*key, *one) for key, one in self._late.items()]
            self._index.executemany("INSERT OR REPLACE INTO late VALUES (?, ?, ?, ?)", last)
            place = [("changes", self._place)] if self._place else []
            self._index.executemany("INSERT OR REPLACE INTO places VALUES (?, ?)", place)

    def _clean(self) -> None:
        """Removes files of a batch whose sessions have no file. Others' files stay."""
        self._drop_unnamed()
        for table in PARTS:
            for path in (self.folder / table).glob(_NAMES):
                if not (self.folder / "sessions" / path.parent.name / path.name).exists():
                    path.unlink()

    def _catch_up(self) -> None:
        """Reads files that the index does not know: of a killed writer."""
        known = {name for (name,) in self._index.execute("SELECT name FROM files")}
        for table in COMMITS:
            for path in sorted((self.folder / table).glob(_NAMES), key=lambda path: path.name):
                name = path.relative_to(self.folder).as_posix()
                self._newest_ms = max(self._newest_ms, int(path.name.partition("-")[0]))
                if name in known:
                    continue
                ids: list[str] = []
                if table == "sessions":
                    ids = _ids_in(path)
                    for row in _delivered_rewards(path):
                        if self._last(row["session_id"], "rewards") is None:
                            self._note("rewards", row, was_read=False)
                else:
                    for row in _read(path).to_pylist():
                        self._note(table, row, was_read=True)
                self._remember([name], ids)
                self._late.clear()


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


def _delivered_rewards(path: Path) -> Iterator[_Row]:
    """Yields the rows of rewards with which the sessions of a file were delivered."""
    parts: dict[str, dict[str, list[_Row]]] = {}
    for table, of, id_ in (
        ("trajectories", "trajectory_rewards", "trajectory_id"),
        ("nodes", "turn_rewards", "node_id"),
    ):
        file = path.parents[2] / table / path.parent.name / path.name
        columns = ("session_id", id_, "reward")
        rows = _read(file, only=columns).to_pylist() if file.exists() else ()
        for row in rows:
            if row["reward"] is not None:
                found = parts.setdefault(row["session_id"], {}).setdefault(of, [])
                found.append({id_: row[id_], "reward": row["reward"]})
    for row in _read(path, only=("session_id", "reward")).to_pylist():
        yield (
            row | {"trajectory_rewards": [], "turn_rewards": []} | parts.get(row["session_id"], {})
        )


def _day(unix_ms: int) -> str:
    return moment(unix_ms).date().isoformat()


# Reading.


def read_records(
    folder: str | Path,
    *,
    since: date | None = None,
    until: date | None = None,
    damaged: list[str] | None = None,
) -> Iterator[session_pb2.SessionRecord]:
    """Yields the sessions of a record with their last rewards, by day and in order of writing.

    Args:
        folder: The record's.
        since: The first day, in UTC. None: the oldest.
        until: The last day. None: the newest.
        damaged: Takes a line for each file whose sessions are left out. None: it is an error.

    Raises:
        InvalidFieldError: A newer release has written a file.
        SessionDamagedError: A file is missing or damaged.
    """
    days = [since.isoformat() if since else "", (until or date.max).isoformat()]
    return (record for _, record in _read_records(Path(folder), days, damaged))


def read_stored(folder: Path, damaged: list[str]) -> Iterator[Stored]:
    """Yields the sessions of a record with their late values, as `read_records`.

    On a day with a damaged file of annotations or scores, sessions have neither.
    """
    found = _read_records(folder, ["", date.max.isoformat()], damaged)
    for of_file, records in groupby(found, itemgetter(0)):
        ids = _ids_in(of_file)
        try:
            annotations = read_annotations(of_file, ids)
            scores = _read_late("scores", of_file, ids)
        except SessionDamagedError as error:
            annotations, scores = {}, {}
            damaged += {error.message}.difference(damaged)  # said once for all files of the day
        for _, record in records:
            id_ = record.session_id
            scored = [late.scores_in(row) for row in scores.get(id_, ())]
            yield Stored(record, annotations.get(id_, []), scored)


def _read_records(
    root: Path, days: Sequence[str], damaged: list[str] | None
) -> Iterator[tuple[Path, session_pb2.SessionRecord]]:
    """Yields sessions with the files that they are in."""

    def leave_out(error: SessionDamagedError) -> None:
        if damaged is None:
            raise error
        damaged.append(error.message)

    seen, rewards, without = set[str](), dict[str, _Row](), set[str]()
    for day, files in groupby(_files(root, "rewards", days), attrgetter("parent.name")):
        try:
            rewards |= read_rewards(files)
        except SessionDamagedError as error:  # the last rewards of its sessions are not known
            leave_out(error)
            without.add(day)
    for path in _files(root, "sessions", days):
        if path.parent.name in without:
            continue
        try:
            for tables in read_tables(path):
                id_ = tables.session["session_id"]
                try:
                    if id_ in seen:
                        raise damaged_in(path, id_, "session_id: is there twice")
                    record = _record(path, tables, rewards, beside.read_image)
                    check_session(record, "session")  # as a collector does, and its messages
                    check_conversations(record)
                    seen.add(id_)
                except SessionDamagedError as error:
                    leave_out(error)
                except InvalidFieldError as error:
                    leave_out(damaged_in(path, id_, error.message))
                else:
                    yield path, record
        except SessionDamagedError as error:
            leave_out(error)


def read_session(path: Path, session_id: str) -> session_pb2.SessionRecord | None:
    """Returns a session of a file with its last rewards, or None. Other sessions are not decoded.

    An image whose file is missing has no bytes.

    Raises:
        InvalidFieldError: A newer release has written a file.
        SessionDamagedError: A file is missing or damaged.
    """
    root, day = path.parents[2], path.parent.name.removeprefix("date=")
    rewards = read_rewards(_files(root, "rewards", [day, day]), session_id)
    tables = next(read_tables(path, session_id), None)
    if tables is None:
        return None
    try:
        found = _record(path, tables, rewards, beside.read_image_if_any)
        for node in found.messages:
            messages_in(node)
        for index in range(len(found.contexts)):
            context_in(found, index)
    except InvalidFieldError as error:
        raise damaged_in(path, session_id, error.message) from error
    return found


def read_annotations(
    path: Path, session_ids: Collection[str]
) -> dict[str, list[collector_pb2.Annotation]]:
    """Returns the last annotations of sessions of a file, by session. Raises as `read_session`."""
    return {
        id_: [late.annotation_in(row) for row in rows]
        for id_, rows in _read_late("annotations", path, session_ids).items()
    }


def _read_late(table: str, path: Path, session_ids: Collection[str]) -> dict[str, list[_Row]]:
    """Returns the last rows of late values of sessions of a file, by session."""
    root, day = path.parents[2], path.parent.name.removeprefix("date=")
    only = session_ids if len(session_ids) == 1 else ()
    files = (_by_session(file, *only) for file in _files(root, table, [day, day]))
    rows = chain.from_iterable(rows.get(one, ()) for rows in files for one in session_ids)
    found: dict[str, list[_Row]] = {}
    for (id_, _), row in sorted(late.last_of(table, rows).items(), key=itemgetter(0)):
        found.setdefault(id_, []).append(row)
    return found


def read_tables(path: Path, session_id: str = "") -> Iterator[Tables]:
    """Yields the rows of the sessions of a file, or of one session. Raises as `read_session`."""
    sessions = _read(path, session_id).to_pylist()
    files = [path.parents[2] / table / path.parent.name / path.name for table in PARTS]
    for file in files if any(map(has_parts, sessions)) else ():
        if not file.exists():
            raise SessionDamagedError(
                f"record: {file} is missing, so the sessions of {path} cannot be read; bring it "
                f"back, or delete {path}"
            )
    parts = [_by_session(file, session_id) for file in files]
    for row in sessions:
        nodes, trajectories = (part.pop(row["session_id"], []) for part in parts)
        yield Tables(row, trajectories, nodes)


def read_rewards(paths: Iterable[Path], session_id: str = "") -> dict[str, _Row]:
    """Returns the last row of each session in files of `rewards`, or that of one session.

    Raises as `read_session`.
    """
    rows = chain.from_iterable(_read(path, session_id).to_pylist() for path in paths)
    return {id_: row for (id_, _), row in late.last_of("rewards", rows).items()}


def _record(
    path: Path,
    tables: Tables,
    rewards: Mapping[str, _Row],
    image: Callable[[Path, str, str], bytes],
) -> session_pb2.SessionRecord:
    id_ = tables.session["session_id"]
    try:
        found = {
            one["sha256"]: image(path.parents[2] / _IMAGES, one["sha256"], one["media_type"])
            for one in tables.session["images"]
        }
    except OSError as error:
        problem = f"images: one cannot be read: {error}; bring its file back"
        raise damaged_in(path, id_, problem) from error
    record = record_of(tables, found)
    if (own := rewards.get(id_)) is not None:
        apply_rewards(record, late.rewards_in(own))
    return record


def damaged_in(path: Path, session_id: str, problem: str) -> SessionDamagedError:
    """Returns the error of a session that a file does not have as it must be."""
    return SessionDamagedError(f"record: {path}: session {session_id[:100]}: {problem}")


def _files(root: Path, table: str, days: Sequence[str]) -> list[Path]:
    found = sorted((root / table).glob("date=*/*.parquet"))
    first, last = days
    return [one for one in found if first <= one.parent.name.removeprefix("date=") <= last]


def _read(path: Path, session_id: str = "", only: Collection[str] = ()) -> Any:
    """Reads a file, or the rows of one session of it, or some columns.

    Raises:
        InvalidFieldError: Its version is newer.
        SessionDamagedError: It is damaged.
    """
    try:
        file = parquet.ParquetFile(path)
        version = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
        if version is None:
            key = VERSION_KEY.decode()
            problem = f"{path} has no metadata {key}; write the version, {VERSION}"
            raise InvalidFieldError("record", problem)
        if not version.isdigit() or not 1 <= int(version) <= VERSION:
            said = f"{version.decode(errors='replace')}, and this release reads {VERSION}"
            raise InvalidFieldError("record", f"{path} has version {said}; update it")
        return _rows_in(file, path.parents[1].name, session_id, only)
    except (OSError, arrow.ArrowException) as error:
        raise SessionDamagedError(
            f"record: {path} cannot be read: {error}; bring it back"
        ) from error


def _rows_in(file: Any, table: str, session_id: str, only: Collection[str]) -> Any:
    has = file.schema_arrow.names
    columns = [name for name in has if name in (only or {name}) and name not in OF_SPANS]
    if not session_id or "session_id" not in has:
        return conform(table, file.read(columns), only)
    groups = [
        at
        for at in range(file.num_row_groups)
        if session_id in set(file.read_row_group(at, ["session_id"]).column(0).to_pylist())
    ]
    found = conform(table, file.read_row_groups(groups, columns))
    return found.filter(compute.equal(found.column("session_id"), session_id))


def _ids_in(path: Path) -> list[str]:
    return list(_read(path, only=("session_id",)).column("session_id").to_pylist())


def _by_session(path: Path, session_id: str = "") -> dict[str, list[_Row]]:
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
        for start, end in pairwise(chunk.offsets.to_numpy()):
            yield values[start:end]
