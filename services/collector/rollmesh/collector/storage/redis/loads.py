"""Loads units from Redis for delivery: several units in two round trips.

A third round trip lists what the filter removed from them.
"""

from collections.abc import Sequence

from rollmesh.collector.delivery.loads import Judge, Loaded, judge_unit
from rollmesh.collector.delivery.units import Unit, own_log
from rollmesh.collector.storage.redis.client import RedisClient
from rollmesh.collector.storage.redis.ingest import add_filtered
from rollmesh.collector.storage.store import LOAD_BYTES


async def load(
    client: RedisClient, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
) -> list[Loaded | None]:
    """Loads and counts attempts for the first of the units, up to `LOAD_BYTES`."""
    loaded = await _judge(client, units, judge)
    out = [one for one in loaded if one and one.verdict.delivers]
    key = client.key("attempts", consumer)
    ids = [session_id for one in out for session_id in one.unit.session_ids]
    found = await client.run_all(
        [
            *(("HINCRBY", key, one.unit.unit_id, 1) for one in out),
            *(("HGET", client.key("session", session_id), "arrays") for session_id in ids),
        ]
    )
    arrays = iter(found[len(out) :])
    for one, attempt in zip(out, found, strict=False):
        one.attempt = int(attempt)
        one.arrays = [next(arrays) or b"" for _ in one.heads]
    entries = [entry for one in out if (entry := one.removed(now_ms))]
    await add_filtered(client, own_log(consumer), entries)
    return loaded


async def _judge(client: RedisClient, units: Sequence[Unit], judge: Judge) -> list[Loaded | None]:
    ids = [session_id for unit in units for session_id in unit.session_ids]
    keys = [client.key("session", session_id) for session_id in ids]
    asked = [("HGET", key, "head") for key in keys]
    asked += [("HSTRLEN", key, "arrays") for key in keys]
    found = await client.run_all(asked)
    stored = iter(zip(found[: len(keys)], found[len(keys) :], strict=True))
    judged: list[Loaded | None] = []
    size = 0
    for unit in units:
        rows = [next(stored) for _ in unit.session_ids]
        judged.append(judge_unit(unit, [head for head, _ in rows], judge))
        size += sum(length for _, length in rows)
        if size >= LOAD_BYTES:
            break
    return judged
