"""Consumers in Redis: settings, positions and counts, as functions over a client."""

from collections.abc import Sequence

from rollmesh.collector.delivery.entries import filtered_counts, read_entry
from rollmesh.collector.delivery.settings import updated
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, log_of, own_log
from rollmesh.collector.storage.redis import ingest as redis_ingest, logs as redis_logs, scripts
from rollmesh.collector.storage.redis.client import RedisClient, Script, pairs, text
from rollmesh.collector.storage.redis.groups import consumers_of
from rollmesh.collector.storage.store import (
    Sought,
    Standing,
    Updated,
    consumer_exists,
    consumer_unknown,
    read_consumer,
)
from rollmesh.v1 import collector_pb2 as pb


async def create(
    client: RedisClient, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
) -> None:
    """Creates a consumer; a creation that broke off is completed by its repeat."""
    name = consumer.name
    data, made = await client.run_all(
        [
            ("HGET", client.key("consumers"), name),
            ("HGET", client.key("consumer", name), "groups"),
        ]
    )
    if data is not None and made is not None and read_consumer(name, data) is not None:
        raise consumer_exists(name)
    shared = SESSION_LOG if log_of(consumer) == SESSION_LOG else GROUP_LOG
    start_seq = await redis_logs.first_seq(client, shared, start) - 1 if start else 0
    arguments = (name, data or "", consumer.SerializeToString())
    write = Script(scripts.UPDATE, now_ms, arguments)
    changed, _ = await client.run_at_once([write, ("HSET", client.key("seen"), name, now_ms)])
    if not changed:  # another call created it in the meantime
        raise consumer_exists(name)
    if made is None:
        await client.run("HSET", client.key("consumer", name), "start", start_seq)
    await _decide_anew(client, consumer, now_ms)


async def update(client: RedisClient, changes: pb.Consumer, now_ms: int) -> Updated:
    """Changes the settings of a consumer; a change that broke off is completed by the next one."""
    name = changes.name
    while True:
        data, seen_ms, made = await client.run_all(
            [
                ("HGET", client.key("consumers"), name),
                ("HGET", client.key("seen"), name),
                ("HGET", client.key("consumer", name), "groups"),
            ]
        )
        if data is None or (stored := read_consumer(name, data)) is None:
            raise consumer_unknown(name)
        after = updated(stored, changes)
        if after == stored:
            break
        arguments = (name, data, after.SerializeToString())
        (changed,) = await client.run_at_once([Script(scripts.UPDATE, now_ms, arguments)])
        if changed:  # else another call changed the consumer in the meantime
            break
    moved = made != _policy(after)
    if moved:
        await _decide_anew(client, after, now_ms)
    after.seen_unix_ms = int(seen_ms or 0)
    return Updated(after, moved)


async def _decide_anew(client: RedisClient, consumer: pb.Consumer, now_ms: int) -> None:
    """Moves a consumer to the log of its group policy; settled units stay settled."""
    name, log = consumer.name, log_of(consumer)
    start = await redis_logs.start_of(client, name)
    await redis_logs.leave(client, name)
    await redis_logs.make_group(client, name, log, start)
    if log == own_log(name):
        await redis_ingest.backfill(client, consumer, start, now_ms)
    await redis_logs.renumber(client, name, log)
    # Written last, so that an interrupted call is completed by the next one.
    await client.run_all(
        [
            ("HSET", client.key("consumer", name), "groups", _policy(consumer)),
            ("INCR", client.key("news")),
        ]
    )


def _policy(consumer: pb.Consumer) -> bytes:
    return consumer.groups.SerializeToString(deterministic=True)


async def delete(client: RedisClient, name: str) -> bool:
    """Deletes a consumer and everything kept for it."""
    hashes = ("consumers", "moves", "seen")
    known, *_ = await client.run_all([("HDEL", client.key(kind), name) for kind in hashes])
    await redis_logs.leave(client, name)
    own = [client.key(kind, name) for kind in ("consumer", "settled", "settled_ms")]
    own += [client.key(kind, own_log(name)) for kind in ("filtered", "counts", "listed")]
    await client.run_all([("DEL", *own), ("INCR", client.key("news"))])
    return bool(known)


