"""The Redis store: several collectors share the work of every consumer.

A consumer is a Redis consumer group on the stream of its log, and the collectors are its members. A
collector keeps the units it has read as long as it is alive; after that the others take them over.
"""

import asyncio
import uuid
from collections.abc import Sequence

from rollmesh.collector.delivery.entries import filtered_counts, read_entry
from rollmesh.collector.delivery.loads import Judge, Loaded
from rollmesh.collector.delivery.records import join, read_head
from rollmesh.collector.delivery.retention import Retention
from rollmesh.collector.delivery.units import (
    GROUP_LOG,
    SESSION_LOG,
    Arrival,
    Page,
    Settlement,
    Unit,
    log_of,
    own_log,
    owner_of,
)
from rollmesh.collector.storage.redis import (
    groups as redis_groups,
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
    consumer_unknown,
    other_unit,
    read_hello,
    read_token,
    session_unknown,
)
from rollmesh.runtime.errors import ConsumerUnknownError
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_ALIVE_MS = 10_000
_POLL_S = 0.1
_POLLS = 20
"""Polls after which waiting streams check again, because a collector may have died."""
_FREE = "free"
"""Owner of released units; never alive."""


class RedisStore:
    """A `Store` for collectors that share one Redis; the Protocol documents the methods."""

    def __init__(self, client: RedisClient, retention: Retention) -> None:
        """Takes a connected client."""
        self._client = client
        self._retention = retention
        self._me = uuid.uuid4().hex
        self._news = b""
        self._retained_to = 0
        self._moves: dict[str, int] = {}
        """By consumer: the number of seeks seen by this collector."""

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

    async def consumers(self) -> list[pb.SubscribeHello]:
        """Returns the last hello of every known consumer."""
        self._moves = await redis_logs.moves(self._client)
        found = await self._client.run("HGETALL", self._client.key("consumers"))
        hellos = [hello for hello in redis_groups.hellos_of(found) if hello is not None]
        return sorted(hellos, key=lambda hello: hello.consumer)

    async def open_consumer(self, hello: pb.SubscribeHello, now_ms: int) -> None:
        """Registers a consumer; a changed group policy moves it to another log."""
        client, name, log = self._client, hello.consumer, log_of(hello)
        known = await client.run("HGET", client.key("consumers"), name)
        before = None if known is None else read_hello(name, known)
        if before is not None and before.unit != hello.unit:
            raise other_unit(name)
        if known is None:
            shared = GROUP_LOG if hello.unit == pb.DELIVERY_UNIT_GROUP else log
            wanted = hello.HasField("start")
            start = (
                await redis_logs.first_seq(self._client, shared, hello.start) - 1 if wanted else 0
            )
            await client.run("HSET", client.key("consumer", name), "start", start)
        else:
            start = await redis_logs.start_of(self._client, name)
        await client.run("HSET", client.key("seen"), name, now_ms)
        await client.run("HSET", client.key("consumers"), name, hello.SerializeToString())
        await redis_logs.make_group(self._client, name, log, start)
        made = await client.run("HGET", client.key("consumer", name), "groups")
        policy = hello.groups.SerializeToString(deterministic=True)
        if before is not None and made == policy:
            return
        if log == own_log(name):
            await redis_ingest.backfill(client, hello, start, now_ms)
        else:
            await redis_logs.leave_own_log(self._client, name)
        await redis_logs.renumber(self._client, name, log)
        # Written last, so that an interrupted call is repeated.
        await client.run("HSET", client.key("consumer", name), "groups", policy)

    async def fetch(self, consumer: str, after: int, limit: int) -> Page:  # noqa: ARG002
        """Returns units nobody holds: first those of dead or stalled collectors, then new ones."""
        log = log_of(await self._hello(consumer))
        entries = await redis_logs.take_over(self._client, consumer, log, self._me, limit)
        fresh = limit - len(entries)
        if fresh:
            found = await self._client.run(
                "XREADGROUP",
                *("GROUP", consumer, self._me, "COUNT", fresh),
                *("STREAMS", self._client.key("log", log), ">"),
            )
            entries += [entry for _, new in found or () for entry in new]
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
            log = log_of(await self._hello(consumer))
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
        log, owner = log_of(await self._hello(consumer)), owner_of(consumer)
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
        client, log = self._client, log_of(await self._hello(consumer))
        settled = client.key("settled", consumer)
        first, start = (
            await redis_logs.first_seq(self._client, log, position),
            await redis_logs.start_of(self._client, consumer),
        )
        again = await client.run("ZCOUNT", settled, first, "+inf")
        again += max(
            await redis_logs.open_between(self._client, consumer, log, first - 1, start + 1), 0
        )
        skipped = max(await redis_logs.open_between(self._client, consumer, log, start, first), 0)
        await redis_logs.unsettle(client, consumer, first)
        await client.run("DEL", client.key("attempts", consumer))
        await client.run("HSET", client.key("consumer", consumer), "start", first - 1)
        await redis_logs.unhold(self._client, consumer, log)
        await client.run(
            "XGROUP SETID", client.key("log", log), consumer, redis_logs.stream_id(first - 1)
        )
        moves = int(await client.run("HINCRBY", client.key("moves"), consumer, 1))
        if moves == self._moves.get(consumer, 0) + 1:  # else another seek is still unseen
            self._moves[consumer] = moves
        await client.run("INCR", client.key("news"))
        return Sought(int(again), int(skipped))

    async def drop_consumer(self, consumer: str) -> bool:
        """Drops a consumer and everything kept for it."""
        client = self._client
        known = await client.run("HDEL", client.key("consumers"), consumer)
        await client.run("HDEL", client.key("moves"), consumer)
        await client.run("HDEL", client.key("seen"), consumer)
        for log in (SESSION_LOG, GROUP_LOG):
            if await client.run("EXISTS", client.key("log", log)):
                await client.run("XGROUP DESTROY", client.key("log", log), consumer)
        await redis_logs.leave_own_log(self._client, consumer)
        names = ("consumer", "attempts", "settled", "settled_ms")
        await client.run("DEL", *(client.key(name, consumer) for name in names))
        for owner in (owner_of(consumer), own_log(consumer)):
            kinds = ("filtered", "counts", "listed")
            await client.run("DEL", *(client.key(kind, owner) for kind in kinds))
        return bool(known)

    async def touch(self, consumers: Sequence[str], now_ms: int) -> None:
        """Records that consumers have streams now."""
        client = self._client
        names = await client.run("HKEYS", client.key("consumers")) if consumers else []
        known = sorted(set(consumers) & set(map(text, names)))
        if known:
            pairs_ = (word for name in known for word in (name, now_ms))
            await client.run("HSET", client.key("seen"), *pairs_)

    async def expire_consumers(self, before_ms: int) -> list[str]:
        """Drops the consumers that have had no stream since."""
        seen = pairs(await self._client.run("HGETALL", self._client.key("seen")))
        names = sorted(name for name, at_ms in seen.items() if int(at_ms) < before_ms)
        return [name for name in names if await self.drop_consumer(name)]

    async def standing(self, consumer: str) -> Standing:
        """Returns the state of a consumer."""
        client, log = self._client, log_of(await self._hello(consumer))
        acknowledged = await client.run("HGET", client.key("consumer", consumer), "acknowledged")
        start = await redis_logs.start_of(self._client, consumer)
        left = await redis_logs.open_between(self._client, consumer, log, start, None)
        counts: dict[int, tuple[int, int]] = {}
        for owner in (owner_of(consumer), log):
            found = await client.run("HGETALL", client.key("counts", owner))
            for name, value in pairs(found).items():
                reason, _, what = name.partition(":")
                units, trajectories = counts.get(int(reason), (0, 0))
                added = int(value)
                counts[int(reason)] = (
                    (units + added, trajectories) if what == "u" else (units, trajectories + added)
                )
        seen_ms = int(await self._client.run("HGET", self._client.key("seen"), consumer) or 0)
        return Standing(int(acknowledged or 0), left, filtered_counts(counts), seen_ms)

    async def filtered(
        self, consumer: str, page_size: int, page_token: str
    ) -> tuple[list[pb.FilteredEntry], str]:
        """Returns the entries filtered for a consumer."""
        after = read_token(page_token)
        log = log_of(await self._hello(consumer))
        found: list[tuple[int, pb.FilteredEntry]] = []
        for owner in (owner_of(consumer), log):
            entries = await self._client.run(
                "XRANGE",
                self._client.key("filtered", owner),
                redis_logs.stream_id(after + 1),
                "+",
                "COUNT",
                page_size,
            )
            for at, values in entries:
                found.append((redis_logs.seq_of(at), read_entry("", values[1])))
        found = sorted(found, key=lambda pair: pair[0])[:page_size]
        token = str(found[-1][0]) if len(found) == page_size else ""
        return [entry for _, entry in found], token

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

    async def _hello(self, consumer: str) -> pb.SubscribeHello:
        data = await self._client.run("HGET", self._client.key("consumers"), consumer)
        if data is None:
            raise consumer_unknown(consumer)
        hello = read_hello(consumer, data)
        if hello is None:
            raise ConsumerUnknownError(
                f"consumer: the options of {consumer!r} are damaged; subscribe"
            )
        return hello
