"""Groups in Redis as they become units: many groups and logs with a constant number of trips.

What is known of groups is read beside what changes them; `decide` says what becomes of them, and a
script makes the units. Of several collectors that decide about a group the first one makes its
unit, with all that is said of it; the others find it made.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery import filters
from rollmesh.collector.delivery.groups import Decision, Member, State, decide
from rollmesh.collector.delivery.records import read_head
from rollmesh.collector.storage.redis import scripts
from rollmesh.collector.storage.redis.client import Command, RedisClient, Script, Value, text
from rollmesh.collector.storage.store import GROUP, GROUP_LOG, log_of, read_hello
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb

_DEFAULT = pb.SubscribeHello(unit=pb.DELIVERY_UNIT_GROUP)


class Log(NamedTuple):
    """A log of groups, the options by which it is made, and who reads it."""

    name: str
    hello: pb.SubscribeHello
    readers: tuple[str, ...]


class Pair(NamedTuple):
    """A group in a log."""

    log: Log
    key: str


class Group(NamedTuple):
    """What is known of a group."""

    size: int
    first_ms: int
    session_ids: list[str]
    """Its ready sessions, in order of arrival."""


class Seen(NamedTuple):
    """Logs and groups as they were at one time."""

    logs: list[Log]
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
    return Seen(logs_of(hellos), groups)


def hellos_of(found: Sequence[Any]) -> list[pb.SubscribeHello | None]:
    """Returns the hellos of all consumers, as Redis gives that hash; None for a damaged one."""
    rows = zip(found[::2], found[1::2], strict=True)
    return [read_hello(text(name), data) for name, data in rows]


def logs_of(found: Sequence[Any]) -> list[Log]:
    """Returns the logs of groups, by the hash of consumers; the shared one is first."""
    logs: list[Log] = []
    shared: list[str] = []
    for hello in hellos_of(found):
        if hello is None:
            continue
        log = log_of(hello)
        if log == GROUP_LOG:
            shared.append(hello.consumer)
        elif hello.unit == GROUP:
            logs.append(Log(log, hello, (hello.consumer,)))
    return [Log(GROUP_LOG, _DEFAULT, tuple(shared)), *logs]


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
    judged = any(pair.log.hello.groups.HasField("samples") for pair in pairs)
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
    pair: Pair, group: Group, rows: Mapping[str, Any], now_ms: int, settled: str
) -> Script | None:
    """Returns the call that makes a group a unit of a log, or drops it; None where it waits."""
    hello, members = pair.log.hello, _members(pair.log, group.session_ids, rows)
    decision = decide(hello.groups, group.size, members, now_ms - group.first_ms)
    if decision.state is State.WAIT or not members:
        return None
    index = {member.session_id: member.sample_index for member in members}
    partial = len({index[id_] for id_ in decision.session_ids}) < group.size
    dropped = decision.state is State.DROP
    reason, said = _said(pair.key, decision, index, now_ms)
    arguments: list[Value] = [
        pair.log.name,
        pair.key,
        json.dumps(decision.session_ids),
        "partial" if partial else "",
        hello.consumer if dropped else settled,
        int(reason),
        len(said) // 2,
        *said,
        *pair.log.readers,
    ]
    return Script(scripts.MAKE_UNIT, now_ms, arguments)


def _members(log: Log, ids: Sequence[str], rows: Mapping[str, Any]) -> list[Member]:
    judged = log.hello.groups.HasField("samples")
    members: list[Member] = []
    for session_id in ids:
        index, head = rows[session_id]
        if index is None:  # removed since, with the group
            return []
        usable = not judged or _usable(log, session_id, head)
        members.append(Member(session_id, int(index), usable))
    return members


def _usable(log: Log, session_id: str, head: bytes) -> bool:
    try:
        return filters.usable(log.hello.filter, read_head(session_id, head))
    except SessionDamagedError:
        return False


def _said(
    key: str, decision: Decision, ids: Iterable[str], now_ms: int
) -> tuple[pb.FilterReason.ValueType, list[Value]]:
    """Returns what is listed of a group with its unit: by what name it is said once, and what."""
    if decision.state is State.DROP:
        reason = pb.FILTER_REASON_INCOMPLETE_GROUP
        entry = pb.FilteredEntry(delivery_id=key, reason=reason, unix_ms=now_ms)
        return reason, [f"drop {key}", entry.SerializeToString()]
    said: list[Value] = []
    for session_id in sorted(set(ids) - set(decision.session_ids)):
        said += [f"surplus {session_id}", surplus(key, session_id, now_ms)]
    return pb.FILTER_REASON_SURPLUS, said


def surplus(key: str, session_id: str, now_ms: int) -> bytes:
    """Returns the entry that a group goes out without a session."""
    return pb.FilteredEntry(
        delivery_id=key,
        reason=pb.FILTER_REASON_SURPLUS,
        unix_ms=now_ms,
        session_id=session_id,
    ).SerializeToString()
