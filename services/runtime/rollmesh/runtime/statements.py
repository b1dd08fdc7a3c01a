"""SQL statements that are written once for SQLite and PostgreSQL.

Their parameters are numbered (`?1`), which SQLite takes, and PostgreSQL after a translation.
"""

import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

Row: TypeAlias = tuple[Any, ...]


class Statements(ABC):
    """What runs the statements of a transaction."""

    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of the database after which the transaction cannot go on."""

    @abstractmethod
    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        """Runs a statement and returns its rows."""

    @abstractmethod
    def run(self, sql: str, *parameters: Any) -> None:
        """Runs a statement without rows. Its error may come with a later statement."""

    @abstractmethod
    def changed(self, sql: str, *parameters: Any) -> int:
        """Runs a statement without rows; returns the number of rows that it changed."""

    @abstractmethod
    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters."""

    @abstractmethod
    def within(self, number: int) -> str:
        """Returns SQL for "is one of": the parameter with this number is from `listed`."""

    @abstractmethod
    def listed(self, values: Iterable[str]) -> Any:
        """Returns values as one parameter."""

    def row(self, sql: str, *parameters: Any) -> Row | None:
        """Runs a statement and returns its only row; None if it has none."""
        rows = self.rows(sql, *parameters)
        return rows[0] if rows else None

    def value(self, sql: str, *parameters: Any) -> Any:
        """Runs a statement and returns the value of its only row."""
        ((found,),) = self.rows(sql, *parameters)
        return found


class SqliteStatements(Statements):
    """Statements on a connection to SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Takes the connection."""
        self._db = db

    def rows(self, sql: str, *parameters: Any) -> list[Row]:
        """Runs a statement and returns its rows."""
        return self._db.execute(sql, parameters).fetchall()

    def run(self, sql: str, *parameters: Any) -> None:
        """Runs a statement without rows."""
        self._db.execute(sql, parameters)

    def changed(self, sql: str, *parameters: Any) -> int:
        """Runs a statement without rows; returns the number of rows that it changed."""
        return self._db.execute(sql, parameters).rowcount

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Runs a statement without rows for each of the parameters."""
        self._db.executemany(sql, parameters)

    def within(self, number: int) -> str:
        """Returns SQL for "is one of"."""
        return f"IN (SELECT value FROM json_each(?{number}))"  # noqa: S608

    def listed(self, values: Iterable[str]) -> Any:
        """Returns values as one parameter."""
        return json.dumps(list(values))
