"""The sessions of a record, read back."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path

from rollmesh.batches import PackageMissingError
from rollmesh.client import SessionResult


def read_sessions(
    folder: str | Path,
    *,
    since: date | None = None,
    until: date | None = None,
    damaged: list[str] | None = None,
) -> Iterator[SessionResult]:
    """Yields the sessions of a record with their last rewards, by day and in order of writing.

    The sessions equal delivered ones. One file's sessions are in memory at a time.

    Args:
        folder: The record's.
        since: The first day on which sessions were closed, in UTC. None: the oldest.
        until: The last day. None: the newest.
        damaged: Takes a line for each file whose sessions are left out. None: it is an error.

    Raises:
        PackageMissingError: The package pyarrow is missing.
        InvalidFieldError: A newer release has written a file.
        SessionDamagedError: A file is missing or damaged.
    """
    try:
        from rollmesh.record.files import read_records
    except ImportError as error:
        raise PackageMissingError("pyarrow", "the record") from error
    found = read_records(folder, since=since, until=until, damaged=damaged)
    return map(SessionResult.from_proto, found)
