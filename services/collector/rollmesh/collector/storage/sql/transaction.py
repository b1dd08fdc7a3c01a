"""A transaction of a SQL store: its statements, and the totals that it changes."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, GroupLog, group_logs
from rollmesh.collector.storage.store import read_consumer
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.statements import Row, Statements

LAST_SEQ = "last_seq"
"""Name of the total that is the last position in any log."""
_ADD = (
    "INSERT INTO totals (name, value) VALUES (?1, ?2)"
    " ON CONFLICT (name) DO UPDATE SET value = totals.value + excluded.value"
)


class Transaction(ABC):
    """A transaction, which sees its own changes; `finish` must be called before the commit."""

    held: ClassVar[str]
    """SQL for whether the progress `p` of a unit means that a collector fetched it: 0 or 1."""

    def __init__(self, statements: Statements) -> None:
        """Starts without changes; the connection is in a transaction already."""
        self._statements = statements
        self._totals: dict[str, int] = {}
        self._added: Counter[str] = Counter()
        self._logs: list[GroupLog] | None = None

    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        """Runs a statement and returns its rows."""
        return self._statements.rows(sql, *parameters)

    def row(self, sql: str, *parameters: Any) -> Row | None:
        """Runs a statement and returns its only row; None if it has none."""
        return self._statements.row(sql, *parameters)

    def value(self, sql: str, *parameters: Any) -> Any:
        """Runs a statement and returns the value of its only row."""
        return self._statements.value(sql, *parameters)

    def run(self, sql: str, *parameters: Any) -> None:
        """Runs a statement without rows."""
        self._statements.run(sql, *parameters)

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters."""
        self._statements.run_many(sql, parameters)

    def within(self, number: int) -> str:
        """Returns SQL for "is one of": the parameter with this number is from `listed`."""
        return self._statements.within(number)

    def listed(self, values: Iterable[str]) -> Any:
        """Returns values as one parameter."""
        return self._statements.listed(values)

    @abstractmethod
    def stored_bytes(self) -> int:
        """Returns the bytes in use."""

    @abstractmethod
    def add_bytes(self, count: int) -> None:
        """Counts bytes of sessions that are added or, if negative, removed."""

    @abstractmethod
    def arrays(self, session_ids: Sequence[str]) -> dict[str, bytes | SessionDamagedError]:
        """Returns the arrays of stored sessions, or the error that they are damaged.

        Raises:
            StoreError: The arrays cannot be read now.
        """

    @abstractmethod
    def removing(self, group_keys: Sequence[str]) -> None:
        """Prepares the removal of the sessions of groups."""

    @property
    def logs(self) -> list[GroupLog]:
        """The group logs, without their readers; the shared log is first."""
        if self._logs is None:
            rows = self.rows(
                "SELECT name, settings FROM consumers WHERE log NOT IN (?1, ?2)",
                SESSION_LOG,
                GROUP_LOG,
            )
            self._logs = group_logs(read_consumer(*row) for row in rows)
        return self._logs

    def total(self, name: str) -> int:
        """Returns a total."""
        if name not in self._totals:
            row = self.row("SELECT value FROM totals WHERE name = ?1", name)
            self._totals[name] = int(row[0]) if row else 0
        return self._totals[name] + self._added[name]

    def add_total(self, name: str, value: int) -> None:
        """Adds to a total."""
        self._added[name] += value

    def forget_total(self, name: str) -> None:
        """Removes a total."""
        self.run("DELETE FROM totals WHERE name = ?1", name)
        self._totals[name] = self._added[name] = 0

    def next_seq(self) -> int:
        """Returns the next position in the logs."""
        self.add_total(LAST_SEQ, 1)
        return self.total(LAST_SEQ)

    def finish(self) -> None:
        """Writes the totals."""
        added = [(name, value) for name, value in self._added.items() if value]
        if added:
            self.run_many(_ADD, added)
