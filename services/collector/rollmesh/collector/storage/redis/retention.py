"""Removes from Redis the groups of sessions that every consumer has settled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery.retention import REMEMBERED_MS, Retention, is_over
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, log_of, units_in
from rollmesh.collector.storage.redis import scripts
from rollmesh.collector.storage.redis.client import Command, RedisClient, Script, text
from rollmesh.collector.storage.redis.groups import consumers_of
from rollmesh.collector.storage.redis.logs import scored, start_of
from rollmesh.v1 import collector_pb2 as pb

_BATCH = 500
_REMOVED = 64
"""Groups removed in one call; other commands wait for it."""


class _Group(NamedTuple):
    """A stored group."""

    key: str
    session_ids: list[str]
    ready: bool
    """Whether all its sessions have been added to the logs."""
    grouped: bool
    """Whether its sessions form a group; superseded sessions do not."""

    def units(self, log: str) -> list[str]:
        """Returns the ids of the group's units in a log."""
        return units_in(log, self.key, self.session_ids, grouped=self.grouped)


async def retain(
    client: RedisClient, cursor: int, now_ms: int, retention: Retention
) -> tuple[int, int]:
    """Examines the next sessions, oldest first, and removes those that are no longer needed.

    Returns:
        The cursor for the next call, 0 to start over, and the number of sessions removed.
    """
    used = int(await client.run("HGET", client.key("totals"), "bytes") or 0)
    settled_before = retention.settled_before(used, now_ms)
    rows = scored(
        await client.run(
            "ZRANGEBYSCORE",
            client.key("sessions"),
            f"({cursor}",
            "+inf",
            *("WITHSCORES", "LIMIT", 0, _BATCH),
        )
    )
    known = consumers_of(await client.run("HGETALL", client.key("consumers")))
    consumers = [consumer for consumer in known if consumer is not None]
    if len(consumers) < len(known):
        return 0, 0  # a consumer with damaged settings may still need anything
    asked = [("HGET", client.key("session", session_id), "key") for session_id, _ in rows]
    keys = dict.fromkeys(text(key) for key in await client.run_all(asked) if key is not None)
    removed = 0
    if consumers:
        over = await _over(client, consumers, list(keys), settled_before)
        for at in range(0, len(over), _REMOVED):
            removed += await _remove(client, consumers, over[at : at + _REMOVED], now_ms)
    await client.run("ZREMRANGEBYSCORE", client.key("removed"), "-inf", now_ms - REMEMBERED_MS)
    return (rows[-1][1] if len(rows) == _BATCH else 0), removed


async def _over(
    client: RedisClient, consumers: Sequence[pb.Consumer], keys: Sequence[str], before_ms: int
) -> list[_Group]:
    """Returns the groups that every consumer has settled completely, and long enough ago."""
    groups = [group for group in await _groups(client, keys) if group.ready]
    starts = [await start_of(client, consumer.name) for consumer in consumers]
    asked: list[Command] = []
    for group in groups:
        for consumer in consumers:
            log, settled_ms = log_of(consumer), client.key("settled_ms", consumer.name)
            for unit_id in group.units(log):
                asked += [
                    ("ZSCORE", client.key("units", log), unit_id),
                    ("HGET", settled_ms, unit_id),
                ]
    found = iter(await client.run_all(asked))
    over: list[_Group] = []
    for group in groups:
        gone = [
            is_over(_number(next(found)), _number(next(found)), start, before_ms)
            for consumer, start in zip(consumers, starts, strict=True)
            for _ in group.units(log_of(consumer))
        ]
        if all(gone):
            over.append(group)
    return over


def _number(found: Any) -> int | None:
    return None if found is None else int(float(found))


async def _groups(client: RedisClient, keys: Sequence[str]) -> list[_Group]:
    asked: list[Command] = []
    for key in keys:
        asked += [
            ("ZRANGE", client.key("all", key), 0, -1),
            ("ZCARD", client.key("members", key)),
            ("EXISTS", client.key("group", key)),
        ]
    found = await client.run_all(asked)
    return [
        _Group(key, list(map(text, ids)), ready == len(ids), bool(grouped))
        for key, ids, ready, grouped in zip(keys, found[::3], found[1::3], found[2::3], strict=True)
    ]


async def _remove(
    client: RedisClient,
    consumers: Sequence[pb.Consumer],
    groups: Sequence[_Group],
    now_ms: int,
) -> int:
    """Removes groups and their entries in the logs; returns the number of sessions removed."""
    names = [consumer.name for consumer in consumers]
    logs = {GROUP_LOG, *map(log_of, consumers)} - {SESSION_LOG}
    removals = [
        Script(scripts.REMOVE, now_ms, [group.key, len(group.session_ids)]) for group in groups
    ]
    removed = await client.run_at_once(removals)
    gone = [group for group, count in zip(groups, removed, strict=True) if count]
    units = [(SESSION_LOG, id_) for group in gone for id_ in group.session_ids]
    units += [(log, group.key) for group in gone for log in logs]
    await client.run_at_once(
        [Script(scripts.FORGET_UNIT, now_ms, [*unit, *names]) for unit in units]
    )
    return sum(removed)
