"""Logs in Redis: positions, and which collector holds which units for a consumer."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, Unit, own_log
from rollmesh.collector.storage.redis.client import RedisClient, Value, pairs, text
from rollmesh.collector.storage.store import consumer_moved, unit_unknown
from rollmesh.runtime.errors import StoreError
from rollmesh.v1 import collector_pb2 as pb

_BATCH = 1000
"""Units per round trip."""


async def make_group(client: RedisClient, name: str, log: str, start: int) -> None:
    """Registers a consumer with a log, which is created if it is missing."""
    try:
        await client.run(
            "XGROUP CREATE", client.key("log", log), name, stream_id(start), "MKSTREAM"
        )
    except StoreError as error:
        if "BUSYGROUP" not in error.message:  # BUSYGROUP: another collector was first
            raise


async def leave(client: RedisClient, name: str) -> None:
    """Removes a consumer's own log, and what was delivered to it and not settled."""
    shared = [client.key("log", log) for log in (SESSION_LOG, GROUP_LOG)]
    found = await client.run_all([("EXISTS", key) for key in shared])
    own = [client.key(kind, own_log(name)) for kind in ("log", "units", "parts")]
    await client.run_all(
        [
            *(("XGROUP DESTROY", key, name) for key, is_ in zip(shared, found, strict=True) if is_),
            ("DEL", *own, client.key("attempts", name)),
        ]
    )


async def renumber(client: RedisClient, name: str, log: str) -> None:
    """Updates the positions of settled units to the log that the consumer now reads."""
    settled = client.key("settled", name)
    ids = list(map(text, await client.run("ZRANGE", settled, 0, -1)))
    for part in _parts(ids):
        asked = [("ZSCORE", client.key("units", log), unit_id) for unit_id in part]
        places: list[Value] = []
        for unit_id, seq in zip(part, await client.run_all(asked), strict=True):
            places += [-1 if seq is None else seq, unit_id]
        await client.run("ZADD", settled, *places)


async def unsettle(client: RedisClient, name: str, first: int) -> None:
    """Forgets which units at or after a position the consumer has settled."""
    settled = client.key("settled", name)
    ids = list(map(text, await client.run("ZRANGEBYSCORE", settled, first, "+inf")))
    for part in _parts(ids):
        await client.run("HDEL", client.key("settled_ms", name), *part)
    await client.run("ZREMRANGEBYSCORE", settled, first, "+inf")


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[at : at + _BATCH] for at in range(0, len(ids), _BATCH)]


async def open_between(
    client: RedisClient, consumer: str, log: str, after: int, before: int | None
) -> int:
    """Counts the units of a log between two positions that the consumer has not settled."""
    bounds = (f"({after}", "+inf" if before is None else f"({before}")
    units = await client.run("ZCOUNT", client.key("units", log), *bounds)
    settled = await client.run("ZCOUNT", client.key("settled", consumer), *bounds)
    return int(units - settled)


async def first_seq(client: RedisClient, log: str, position: pb.Position) -> int:
    """Returns the position of the first unit at or after `position`, which must be set."""
    if position.HasField("delivery_id"):
        seq = await client.run("ZSCORE", client.key("units", log), position.delivery_id)
        if seq is None:
            raise unit_unknown(position.delivery_id)
        return int(float(seq))
    if position.end == pb.LOG_END_EARLIEST:
        return 1
    last_ms = int(await client.run("GET", client.key("last_ms")) or 0)
    last_n = int(await client.run("GET", client.key("last_n")) or 0)
    end = last_ms * 1024 + last_n + 1
    return min(max(position.unix_ms * 1024, 1), end) if position.HasField("unix_ms") else end


async def take_over(client: RedisClient, consumer: str, log: str, me: str, limit: int) -> list[Any]:
    """Claims the units held by collectors that are no longer alive.

    Raises:
        ConsumerMovedError: The consumer left the log.
    """
    entries: list[Any] = []
    with _in_log(consumer):
        owners = await client.run("XINFO CONSUMERS", client.key("log", log), consumer)
    for owner in owners:
        fields = pairs(owner)
        name = fields["name"]
        if name == me or not int(fields["pending"]) or len(entries) >= limit:
            continue
        if not await client.run("EXISTS", client.key("alive", name)):
            entries += await claim(client, consumer, log, name, me, limit - len(entries))
    return entries


async def read_new(client: RedisClient, consumer: str, log: str, me: str, limit: int) -> list[Any]:
    """Returns units that were not fetched before.

    Raises:
        ConsumerMovedError: The consumer left the log.
    """
    with _in_log(consumer):
        found = await client.run(
            "XREADGROUP",
            *("GROUP", consumer, me, "COUNT", limit),
            *("STREAMS", client.key("log", log), ">"),
        )
    return [entry for _, new in found or () for entry in new]


@contextmanager
def _in_log(consumer: str) -> Iterator[None]:
    """Reports a consumer that another collector moves to another log, or deletes, as moved."""
    try:
        yield
    except StoreError as error:
        if "NOGROUP" not in error.message and "no such key" not in error.message:
            raise
        raise consumer_moved(consumer) from error


async def claim(
    client: RedisClient, consumer: str, log: str, owner: str, to: str, limit: int
) -> list[Any]:
    """Transfers units held by one collector to another; returns their entries."""
    key = client.key("log", log)
    pending = await client.run("XPENDING", key, consumer, "-", "+", limit, owner)
    ids = [one[0] for one in pending]
    if not ids:
        return []
    claimed = await client.run("XCLAIM", key, consumer, to, 0, *ids)
    return [entry for entry in claimed if entry and entry[1] is not None]


async def unhold(client: RedisClient, consumer: str, log: str) -> None:
    """Releases everything collectors hold for a consumer; the seek decides what is delivered."""
    key = client.key("log", log)
    while pending := await client.run("XPENDING", key, consumer, "-", "+", 1000):
        ids = [one[0] for one in pending]
        await client.run("XACK", key, consumer, *ids)


async def moves(client: RedisClient) -> dict[str, int]:
    """Returns how many times each consumer was moved."""
    found = pairs(await client.run("HGETALL", client.key("moves")))
    return {name: int(count) for name, count in found.items()}


async def start_of(client: RedisClient, consumer: str) -> int:
    """Returns the position up to which nothing is delivered."""
    found = await client.run("HGET", client.key("consumer", consumer), "start")
    return int(found or 0)


def stream_id(seq: int) -> str:
    """Returns a position as a Redis stream id."""
    return f"{seq // 1024}-{seq % 1024}"


def seq_of(at: Any) -> int:
    """Returns the position of a Redis stream id."""
    ms, _, n = text(at).partition("-")
    return int(ms) * 1024 + int(n)


def unit_of(at: Any, values: Any) -> Unit:
    """Returns the unit of a stream entry."""
    found = pairs(values)
    members = tuple(json.loads(found["members"]))
    return Unit(seq_of(at), found["id"], members, bool(found["partial"]))


def scored(found: Sequence[Any]) -> list[tuple[str, int]]:
    """Returns the members and scores of a sorted-set reply."""
    return [
        (text(name), int(float(score))) for name, score in zip(found[::2], found[1::2], strict=True)
    ]
