"""Stores sessions in Redis and adds them to the logs.

A script stores a session and makes it ready. Further round trips, whose number is fixed, decide
about its groups. Every step may be repeated: whoever finds a session that is not `done` finishes
it. An interrupted ingest was not acknowledged, and its repeat resumes from there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollmesh.collector.delivery.entries import counts_of, surplus
from rollmesh.collector.delivery.records import read_head, split
from rollmesh.collector.delivery.rewards import check_repeat, rewards_digest
from rollmesh.collector.delivery.units import GROUP_LOG, Arrival, GroupLog, group_logs, own_log
from rollmesh.collector.storage.redis import groups as redis_groups, scripts
from rollmesh.collector.storage.redis.client import Command, RedisClient, Script, Value, text
from rollmesh.collector.storage.redis.groups import Pair, Seen
from rollmesh.collector.storage.store import RETRY_MS, other_size, session_unknown, store_full
from rollmesh.runtime.codec.session_rewards import apply_rewards
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_DUE_BATCH = 200
_BACKFILL_BATCH = 200
_SURPLUS = int(pb.FILTER_REASON_SURPLUS)


async def ingest(
    client: RedisClient, arrivals: Sequence[Arrival], now_ms: int, max_bytes: int
) -> list[bool]:
    """Stores sessions; returns for each whether it is a repeat."""
    consumers = await client.run("HGETALL", client.key("consumers"))
    deadlines: list[Value] = []
    for log in group_logs(redis_groups.consumers_of(consumers)):
        due_ms = log.deadline_ms(now_ms)
        if due_ms is not None:
            deadlines += [log.name, due_ms]
    calls = [
        Script(scripts.INGEST, now_ms, [*_stored(one, now_ms), max_bytes, *deadlines])
        for one in arrivals
    ]
    keys = [one.group_key for one in arrivals]
    found, seen = await _run_and_look(client, calls, keys)
    answers = list(map(text, found))
    ready = {
        one.record.session_id: key
        for one, key, answer in zip(arrivals, keys, answers, strict=True)
        if answer in ("new", "undone")
    }
    await _finish(client, ready, seen, now_ms)
    for one, answer in zip(arrivals, answers, strict=True):
        if answer == "full":
            raise store_full()
        if answer.startswith("size"):
            raise other_size(one, int(answer[5:]))
    return [answer not in ("new", "held") for answer in answers]


def _stored(arrival: Arrival, now_ms: int) -> list[Value]:
    """Returns the script arguments that store a session."""
    record, size, due_ms = arrival.record, arrival.group_size, arrival.due_ms(now_ms)
    head, arrays = split(record)
    return [
        record.session_id,
        head,
        b"".join(arrays),
        arrival.group_key,
        record.sample_index,
        "" if size is None else size,
        "" if due_ms is None else due_ms,
        len(record.trajectories),
    ]


async def set_rewards(
    client: RedisClient,
    session_id: str,
    rewards: session_pb2.SessionRewards,
    request_id: str,
    now_ms: int,
) -> bool:
    """Sets a session's rewards and adds it to the logs; returns whether it is a repeat."""
    digest = rewards_digest(rewards)
    while True:
        (before, key), known = await client.run_all(
            [
                ("HMGET", client.key("session", session_id), "head", "key"),
                ("HGET", client.key("rewards", session_id), request_id),
            ]
        )
        if before is None:
            raise session_unknown(session_id)
        head = read_head(session_id, before)
        if known is None:
            apply_rewards(head, rewards)
        else:
            check_repeat(request_id, known, digest)
        arguments = [session_id, head.SerializeToString(), request_id, before, digest]
        call = Script(scripts.REWARD, now_ms, arguments)
        ((said, waited),), seen = await _run_and_look(client, [call], [text(key)])
        answer = text(said)
        if answer != "changed":  # another request changed the session in the meantime
            break
    if waited:
        await _finish(client, {session_id: text(key)}, seen, now_ms)
    return answer == "repeat"


async def tick(client: RedisClient, now_ms: int) -> bool:
    """Processes due deadlines; returns whether anything was due."""
    until = ("-inf", now_ms, "LIMIT", 0, _DUE_BATCH)
    found, due = await client.run_all(
        [("ZRANGEBYSCORE", client.key(kind), *until) for kind in ("due", "deadlines")]
    )
    late = list(map(text, found))
    keys = await client.run_all([("HGET", client.key("session", id_), "key") for id_ in late])
    ready = {id_: text(key) for id_, key in zip(late, keys, strict=True) if key is not None}
    if ready:
        calls = [Script(scripts.READY, now_ms, pair) for pair in ready.items()]
        _, seen = await _run_and_look(client, calls, ready.values())
        await _finish(client, ready, seen, now_ms, "reward_timeouts")
    if due:
        await _decide_due(client, list(map(text, due)), now_ms)
    return bool(late or due)


