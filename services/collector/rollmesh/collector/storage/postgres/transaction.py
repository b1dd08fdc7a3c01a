"""Transactions in PostgreSQL."""

from collections.abc import Sequence

from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.runtime.errors import SessionDamagedError

_BYTES = "bytes"


class PostgresTransaction(Transaction):
    """A transaction on one connection."""

    held = "CASE WHEN p.unit_id IS NULL THEN 0 ELSE 1 END"

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
