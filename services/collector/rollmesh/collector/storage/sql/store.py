"""The methods of `Store` that are the same in SQLite and in PostgreSQL."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from rollmesh.collector.delivery.records import join, read_head
from rollmesh.collector.delivery.units import Settlement
from rollmesh.collector.storage.sql import (
    consumers as sql_consumers,
    delivery as sql_delivery,
    ingest as sql_ingest,
    reads as sql_reads,
)
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.collector.storage.store import (
    Counts,
    Sought,
    Standing,
    Updated,
    read_token,
    session_unknown,
)
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_Result = TypeVar("_Result")
Work: TypeAlias = Callable[[Transaction], _Result]


class SqlStore(ABC):
    """A `Store`, whose Protocol documents the methods, over the transactions of a dialect."""

    @abstractmethod
    async def write(self, work: Work[_Result]) -> _Result:
        """Runs work in a transaction while nobody else writes; returns once it is durable."""

    @abstractmethod
    async def read(self, work: Work[_Result]) -> _Result:
        """Runs work that only reads, in a transaction."""

    async def set_rewards(
        self, session_id: str, rewards: session_pb2.SessionRewards, request_id: str, now_ms: int
    ) -> bool:
        """Sets a session's rewards."""
        return await self.write(
            lambda tx: sql_ingest.set_rewards(tx, session_id, rewards, request_id, now_ms)
        )

    async def create_consumer(
        self, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
    ) -> None:
        """Creates a consumer."""
        await self.write(lambda tx: sql_consumers.create_consumer(tx, consumer, start, now_ms))

    async def update_consumer(self, changes: pb.Consumer, now_ms: int) -> Updated:
        """Changes the settings of a consumer."""
        return await self.write(lambda tx: sql_consumers.update_consumer(tx, changes, now_ms))

    async def delete_consumer(self, consumer: str) -> bool:
        """Deletes a consumer."""
        return await self.write(lambda tx: sql_consumers.delete_consumer(tx, consumer))

    async def consumer(self, name: str) -> pb.Consumer:
        """Returns a consumer."""
        return await self.read(lambda tx: sql_consumers.read(tx, name))

    async def consumers(self, page_size: int, page_token: str) -> tuple[list[pb.Consumer], str]:
        """Returns consumers ordered by name."""
        return await self.read(lambda tx: sql_consumers.read_page(tx, page_size, page_token))

    async def settle(
        self, consumer: str, settlements: Sequence[Settlement], now_ms: int
    ) -> list[str]:
        """Settles units."""
        return await self.write(lambda tx: sql_delivery.settle(tx, consumer, settlements, now_ms))

    async def seek(self, consumer: str, position: pb.Position) -> Sought:
        """Moves a consumer."""
        return await self.write(lambda tx: sql_consumers.seek(tx, consumer, position))

    async def touch(self, consumers: Sequence[str], now_ms: int) -> None:
        """Records that consumers have streams now."""
        if consumers:
            await self.write(lambda tx: sql_consumers.touch(tx, consumers, now_ms))

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Deletes the consumers that have had no stream since."""
        return await self.write(lambda tx: sql_consumers.expire(tx, before_ms))

    async def standing(self, consumer: str) -> Standing:
        """Counts the units of a consumer."""
        return await self.read(lambda tx: sql_consumers.standing(tx, consumer))

    async def filtered(
        self, consumer: str, page_size: int, page_token: str
    ) -> tuple[list[pb.FilteredEntry], str]:
        """Returns the entries filtered for a consumer."""
        after = read_token(page_token)
        return await self.read(lambda tx: sql_consumers.filtered(tx, consumer, page_size, after))

    async def open_groups(self, page_size: int, page_token: str) -> tuple[list[pb.OpenGroup], str]:
        """Returns groups waiting for samples."""
        after = read_token(page_token)
        return await self.read(lambda tx: sql_reads.open_groups(tx, page_size, after))

    async def session(self, session_id: str, *, arrays: bool) -> session_pb2.SessionRecord:
        """Returns one session."""

        def read(tx: Transaction) -> tuple[bytes, bytes | SessionDamagedError] | None:
            row = tx.row("SELECT head FROM sessions WHERE session_id = ?1", session_id)
            if row is None:
                return None
            return row[0], tx.arrays([session_id])[session_id] if arrays else b""

        found = await self.read(read)
        if found is None:
            raise session_unknown(session_id)
        head, packed = read_head(session_id, found[0]), found[1]
        if isinstance(packed, SessionDamagedError):
            raise packed
        return join(head, packed) if arrays else head

    async def sessions_after(self, cursor: int, limit: int) -> list[tuple[int, str]]:
        """Returns sessions in order of arrival."""
        sql = "SELECT n, session_id FROM sessions WHERE n > ?1 ORDER BY n LIMIT ?2"
        rows = await self.read(lambda tx: tx.rows(sql, cursor, limit))
        return [(n, session_id) for n, session_id in rows]

    async def counts(self) -> Counts:
        """Returns totals of what is stored."""
        return await self.read(sql_reads.counts)
