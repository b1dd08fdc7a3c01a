"""A record as the viewer reads it: its files as they come, and a session from its file alone."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from rollmesh.record import (
    PARTS,
    read_annotations,
    read_rewards,
    read_session,
    read_tables,
    record_of,
)
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import RollmeshError, SessionDamagedError, SessionUnknownError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2
from rollmesh.view.index import Index

_log = logging.getLogger(__name__)
_POLL_S = 2.0
_AT_ONCE = 50
_NAMES = "date=*/*.parquet"
_Stamp: TypeAlias = Sequence[tuple[int, int] | None]
"""Time and size of a file and of its parts. Another stamp is a reason to read it again."""


class Record:
    """The files of a record, which somebody else may write. Run `follow` while it is shown."""

    def __init__(self, folder: Path, index: Index) -> None:
        """Takes the folder, and the index to fill.

        Raises:
            ConfigError: The folder is no record.
        """
        if not folder.is_dir():
            raise ConfigError(f"record: there is no folder {folder}; give what archive writes to")
        if not any((folder / name).exists() for name in ("sessions", "_lock")):
            raise ConfigError(f"record: {folder} has no folder `sessions`; give that of a record")
        self._folder = folder
        self._index = index
        self._read = set[Path]()
        self._damaged: dict[Path, tuple[str, _Stamp]] = {}
        self._left = self._left_out = 0
        self._error = self._why = ""

    async def follow(self) -> None:
        """Reads the files into the index as they come, until it is cancelled."""
        while True:
            steps = self._steps()
            try:
                while await asyncio.to_thread(next, steps, True) is None:
                    pass
                self._error = ""
            except OSError as error:
                self._error = f"The record cannot be read: {error}."
            await asyncio.sleep(_POLL_S)

    async def stored(self, session_id: str) -> collector_pb2.ReadSessionsResponse:
        """Returns a session of the record.

        Raises:
            SessionUnknownError: The record does not have it.
            SessionDamagedError: Its file is gone or damaged.
            InvalidFieldError: A newer release has written a file.
        """
        name = await asyncio.to_thread(self._index.file_of, session_id)
        if name is None:
            raise SessionUnknownError(f"session_id: the record has no {session_id[:100]}")
        try:
            path = self._folder / name
            found = await asyncio.to_thread(read_session, path, session_id)
            annotations = await asyncio.to_thread(read_annotations, path, [session_id])
        except RollmeshError:
            raise
        except Exception as error:  # readers of Parquet raise whatever a damaged file makes of them
            raise SessionDamagedError(f"record: {name} cannot be read: {error}") from error
        if found is None:
            raise SessionDamagedError(f"record: {name} does not have {session_id[:100]} any more")
        return collector_pb2.ReadSessionsResponse(
            session=found, annotations=annotations.get(session_id, ())
        )

    def notes(self) -> list[str]:
        """Returns the sentences for the pages: files to read, and damaged ones."""
        found = [self._error] if self._error else []
        if self._left:
            found.append(f"The record has {self._left} more files, which are being read.")
        if damaged := list(self._damaged.items()):
            path, (error, _) = damaged[0]
            found.append(
                f"{len(damaged)} files of the record cannot be read and are left out. "
                f"{path.relative_to(self._folder)}: {error[:300]}"
            )
        if self._left_out:
            said = f"{self._left_out} sessions of the record are damaged and left out."
            found.append(f"{said} {self._why[:300]}".strip())
        return found

    def _steps(self) -> Iterator[None]:
        """Reads the files that are new or were damaged, in steps that take a short time."""
        rewards = self._new("rewards")  # listed first: the files of their sessions are there
        sessions = self._new("sessions")
        self._left = len(sessions)
        for path in sessions:
            yield from self._step(path, self._add(path))
            self._left -= 1
        for path in rewards:
            yield from self._step(path, self._add_rewards(path))

    def _new(self, table: str) -> list[Path]:
        found = sorted((self._folder / table).glob(_NAMES))
        for path in [one for one in self._damaged if one.parent.parent.name == table]:
            if not path.exists():
                del self._damaged[path]
        return [
            one
            for one in found
            if one not in self._read
            and (one not in self._damaged or self._damaged[one][1] != self._stamp(one))
        ]

    def _step(self, path: Path, work: Iterator[None]) -> Iterator[None]:
        """Reads a file. An unfinished or damaged one is read again when it has changed."""
        stamp = self._stamp(path)
        try:
            yield from work
        except Exception as error:  # readers of Parquet raise whatever a damaged file makes of them
            self._damaged[path] = str(error), stamp
            _log.warning("a file is left out", extra=fields(path=str(path), error=str(error)))
        else:
            self._read.add(path)
            if self._damaged.pop(path, None):  # its rewards are read again
                day = self._folder / "rewards" / path.parent.name
                self._read = {one for one in self._read if one.parent != day}

    def _add(self, path: Path) -> Iterator[None]:
        tables = read_tables(path)
        name = path.relative_to(self._folder).as_posix()
        while rows := list(islice(tables, _AT_ONCE)):
            records = []
            for one in rows:
                without_images = one._replace(session=one.session | {"images": []})
                try:
                    records.append(record_of(without_images, {}))
                except (RollmeshError, ValueError) as error:
                    self._left_out += 1
                    id_ = one.session["session_id"][:100]
                    self._why = self._why or f"{name}: session {id_}: {error}"
                    said = fields(session_id=id_, error=str(error))
                    _log.warning("a session is left out", extra=said)
            self._left_out += self._index.add(records, name)
            yield

    def _add_rewards(self, path: Path) -> Iterator[None]:
        rewards = {
            session_id: row["reward"]
            for session_id, row in read_rewards([path]).items()
            if row["reward"] is not None
        }
        self._index.set_rewards(rewards)
        yield

    def _stamp(self, path: Path) -> _Stamp:
        files = [path, *(self._folder / part / path.parent.name / path.name for part in PARTS)]
        return [_state(one) for one in files]


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
