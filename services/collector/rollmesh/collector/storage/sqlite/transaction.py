"""Transactions in SQLite, and the array files that they add and no longer need."""

import sqlite3
from collections.abc import Sequence

from rollmesh.collector.delivery.records import damaged
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.collector.storage.sqlite.array_files import ArrayFiles, ArraysLostError, Place
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.statements import SqliteStatements

_FILE_BYTES = "file_bytes"


class SqliteTransaction(Transaction):
    """A transaction on the connection of the file's only writer."""

    held = "0"  # only this collector fetches units, and remembers which

    def __init__(self, db: sqlite3.Connection, files: ArrayFiles) -> None:
        """Begins; the connection is in a transaction already."""
        super().__init__(SqliteStatements(db))
        self._files = files
        self._left: set[int] = set()

    def stored_bytes(self) -> int:
        """Returns the bytes in use. Free pages of the database are reused and do not count.

        An array file counts in full until its last session is removed.
        """
        pages, free, size = (
            self.value(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size) + self.total(_FILE_BYTES)

    def add_bytes(self, count: int) -> None:
        """Does nothing: pages and files are counted."""

    def arrays(self, session_ids: Sequence[str]) -> dict[str, bytes | SessionDamagedError]:
        """Returns the arrays of stored sessions, or the error that they are damaged."""
        return {session_id: self._arrays(session_id) for session_id in session_ids}

    def _arrays(self, session_id: str) -> bytes | SessionDamagedError:
        ((arrays, *place),) = self.rows(
            "SELECT arrays, file, at, size FROM sessions WHERE session_id = ?1", session_id
        )
        try:
            found: bytes = self._files.read(Place(*place)) if arrays is None else arrays
        except ArraysLostError as error:
            return damaged(session_id, str(error))
        return found

    def removing(self, group_keys: Sequence[str]) -> None:
        """Notes the files that hold arrays of the groups."""
        rows = self.rows(
            "SELECT DISTINCT file FROM sessions WHERE file IS NOT NULL"  # noqa: S608
            f" AND group_key {self.within(1)}",
            self.listed(group_keys),
        )
        self._left |= {file for (file,) in rows}

    def add_file(self, places: Sequence[Place]) -> None:
        """Adds the file of a call."""
        if places:
            size = sum(place.size for place in places)
            self.run("INSERT INTO files VALUES (?1, ?2)", places[0].file, size)
            self.add_total(_FILE_BYTES, size)
            self._left.add(places[0].file)

    def forget_files(self) -> list[int]:
        """Forgets the noted files that no session names any more; returns their numbers.

        They may be deleted once this transaction is on disk.
        """
        forgotten: list[int] = []
        for file in sorted(self._left):
            gone = self.rows(
                "DELETE FROM files WHERE n = ?1"
                " AND NOT EXISTS (SELECT 1 FROM sessions WHERE file = ?1) RETURNING bytes",
                file,
            )
            forgotten += [file] * len(gone)
            self.add_total(_FILE_BYTES, -sum(size for (size,) in gone))
        return forgotten