async def _decide_due(client: RedisClient, due: Sequence[str], now_ms: int) -> None:
    """Decides about groups whose deadline in a log has passed."""
    names = [(name, key) for name, _, key in (entry.partition("\0") for entry in due)]
    _, seen = await _run_and_look(client, [], [key for _, key in names])
    logs = {log.name: log for log in seen.logs}
    known = [name in logs and key in seen.groups for name, key in names]
    pairs = [Pair(logs[name], key) for (name, key), is_ in zip(names, known, strict=True) if is_]
    decided = iter(await redis_groups.decide_all(client, pairs, seen.groups, now_ms))
    deadlines = client.key("deadlines")
    commands: list[Command] = []
    for entry, is_known in zip(due, known, strict=True):
        one = next(decided) if is_known else None
        if one is None or one.known:
            commands.append(("ZREM", deadlines, entry))
        elif one.call is None:  # all its sessions wait for rewards
            commands.append(("ZADD", deadlines, "XX", now_ms + RETRY_MS, entry))
        else:
            commands.append(one.call)
    await client.run_at_once(commands)


async def backfill(client: RedisClient, consumer: pb.Consumer, start_seq: int, now_ms: int) -> None:
    """Fills the log of a consumer with its own group policy from the stored sessions.

    Groups with all their samples get the positions that they have in `GROUP_LOG`.

    Args:
        client: Redis.
        consumer: The consumer, which the store knows already.
        start_seq: Groups that are units of `GROUP_LOG` up to this position count as settled.
        now_ms: The current time.
    """
    log = GroupLog(own_log(consumer.name), consumer, (consumer.name,))
    waiting = await client.run("ZRANGE", client.key("groups", "open"), 0, -1)
    complete = await client.run("ZRANGE", client.key("units", GROUP_LOG), 0, -1)
    stored = list(map(text, dict.fromkeys([*complete, *waiting])))
    for at in range(0, len(stored), _BACKFILL_BATCH):
        await _backfill(client, log, stored[at : at + _BACKFILL_BATCH], start_seq, now_ms)


async def _backfill(
    client: RedisClient, log: GroupLog, stored: Sequence[str], start_seq: int, now_ms: int
) -> None:
    places = [("ZSCORE", client.key("units", GROUP_LOG), key) for key in stored]
    found, seen = await _run_and_look(client, places, stored)
    pairs: list[Pair] = []
    calls: list[Command] = []
    for key, score in zip(stored, found, strict=True):
        if (group := seen.groups.get(key)) is None:  # removed in the meantime
            continue
        seq = None if score is None else int(float(score))
        pairs.append(Pair(log, key, seq, skipped=seq is not None and seq <= start_seq))
        due_ms = log.deadline_ms(group.first_ms)
        if due_ms is not None:
            calls.append(("ZADD", client.key("deadlines"), due_ms, f"{log.name}\0{key}"))
    decided = await redis_groups.decide_all(client, pairs, seen.groups, now_ms)
    await client.run_at_once([*calls, *(one.call for one in decided if one.call)])


async def add_filtered(
    client: RedisClient, owner: str, entries: Iterable[pb.FilteredEntry]
) -> None:
    """Lists and counts what was filtered for a consumer, or for all readers of a log."""
    await client.run_at_once(
        [Script(scripts.FILTERED, entry.unix_ms, listed(owner, entry)) for entry in entries]
    )


def listed(owner: str, entry: pb.FilteredEntry) -> list[Value]:
    """Returns the script arguments that list and count an entry of a consumer or log."""
    arguments: list[Value] = [owner, entry.SerializeToString()]
    for reason, (units, trajectories) in counts_of(entry).items():
        arguments += [f"{reason}:u", units, f"{reason}:t", trajectories]
    return arguments


async def _run_and_look(
    client: RedisClient, commands: Sequence[Command], keys: Iterable[str]
) -> tuple[list[Any], Seen]:
    """Runs commands and then reads the state of groups; returns the replies and the state."""
    asked = list(dict.fromkeys(keys))
    found = await client.run_at_once([*commands, *redis_groups.looks(client, asked)])
    return found[: len(commands)], redis_groups.seen(found[len(commands) :], asked)


async def _finish(
    client: RedisClient, ready: Mapping[str, str], seen: Seen, now_ms: int, counted_as: str = ""
) -> None:
    """Creates the units of groups completed by sessions that became ready; may be repeated.

    Args:
        client: Redis.
        ready: The key of each session's group, by session id.
        seen: Logs and groups, read after the sessions became ready.
        now_ms: The current time.
        counted_as: Name of the total that counts sessions that were waiting until now.
    """
    if not ready:
        return
    keys = [key for key in dict.fromkeys(ready.values()) if key in seen.groups]
    pairs = [Pair(log, key) for key in keys for log in seen.logs]
    decided = await redis_groups.decide_all(client, pairs, seen.groups, now_ms)
    names = [log.name for log in seen.logs]
    done = [
        Script(
            scripts.DONE,
            now_ms,
            [id_, key, counted_as, _SURPLUS, _surplus(key, id_, now_ms), *names],
        )
        for id_, key in ready.items()
    ]
    await client.run_at_once([*(one.call for one in decided if one.call), *done])


def _surplus(key: str, session_id: str, now_ms: int) -> bytes:
    return surplus(key, session_id, now_ms).SerializeToString()
