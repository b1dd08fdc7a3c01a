"""Groups in Redis as they become units: many groups and logs with a constant number of trips.

What is known of groups is read beside what changes them; `decide` says what becomes of them, and a
script makes the units. Of several collectors that decide about a group the first one makes its
unit, with all that is said of it; the others find it made.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery.groups import NewUnit, Sample, form_unit
from rollmesh.collector.delivery.units import GroupLog, group_logs
from rollmesh.collector.storage.redis import scripts
from rollmesh.collector.storage.redis.client import Command, RedisClient, Script, Value, text
from rollmesh.collector.storage.store import read_hello
from rollmesh.v1 import collector_pb2 as pb


class Pair(NamedTuple):
    """A group in a log."""

    log: GroupLog
    key: str


class Group(NamedTuple):
    """What is known of a group."""

    size: int
    first_ms: int
    session_ids: list[str]
    """Its ready sessions, in order of arrival."""


class Seen(NamedTuple):
    """Logs and groups as they were at one time."""

    logs: list[GroupLog]
    """The shared one is first."""
    groups: dict[str, Group]
    """By key: those that there are."""


class Decided(NamedTuple):
    """What came of a group in a log."""

    whole: bool
    """Whether it was a unit before."""
    call: Script | None
    """What makes it a unit; None: it is one, or waits."""


def looks(client: RedisClient, keys: Sequence[str]) -> list[Command]:
    """Returns the commands by which `seen` knows logs and groups."""
    asked: list[Command] = [("HGETALL", client.key("consumers"))]
    for key in keys:
        asked += [
            ("HMGET", client.key("group", key), "size", "first_ms"),
            ("ZRANGE", client.key("members", key), 0, -1),
        ]
    return asked


def seen(found: Sequence[Any], keys: Sequence[str]) -> Seen:
    """Reads the answers to `looks`."""
    hellos, *rest = found
    groups: dict[str, Group] = {}
    for key, (size, first_ms), ids in zip(keys, rest[::2], rest[1::2], strict=True):
        if size is not None:
            groups[key] = Group(int(size), int(first_ms), list(map(text, ids)))
    return Seen(group_logs(hellos_of(hellos)), groups)


def hellos_of(found: Sequence[Any]) -> list[pb.SubscribeHello | None]:
    """Returns the hellos of all consumers, as Redis gives that hash; None for a damaged one."""
    rows = zip(found[::2], found[1::2], strict=True)
    return [read_hello(text(name), data) for name, data in rows]


async def decide_all(
    client: RedisClient,
    pairs: Sequence[Pair],
    groups: Mapping[str, Group],
    now_ms: int,
    settled: Mapping[str, str] | None = None,
) -> list[Decided]:
    """Decides about groups, with one trip: the calls that are returned make them units.

    Args:
        client: Redis.
        pairs: What is decided about; the groups are in `groups`.
        groups: What is known of them.
        now_ms: The time.
        settled: By group: the consumer by whom its unit is settled as it is made.
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
        call = None
        if seq is None:
            owner = (settled or {}).get(pair.key, "")
            call = _unit(pair, groups[pair.key], rows, now_ms, owner)
        decided.append(Decided(seq is not None, call))
    return decided


def _unit(
    pair: Pair, group: Group, rows: Mapping[str, Any], now_ms: int, settled_by: str
) -> Script | None:
    """Returns the call that makes a group a unit of a log; None where it waits."""
    samples: list[Sample] = []
    for session_id in group.session_ids:
        index, head = rows[session_id]
        if index is None:  # removed since, with the group
            return None
        samples.append(Sample(session_id, int(index), head))
    unit = form_unit(pair.log, pair.key, group.size, samples, (group.first_ms, now_ms))
    if unit is None:
        return None
    settled_by = pair.log.hello.consumer if unit.dropped else settled_by
    entries = _entries(pair.key, unit)
    arguments: list[Value] = [
        pair.log.name,
        pair.key,
        json.dumps(unit.members),
        "partial" if unit.partial else "",
        settled_by,
        len(entries) // 3,
        *entries,
        *pair.log.readers,
    ]
    return Script(scripts.MAKE_UNIT, now_ms, arguments)


def _entries(key: str, unit: NewUnit) -> list[Value]:
    """Returns entries as the script lists them: the name that each has once, itself, its reason."""
    listed: list[Value] = []
    for entry in unit.entries:
        once = f"surplus {entry.session_id}" if entry.session_id else f"drop {key}"
        listed += [once, entry.SerializeToString(), int(entry.reason)]
    return listed
