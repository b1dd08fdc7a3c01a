"""The Redis store: several collectors share the work of every consumer.

A consumer is a Redis consumer group on the stream of its log, and the collectors are its members. A
collector keeps the units it has read as long as it is alive; after that the others take them over.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence

from rollmesh.collector.delivery.loads import Judge, Loaded
from rollmesh.collector.delivery.records import join, read_head
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import (
    GROUP_LOG,
    Arrival,
    Page,
    Settlement,
    Unit,
    log_of,
    own_log,
)
from rollmesh.collector.storage.redis import (
    consumers as redis_consumers,
    ingest as redis_ingest,
    loads as redis_loads,
    logs as redis_logs,
    retention as redis_retention,
    scripts,
)
from rollmesh.collector.storage.redis.client import Command, RedisClient, Script, Value, pairs, text
from rollmesh.collector.storage.store import (
    Counts,
    Sought,
    Standing,
    Updated,
    read_token,
    session_unknown,
)
from rollmesh.runtime.errors import ConsumerUnknownError, StoreError
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_ALIVE_MS = 10_000
_POLL_S = 0.1
_POLLS = 20
"""Polls after which waiting streams check again, because a collector may have died."""
_FREE = "free"
"""Owner of released units; never alive."""


class RedisStore:
    """A `Store` for collectors that share one Redis; the Protocol documents the methods."""

    def __init__(
        self, client: RedisClient, retention: Retention, moves: Mapping[str, int] | None = None
    ) -> None:
        """Takes a connected client; `open_store` checks what it is connected to.

        Args:
            client: The client.
            retention: How long settled sessions are kept.
            moves: How many times each consumer was moved before.
        """
        self._client = client
        self._retention = retention
        self._me = uuid.uuid4().hex
        self._news = b""
        self._retained_to = 0
        self._moves = dict(moves or {})
        """By consumer: how many times it was moved, as seen by this collector."""

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions."""
        most = self._retention.max_bytes
        return await redis_ingest.ingest(self._client, arrivals, now_ms, most)

    async def waiting(self, limit: int) -> list[str]:
        """Returns the ids of sessions waiting for rewards."""
        found = await self._client.run("ZRANGE", self._client.key("due"), 0, limit - 1)
        return list(map(text, found))

    async def set_rewards(
        self, session_id: str, rewards: session_pb2.SessionRewards, request_id: str, now_ms: int
    ) -> bool:
        """Sets a session's rewards."""
        return await redis_ingest.set_rewards(self._client, session_id, rewards, request_id, now_ms)

    async def tick(self, now_ms: int) -> bool:
        """Processes due deadlines."""
        return await redis_ingest.tick(self._client, now_ms)

    async def changed(self) -> list[str]:
        """Marks this collector as alive, then waits a limited time for news."""
        client = self._client
        await client.run("SET", client.key("alive", self._me), 1, "PX", _ALIVE_MS)
        for _ in range(_POLLS):
            news = await client.run("GET", client.key("news"))
            if news != self._news:
                before, self._moves = self._moves, await redis_logs.moves(client)
                self._news = news
                return [name for name, n in self._moves.items() if n != before.get(name, 0)]
            await asyncio.sleep(_POLL_S)
        return []

    async def lost(self) -> str:
        """Never returns: an unreachable Redis may come back."""
        await asyncio.Event().wait()
        return ""

    async def create_consumer(
        self, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
    ) -> None:
        """Creates a consumer."""
        await redis_consumers.create(self._client, consumer, start, now_ms)

    async def update_consumer(self, changes: pb.Consumer, now_ms: int) -> Updated:
        """Changes the settings of a consumer."""
        done = await redis_consumers.update(self._client, changes, now_ms)
        if done.moved:
            await self._tell_moved(changes.name)
        return done

    async def delete_consumer(self, consumer: str) -> bool:
        """Deletes a consumer."""
        return await redis_consumers.delete(self._client, consumer)

    async def consumer(self, name: str) -> pb.Consumer:
        """Returns a consumer."""
        return await redis_consumers.read(self._client, name)

    async def consumers(self, page_size: int, page_token: str) -> tuple[list[pb.Consumer], str]:
        """Returns consumers ordered by name."""
        return await redis_consumers.read_page(self._client, page_size, page_token)

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:  # noqa: ARG002
        """Returns units nobody holds: first those of dead or stalled collectors, then new ones."""
        log = await self._log_of(consumer)
        entries = await redis_logs.take_over(self._client, consumer, log, self._me, limit)
        fresh = limit - len(entries)
        if fresh:
            entries += await redis_logs.read_new(self._client, consumer, log, self._me, fresh)
        units: list[Unit] = []
        over: list[Command] = []
        read = [redis_logs.unit_of(at, values) for at, values in entries]
        settled_key = self._client.key("settled", consumer)
        scores = await self._client.run_all(
            [("ZSCORE", settled_key, unit.unit_id) for unit in read]
        )
        for (at, _), unit, settled in zip(entries, read, scores, strict=True):
            if settled is not None:  # under another policy, or as its owner died
                over.append(("XACK", self._client.key("log", log), consumer, at))
            else:
                units.append(unit)
        await self._client.run_all(over)
        return Page(sorted(units), 0, len(entries) == limit)

    async def release(self, consumer: str) -> None:
        """Releases fetched units to the next collector that fetches."""
        try:
            log = await self._log_of(consumer)
        except ConsumerUnknownError:
            return
        await redis_logs.claim(self._client, consumer, log, self._me, _FREE, 2**20)

    async def load(
        self, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
    ) -> list[Loaded | None]:
        """Loads units, and counts attempts for those the filter does not drop."""
        return await redis_loads.load(self._client, consumer, units, judge, now_ms)

    async def settle(
        self, consumer: str, settlements: Sequence[Settlement], now_ms: int
    ) -> list[str]:
        """Settles units."""
        log, owner = await self._log_of(consumer), own_log(consumer)
        calls: list[Script] = []
        for one in settlements:
            arguments: list[Value] = [consumer, log, one.unit_id, int(one.reason)]
            if one.reason:
                arguments += redis_ingest.listed(owner, one.entry(now_ms))
            calls.append(Script(scripts.SETTLE, now_ms, arguments))
        answers = await self._client.run_at_once(calls)
        return [one.unit_id for one, changed in zip(settlements, answers, strict=True) if changed]

    async def seek(self, consumer: str, position: pb.Position) -> Sought:
        """Moves a consumer; units it had settled at or after the position are redelivered."""
        sought = await redis_consumers.seek(self._client, consumer, position)
        await self._tell_moved(consumer)
        return sought

    async def touch(self, consumers: Sequence[str], now_ms: int) -> None:
        """Records that consumers have streams now."""
        await redis_consumers.touch(self._client, consumers, now_ms)

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Deletes the consumers that have had no stream since."""
        return await redis_consumers.expire(self._client, before_ms)

    async def standing(self, consumer: str) -> Standing:
        """Counts the units of a consumer."""
        return await redis_consumers.standing(self._client, consumer)

    async def filtered(
        self, consumer: str, page_size: int, page_token: str
    ) -> tuple[list[pb.FilteredEntry], str]:
        """Returns the entries filtered for a consumer."""
        after = read_token(page_token)
        return await redis_consumers.filtered(self._client, consumer, page_size, after)

    async def open_groups(self, page_size: int, page_token: str) -> tuple[list[pb.OpenGroup], str]:
        """Returns groups waiting for samples."""
        client, groups = self._client, []
        found = await client.run(
            "ZRANGEBYSCORE",
            client.key("groups", "open"),
            f"({read_token(page_token)}",
            "+inf",
            *("WITHSCORES", "LIMIT", 0, page_size),
        )
        rows = redis_logs.scored(found)
        for key, _ in rows:
            size, first_ms = await client.run("HMGET", client.key("group", key), "size", "first_ms")
            samples: set[bytes] = set()
            for session_id in await client.run("ZRANGE", client.key("all", key), 0, -1):
                samples.add(
                    await client.run("HGET", client.key("session", text(session_id)), "idx")
                )
            groups.append(
                pb.OpenGroup(
                    group_id=key,
                    group_size=int(size),
                    samples=len(samples),
                    first_unix_ms=int(first_ms),
                )
            )
        return groups, str(rows[-1][1]) if len(rows) == page_size else ""

    async def session(self, session_id: str, *, arrays: bool) -> session_pb2.SessionRecord:
        """Returns one session."""
        head, packed = await self._client.run(
            "HMGET",
            self._client.key("session", session_id),
            "head",
            "arrays" if arrays else "none",
        )
        if head is None:
            raise session_unknown(session_id)
        record = read_head(session_id, head)
        return join(record, packed or b"") if arrays else record

    async def sessions_after(self, cursor: int, limit: int) -> list[tuple[int, str]]:
        """Returns sessions in order of arrival."""
        found = await self._client.run(
            "ZRANGEBYSCORE",
            self._client.key("sessions"),
            f"({cursor}",
            "+inf",
            *("WITHSCORES", "LIMIT", 0, limit),
        )
        return [(n, session_id) for session_id, n in redis_logs.scored(found)]

    async def counts(self) -> Counts:
        """Returns totals of what is stored."""
        client = self._client
        totals = pairs(await client.run("HGETALL", client.key("totals")))
        return Counts(
            sessions=int(totals.get("sessions", 0)),
            trajectories=int(totals.get("trajectories", 0)),
            complete_groups=int(totals.get(f"log:{GROUP_LOG}", 0)),
            open_groups=await client.run("ZCARD", client.key("groups", "open")),
            waiting_for_rewards=await client.run("ZCARD", client.key("due")),
            reward_timeouts=int(totals.get("reward_timeouts", 0)),
            stored_bytes=int(totals.get("bytes", 0)),
            removed_sessions=int(totals.get("removed_sessions", 0)),
        )

    async def retain(self, now_ms: int) -> int:
        """Removes sessions that every consumer has settled, and expired records, in parts."""
        self._retained_to, removed = await redis_retention.retain(
            self._client, self._retained_to, now_ms, self._retention
        )
        return removed

    async def _tell_moved(self, consumer: str) -> None:
        """Makes the other collectors end the streams of a consumer."""
        client = self._client
        moves = int(await client.run("HINCRBY", client.key("moves"), consumer, 1))
        if moves == self._moves.get(consumer, 0) + 1:  # else another move is still unseen
            self._moves[consumer] = moves
        await client.run("INCR", client.key("news"))

    async def _log_of(self, consumer: str) -> str:
        return log_of(await redis_consumers.read(self._client, consumer))


async def open_store(client: RedisClient, retention: Retention) -> RedisStore:
    """Opens the store in a Redis; an empty one gets the version of this release.

    Raises:
        StoreError: The store was written by another version; nothing in it has changed.
    """
    script = Script(scripts.OPEN, 0, [scripts.VERSION])
    (found,) = await client.run_at_once([script])
    if int(found) != scripts.VERSION:
        raise StoreError(
            f"redis: holds a store of version {text(found)}, this release needs {scripts.VERSION}; "
            "drain it with the release that wrote it, or give another database, as in "
            "redis://host:port/1"
        )
    return RedisStore(client, retention, await redis_logs.moves(client))
