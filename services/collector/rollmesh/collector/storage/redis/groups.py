"""Turns groups in Redis into units: any number of groups and logs in a fixed number of round trips.

The state of the groups is read together with the writes that change it; `decide` decides about
them, and a script creates the units. If several collectors decide about the same group, the first
one creates its unit with all entries, and the others find it created.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery.groups import NewUnit, Sample, form_unit
from rollmesh.collector.delivery.units import GroupLog, group_logs
from rollmesh.collector.storage.redis import scripts
from rollmesh.collector.storage.redis.client import Command, RedisClient, Script, Value, text
from rollmesh.collector.storage.store import read_consumer
from rollmesh.v1 import collector_pb2 as pb


class Pair(NamedTuple):
    """A group and a log."""

    log: GroupLog
    key: str
    seq: int | None = None
    """The position of the unit if the log has none after it; None: at the end."""
    skipped: bool = False
    """Whether the consumer of the log begins after it, so that it is created as settled."""


class Group(NamedTuple):
    """The stored state of a group."""

    size: int
    first_ms: int
    session_ids: list[str]
    """Its sessions that are ready, in order of arrival."""


class Seen(NamedTuple):
    """Logs and groups at one point in time."""

    logs: list[GroupLog]
    """The shared log is first."""
    groups: dict[str, Group]
    """The groups that exist, by key."""


class Decided(NamedTuple):
    """The outcome for a group in a log."""

    known: bool
    """Whether it was already a unit."""
    call: Script | None
    """The call that creates the unit; None if it exists or the group keeps waiting."""


def looks(client: RedisClient, keys: Sequence[str]) -> list[Command]:
    """Returns the commands whose replies `seen` parses into logs and groups."""
    asked: list[Command] = [("HGETALL", client.key("consumers"))]
    for key in keys:
        asked += [
            ("HMGET", client.key("group", key), "size", "first_ms"),
            ("ZRANGE", client.key("members", key), 0, -1),
        ]
    return asked


def seen(found: Sequence[Any], keys: Sequence[str]) -> Seen:
    """Parses the replies to the commands of `looks`."""
    consumers, *rest = found
    groups: dict[str, Group] = {}
    for key, (size, first_ms), ids in zip(keys, rest[::2], rest[1::2], strict=True):
        if size is not None:
            groups[key] = Group(int(size), int(first_ms), list(map(text, ids)))
    return Seen(group_logs(consumers_of(consumers)), groups)


def consumers_of(found: Sequence[Any]) -> list[pb.Consumer | None]:
    """Returns all consumers from the Redis hash; None for a damaged one."""
    rows = zip(found[::2], found[1::2], strict=True)
    return [read_consumer(text(name), data) for name, data in rows]


async def decide_all(
    client: RedisClient,
    pairs: Sequence[Pair],
    groups: Mapping[str, Group],
    now_ms: int,
) -> list[Decided]:
    """Decides about groups in one round trip; the returned calls create their units.

    Args:
        client: Redis.
        pairs: The groups to decide about, with their logs; all are in `groups`.
        groups: The state of the groups, by key.
        now_ms: The current time.
    """
    judged = any(pair.log.judges for pair in pairs)
    field = "head" if judged else "none"
    ids = list(dict.fromkeys(id_ for pair in pairs for id_ in groups[pair.key].session_ids))
    asked = [("ZSCORE", client.key("units", pair.log.name), pair.key) for pair in pairs]
    found = await client.run_all(
        [*asked, *(("HMGET", client.key("session", id_), "idx", field) for id_ in ids)]
    )
    rows = dict(zip(ids, found[len(pairs) :], strict=True))
    decided: list[Decided] = []
    for pair, seq in zip(pairs, found, strict=False):
        call = None if seq is not None else _unit(pair, groups[pair.key], rows, now_ms)
        decided.append(Decided(seq is not None, call))
    return decided


def _unit(pair: Pair, group: Group, rows: Mapping[str, Any], now_ms: int) -> Script | None:
    """Returns the call that makes a group a unit of a log; None if it keeps waiting."""
    samples: list[Sample] = []
    for session_id in group.session_ids:
        index, head = rows[session_id]
        if index is None:  # removed in the meantime, with its group
            return None
        samples.append(Sample(session_id, int(index), head))
    unit = form_unit(pair.log, pair.key, group.size, samples, (group.first_ms, now_ms))
    if unit is None:
        return None
    settled = unit.dropped or pair.skipped
    entries = _entries(pair.key, unit)
    arguments: list[Value] = [
        pair.log.name,
        pair.key,
        json.dumps(unit.members),
        "partial" if unit.partial else "",
        pair.log.consumer.name if settled else "",
        "" if pair.seq is None else pair.seq,
        len(entries) // 3,
        *entries,
        *pair.log.readers,
    ]
    return Script(scripts.MAKE_UNIT, now_ms, arguments)


def _entries(key: str, unit: NewUnit) -> list[Value]:
    """Returns entries in the form the script expects: unique name, serialized entry, reason."""
    listed: list[Value] = []
    for entry in unit.entries:
        once = f"surplus {entry.session_id}" if entry.session_id else f"drop {key}"
        listed += [once, entry.SerializeToString(), int(entry.reason)]
    return listed
