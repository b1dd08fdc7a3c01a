"""What leaves Redis: groups of sessions that every consumer has settled."""

from collections.abc import Sequence

from rollmesh.collector import redis_scripts as scripts
from rollmesh.collector.redis_client import RedisClient, Script, text
from rollmesh.collector.redis_logs import scored, start_of
from rollmesh.collector.store import GROUP_LOG, SESSION_LOG, Retention, log_of
from rollmesh.v1 import collector_pb2 as pb

_BATCH = 500
_REMEMBERED_MS = 30 * 24 * 3600 * 1000


async def retain(
    client: RedisClient, cursor: int, now_ms: int, retention: Retention
) -> tuple[int, int]:
    """Looks at the next sessions, the oldest first; removes what may go.

    Returns:
        Where to go on, 0 to begin anew, and how many sessions were removed.
    """
    used = int(await client.run("HGET", client.key("totals"), "bytes") or 0)
    full = used > retention.near_full * retention.max_bytes
    settled_before = now_ms if full else now_ms - retention.settled_ms
    rows = scored(
        await client.run(
            "ZRANGEBYSCORE",
            client.key("sessions"),
            f"({cursor}",
            "+inf",
            *("WITHSCORES", "LIMIT", 0, _BATCH),
        )
    )
    found = await client.run("HVALS", client.key("consumers"))
    hellos, removed = [pb.SubscribeHello.FromString(data) for data in found], 0
    keys = [
        await client.run("HGET", client.key("session", session_id), "key") for session_id, _ in rows
    ]
    for key in dict.fromkeys(text(key) for key in keys if key is not None):
        if hellos and await _is_over(client, hellos, key, settled_before):
            removed += await _remove(client, hellos, key, now_ms)
    await client.run("ZREMRANGEBYSCORE", client.key("removed"), "-inf", now_ms - _REMEMBERED_MS)
    return (rows[-1][1] if len(rows) == _BATCH else 0), removed


async def _is_over(
    client: RedisClient, hellos: Sequence[pb.SubscribeHello], key: str, settled_before: int
) -> bool:
    """Says whether every consumer has settled all of a group, long enough ago."""
    ids = [text(id_) for id_ in await client.run("ZRANGE", client.key("all", key), 0, -1)]
    ready = await client.run("ZCARD", client.key("members", key))
    grouped = await client.run("EXISTS", client.key("group", key))
    if ready != len(ids):
        return False
    for hello in hellos:
        log, name = log_of(hello), hello.consumer
        start = await start_of(client, name)
        for unit_id in ids if log == SESSION_LOG else ([key] if grouped else []):
            seq = await client.run("ZSCORE", client.key("units", log), unit_id)
            settled_ms = await client.run("HGET", client.key("settled_ms", name), unit_id)
            over = (
                seq is not None and int(float(seq)) <= start
                if settled_ms is None
                else int(settled_ms) <= settled_before
            )
            if not over:
                return False
    return True


async def _remove(
    client: RedisClient, hellos: Sequence[pb.SubscribeHello], key: str, now_ms: int
) -> int:
    names = [hello.consumer for hello in hellos]
    ids = [text(id_) for id_ in await client.run("ZRANGE", client.key("all", key), 0, -1)]
    logs = {GROUP_LOG, *map(log_of, hellos)} - {SESSION_LOG}
    forgotten = [(SESSION_LOG, session_id) for session_id in ids] + [(log, key) for log in logs]
    removed, *_ = await client.run_at_once(
        [
            Script(scripts.REMOVE, now_ms, [key]),
            *(Script(scripts.FORGET_UNIT, now_ms, [*unit, *names]) for unit in forgotten),
        ]
    )
    return int(removed)
