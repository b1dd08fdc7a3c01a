"""Transactions in PostgreSQL."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from rollmesh.collector.storage.sql.transaction import Row, Transaction
from rollmesh.runtime.errors import SessionDamagedError

_BYTES = "bytes"


class Statements(NamedTuple):
    """What a connection runs; PostgreSQL's parameters are written `$1`."""

    rows: Callable[[str, Sequence[Any]], list[Row]]
    run: Callable[[str, Sequence[Any]], None]
    run_many: Callable[[str, Iterable[Sequence[Any]]], None]


class PostgresTransaction(Transaction):
    """A transaction on one connection."""

    held = "CASE WHEN p.unit_id IS NULL THEN 0 ELSE 1 END"

    def __init__(self, statements: Statements) -> None:
        """Begins; the connection is in a transaction already."""
        super().__init__()
        self._statements = statements

    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        """Runs a statement and returns its rows."""
        return self._statements.rows(_numbered(sql), parameters)

    def run(self, sql: str, *parameters: Any) -> None:
        """Runs a statement without rows."""
        self._statements.run(_numbered(sql), parameters)

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters, in one round trip."""
        rows = list(parameters)
        if rows:
            self._statements.run_many(_numbered(sql), rows)

    def within(self, number: int) -> str:
        """Returns SQL for "is one of"."""
        return f"= ANY(?{number})"

    def listed(self, values: Iterable[str]) -> list[str]:
        """Returns values as one parameter."""
        return list(values)

    def stored_bytes(self) -> int:
        """Returns the bytes of all sessions."""
        return self.total(_BYTES)

    def add_bytes(self, count: int) -> None:
        """Counts bytes of sessions."""
        self.add_total(_BYTES, count)

    def arrays(self, session_ids: Sequence[str]) -> dict[str, bytes | SessionDamagedError]:
        """Returns the arrays of stored sessions."""
        found = self.rows(
            f"SELECT session_id, arrays FROM sessions WHERE session_id {self.within(1)}",  # noqa: S608
            self.listed(session_ids),
        )
        return dict(found)

    def removing(self, group_keys: Sequence[str]) -> None:
        """Counts the bytes of the sessions of groups as removed."""
        size: int = self.value(
            "SELECT CAST(coalesce(sum(octet_length(head) + octet_length(arrays)), 0) AS BIGINT)"  # noqa: S608
            f" FROM sessions WHERE group_key {self.within(1)}",
            self.listed(group_keys),
        )
        self.add_bytes(-size)


@cache
def _numbered(sql: str) -> str:
    return re.sub(r"\?(\d+)", r"$\1", sql)
