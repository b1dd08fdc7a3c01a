"""Sessions into Redis, and from there into the logs.

A session is stored by one script and then put into the logs by others, each of which may be run
again: whoever finds a session that is not `done` finishes it. An ingest that breaks off in between
was not acknowledged, and its repeat goes on from there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rollmesh.collector import filters, redis_scripts as scripts
from rollmesh.collector.groups import Member, State, decide
from rollmesh.collector.records import split
from rollmesh.collector.redis_client import RedisClient, Value, text
from rollmesh.collector.rewards import apply_rewards
from rollmesh.collector.store import (
    GROUP,
    GROUP_LOG,
    RETRY_MS,
    Arrival,
    counts_of,
    group_key_of,
    log_of,
    own_log,
)
from rollmesh.runtime.errors import InvalidFieldError, SessionUnknownError, StoreFullError
from rollmesh.v1 import collector_pb2 as pb, types_pb2

_DEFAULT = pb.SubscribeHello(unit=pb.DELIVERY_UNIT_GROUP)
_DUE_BATCH = 200


class _Log(NamedTuple):
    """A log of groups, the options by which it is made, and who reads it."""

    name: str
    hello: pb.SubscribeHello
    readers: tuple[str, ...]


async def ingest(
    client: RedisClient, arrivals: Sequence[Arrival], now_ms: int, max_bytes: int
) -> list[bool]:
    """Stores sessions; says of each whether it is a repeat."""
    deadlines: list[str | int] = []
    for log in await group_logs(client):
        if log.hello.groups.HasField("deadline_ms"):
            deadlines += [log.name, log.hello.groups.deadline_ms]
    calls = [[*_stored(one, now_ms), max_bytes, *deadlines] for one in arrivals]
    answers = list(map(text, await client.scripts(scripts.INGEST, now_ms, calls)))
    ready: dict[str, str] = {}
    for (record, _), answer, call in zip(arrivals, answers, calls, strict=True):
        if answer == "undone" or (answer == "new" and not call[6]):
            ready[record.session_id] = group_key_of(record)
    await _make_ready(client, ready, now_ms)
    for (record, _), answer in zip(arrivals, answers, strict=True):
        if answer == "full":
            raise StoreFullError("the collector's store is full", retry_delay_ms=RETRY_MS)
        if answer.startswith("size"):
            raise InvalidFieldError(
                "group_size",
                f"is {record.group_size}, and group {group_key_of(record)!r} has {answer[5:]}; "
                "give all its sessions one",
            )
    return [answer != "new" for answer in answers]


def _stored(arrival: Arrival, now_ms: int) -> list[Value]:
    """Returns what is stored of a session: arguments of the script, the time of its wait last."""
    record, due_ms = arrival.record, arrival.due_ms(now_ms)
    head, arrays = split(record)
    size = max(record.group_size, 1) if record.group_id else 1
    return [
        record.session_id,
        head,
        b"".join(arrays),
        group_key_of(record),
        record.sample_index,
        "" if record.superseded else size,
        "" if due_ms is None else due_ms,
        len(record.trajectories),
    ]


async def set_rewards(
    client: RedisClient,
    session_id: str,
    rewards: types_pb2.SessionRewards,
    request_id: str,
    now_ms: int,
) -> bool:
    """Gives a session rewards, and with them its place in the logs; says whether it is a repeat."""
    answer, key = "changed", None
    while answer == "changed":  # by another request, in between
        before, key = await client.run("HMGET", client.key("session", session_id), "head", "key")
        if before is None:
            raise SessionUnknownError(f"session_id: no session {session_id!r} is stored here")
        head = types_pb2.SessionRecord.FromString(before)
        known = await client.run("SISMEMBER", client.key("rewards", session_id), request_id)
        if not known:
            apply_rewards(head, rewards)
        answer = text(
            await client.script(
                scripts.REWARD, now_ms, session_id, head.SerializeToString(), request_id, before
            )
        )
    if await client.run("ZSCORE", client.key("due"), session_id) is not None:
        await _make_ready(client, {session_id: text(key)}, now_ms)
    return answer == "repeat"


async def tick(client: RedisClient, now_ms: int) -> bool:
    """Decides what waited for a time; says whether anything was due."""
    late = await client.run(
        "ZRANGEBYSCORE", client.key("due"), "-inf", now_ms, "LIMIT", 0, _DUE_BATCH
    )
    for session_id in map(text, late):
        key = await client.run("HGET", client.key("session", session_id), "key")
        if key is not None:
            await _make_ready(client, {session_id: text(key)}, now_ms, "reward_timeouts")
    due = await client.run(
        "ZRANGEBYSCORE", client.key("deadlines"), "-inf", now_ms, "LIMIT", 0, _DUE_BATCH
    )
    logs = {log.name: log for log in await group_logs(client)} if due else {}
    for entry in map(text, due):
        name, _, key = entry.partition("\0")
        log = logs.get(name)
        if log is None or not await client.run("EXISTS", client.key("group", key)):
            await client.run("ZREM", client.key("deadlines"), entry)
        elif not await _decide(client, log, key, now_ms):  # all its sessions wait for rewards
            await client.run("ZADD", client.key("deadlines"), now_ms + RETRY_MS, entry)
    return bool(late or due)


async def backfill(
    client: RedisClient, hello: pb.SubscribeHello, start_seq: int, now_ms: int
) -> None:
    """Makes the log of a consumer with a group policy of its own from what is stored."""
    log = _Log(own_log(hello.consumer), hello, (hello.consumer,))
    for key in map(text, await client.run("ZRANGE", client.key("groups"), 0, -1)):
        if await client.run("ZSCORE", client.key("units", log.name), key) is not None:
            continue
        if hello.groups.HasField("deadline_ms"):
            first_ms = int(await client.run("HGET", client.key("group", key), "first_ms"))
            due_ms = first_ms + hello.groups.deadline_ms
            await client.run("ZADD", client.key("deadlines"), due_ms, f"{log.name}\0{key}")
        seq = await client.run("ZSCORE", client.key("units", GROUP_LOG), key)
        if await _decide(client, log, key, now_ms) and seq and int(float(seq)) <= start_seq:
            own = await client.run("ZSCORE", client.key("units", log.name), key)
            await client.run("ZADD", client.key("settled", hello.consumer), own, key)
            await client.run("HSET", client.key("settled_ms", hello.consumer), key, now_ms)


async def group_logs(client: RedisClient) -> list[_Log]:
    """Returns the logs of groups; the shared one is first."""
    return _logs_of(await client.run("HVALS", client.key("consumers")))


def _logs_of(hellos: Iterable[bytes]) -> list[_Log]:
    logs: list[_Log] = []
    shared: list[str] = []
    for data in hellos:
        hello = pb.SubscribeHello.FromString(data)
        log = log_of(hello)
        if log == GROUP_LOG:
            shared.append(hello.consumer)
        elif hello.unit == GROUP:
            logs.append(_Log(log, hello, (hello.consumer,)))
    return [_Log(GROUP_LOG, _DEFAULT, tuple(shared)), *logs]


async def add_filtered(
    client: RedisClient, owner: str, entry: pb.FilteredEntry, once: str = ""
) -> None:
    """Lists and counts what was kept from a consumer.

    Args:
        client: Redis.
        owner: The consumer or log.
        entry: What.
        once: Where not empty: what is said of this is said once.
    """
    counts: list[str | int] = []
    for reason, (units, trajectories) in counts_of(entry).items():
        counts += [f"{reason}:u", units, f"{reason}:t", trajectories]
    await client.script(
        scripts.FILTERED, entry.unix_ms, owner, entry.SerializeToString(), once, *counts
    )


async def _make_ready(
    client: RedisClient, ready: Mapping[str, str], now_ms: int, counted: str = ""
) -> None:
    """Puts sessions into the logs, and groups where they are whole by it; may be repeated.

    Args:
        client: Redis.
        ready: The sessions, and the group of each.
        now_ms: The time.
        counted: Name of the sum that counts those that waited until now.
    """
    if not ready:
        return
    await client.scripts(scripts.READY, now_ms, list(ready.items()))
    groups: dict[str, list[str]] = {}
    for session_id, key in ready.items():
        groups.setdefault(key, []).append(session_id)
    asked: list[tuple[str, ...]] = [("HVALS", client.key("consumers"))]
    for key in groups:
        asked += [
            ("ZSCORE", client.key("removed"), f"g:{key}"),
            ("EXISTS", client.key("group", key)),
        ]
    hellos, *found = await client.run_all(asked)
    logs = _logs_of(hellos)
    for (key, ids), removed, grouped in zip(groups.items(), found[::2], found[1::2], strict=True):
        for log in logs if removed is not None or grouped else ():
            late = ids if removed is not None else await _late(client, log, key, ids, now_ms)
            await _note_surplus(client, log.name, key, late, now_ms)
    await client.scripts(scripts.DONE, now_ms, [(session_id, counted) for session_id in ready])


async def _late(client: RedisClient, log: _Log, key: str, ids: list[str], now_ms: int) -> list[str]:
    """Decides about a group; returns those of its sessions that came when it was whole already."""
    if await _decide(client, log, key, now_ms):
        return []
    parts = await client.run("HGET", client.key("parts", log.name), key)
    return [] if parts is None else sorted(set(ids) - set(json.loads(parts)))


async def _decide(client: RedisClient, log: _Log, key: str, now_ms: int) -> bool:
    """Makes a group a unit of a log, or drops it, if it is time; says whether it did."""
    whole, group, ids = await client.run_all(
        [
            ("ZSCORE", client.key("units", log.name), key),
            ("HMGET", client.key("group", key), "size", "first_ms"),
            ("ZRANGE", client.key("members", key), 0, -1),
        ]
    )
    if whole is not None:
        return False
    size, first_ms = map(int, group)
    members = await _members(client, log, list(map(text, ids)))
    decision = decide(log.hello.groups, size, members, now_ms - first_ms)
    if decision.state is State.WAIT or not members:
        return False
    index = {member.session_id: member.sample_index for member in members}
    partial = len({index[id_] for id_ in decision.session_ids}) < size
    dropped = log.hello.consumer if decision.state is State.DROP else ""
    made = await client.script(
        scripts.MAKE_UNIT,
        now_ms,
        log.name,
        key,
        json.dumps(decision.session_ids),
        "partial" if partial else "",
        dropped,
        *log.readers,
    )
    if not made:
        return False
    if dropped:
        entry = pb.FilteredEntry(
            delivery_id=key, reason=pb.FILTER_REASON_INCOMPLETE_GROUP, unix_ms=now_ms
        )
        await add_filtered(client, log.name, entry, f"drop {key}")
    else:
        late = set(index) - set(decision.session_ids)
        await _note_surplus(client, log.name, key, sorted(late), now_ms)
    return True


async def _members(client: RedisClient, log: _Log, ids: list[str]) -> list[Member]:
    judged = log.hello.groups.HasField("samples")
    members: list[Member] = []
    wanted = "head" if judged else "none"
    found = await client.run_all(
        [("HMGET", client.key("session", session_id), "idx", wanted) for session_id in ids]
    )
    for session_id, (index, head) in zip(ids, found, strict=True):
        usable = not judged or filters.usable(
            log.hello.filter, types_pb2.SessionRecord.FromString(head)
        )
        members.append(Member(session_id, int(index), usable))
    return members


async def _note_surplus(
    client: RedisClient, log: str, key: str, session_ids: Iterable[str], now_ms: int
) -> None:
    for session_id in session_ids:
        entry = pb.FilteredEntry(
            delivery_id=key,
            reason=pb.FILTER_REASON_SURPLUS,
            unix_ms=now_ms,
            session_id=session_id,
        )
        await add_filtered(client, log, entry, f"surplus {session_id}")