async def read(client: RedisClient, name: str) -> pb.Consumer:
    """Returns a consumer."""
    data, seen_ms = await client.run_all(
        [("HGET", client.key("consumers"), name), ("HGET", client.key("seen"), name)]
    )
    consumer = None if data is None else read_consumer(name, data)
    if consumer is None:
        raise consumer_unknown(name)
    consumer.seen_unix_ms = int(seen_ms or 0)
    return consumer


async def read_page(
    client: RedisClient, page_size: int, after: str
) -> tuple[list[pb.Consumer], str]:
    """Returns a page of consumers without damaged ones, and the token of the next page."""
    found, seen = await client.run_all(
        [("HGETALL", client.key("consumers")), ("HGETALL", client.key("seen"))]
    )
    seen_ms = pairs(seen)
    known = sorted(filter(None, consumers_of(found)), key=lambda consumer: consumer.name)
    left = [consumer for consumer in known if consumer.name > after]
    page = left[:page_size]
    for consumer in page:
        consumer.seen_unix_ms = int(seen_ms.get(consumer.name, 0))
    return page, page[-1].name if len(left) > page_size else ""


async def touch(client: RedisClient, names: Sequence[str], now_ms: int) -> None:
    """Records that consumers have streams now."""
    found = await client.run("HKEYS", client.key("consumers")) if names else []
    known = sorted(set(names) & set(map(text, found)))
    if known:
        words = (word for name in known for word in (name, now_ms))
        await client.run("HSET", client.key("seen"), *words)


async def expire(client: RedisClient, before_ms: int) -> list[str]:
    """Deletes the consumers that have had no stream since; returns their names."""
    seen = pairs(await client.run("HGETALL", client.key("seen")))
    names = sorted(name for name, at_ms in seen.items() if int(at_ms) < before_ms)
    return [name for name in names if await delete(client, name)]


async def seek(client: RedisClient, name: str, position: pb.Position) -> Sought:
    """Moves a consumer; units it had settled at or after the position are redelivered."""
    log, settled = log_of(await read(client, name)), client.key("settled", name)
    first = await redis_logs.first_seq(client, log, position)
    start = await redis_logs.start_of(client, name)
    again = await client.run("ZCOUNT", settled, first, "+inf")
    again += max(await redis_logs.open_between(client, name, log, first - 1, start + 1), 0)
    skipped = max(await redis_logs.open_between(client, name, log, start, first), 0)
    await redis_logs.unsettle(client, name, first)
    await client.run("DEL", client.key("attempts", name))
    await client.run("HSET", client.key("consumer", name), "start", first - 1)
    await redis_logs.unhold(client, name, log)
    stream_id = redis_logs.stream_id(first - 1)
    await client.run("XGROUP SETID", client.key("log", log), name, stream_id)
    return Sought(int(again), int(skipped))


async def standing(client: RedisClient, name: str) -> Standing:
    """Counts the units of a consumer."""
    log = log_of(await read(client, name))
    acknowledged = await client.run("HGET", client.key("consumer", name), "acknowledged")
    start = await redis_logs.start_of(client, name)
    left = await redis_logs.open_between(client, name, log, start, None)
    counts: dict[int, tuple[int, int]] = {}
    for owner in {own_log(name), log}:
        found = await client.run("HGETALL", client.key("counts", owner))
        for field, value in pairs(found).items():
            reason, _, what = field.partition(":")
            units, trajectories = counts.get(int(reason), (0, 0))
            added = int(value)
            counts[int(reason)] = (
                (units + added, trajectories) if what == "u" else (units, trajectories + added)
            )
    return Standing(int(acknowledged or 0), left, filtered_counts(counts))


async def filtered(
    client: RedisClient, name: str, page_size: int, after: int
) -> tuple[list[pb.FilteredEntry], str]:
    """Returns a page of entries filtered for a consumer, and the token of the next page."""
    found: list[tuple[int, pb.FilteredEntry]] = []
    begin = redis_logs.stream_id(after + 1)
    for owner in {own_log(name), log_of(await read(client, name))}:
        entries = await client.run(
            "XRANGE", client.key("filtered", owner), begin, "+", "COUNT", page_size
        )
        for at, values in entries:
            found.append((redis_logs.seq_of(at), read_entry("", values[1])))
    found = sorted(found, key=lambda pair: pair[0])[:page_size]
    token = str(found[-1][0]) if len(found) == page_size else ""
    return [entry for _, entry in found], token
