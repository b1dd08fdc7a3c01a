"""Stores sessions and adds them to the logs, as functions over a transaction."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery.entries import surplus
from rollmesh.collector.delivery.records import read_head
from rollmesh.collector.delivery.rewards import check_repeat, rewards_digest
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, Arrival
from rollmesh.collector.storage.sql.groups import (
    Group,
    LogPosition,
    NewRow,
    add_units,
    await_deadlines,
    decide,
    find_groups,
)
from rollmesh.collector.storage.sql.lists import add_filtered
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.collector.storage.store import (
    RETRY_MS,
    other_size,
    session_unknown,
    store_full,
)
from rollmesh.runtime.codec.session_rewards import apply_rewards
from rollmesh.runtime.statements import Row
from rollmesh.v1 import session_pb2

_DUE_BATCH = 200


class Packed(NamedTuple):
    """A session in its stored form."""

    arrival: Arrival
    """Its record no longer has arrays."""
    head: bytes
    arrays: bytes | None
    """None if they are not in the table."""
    more: dict[str, Any]
    """Further columns."""

    @property
    def size(self) -> int:
        """Bytes in the table."""
        return len(self.head) + len(self.arrays or b"")

    def columns(self, now_ms: int) -> dict[str, Any]:
        """Returns its row."""
        arrival, record = self.arrival, self.arrival.record
        due_ms = arrival.due_ms(now_ms)
        return {
            "session_id": record.session_id,
            "group_key": arrival.group_key,
            "sample_index": record.sample_index,
            "due_ms": due_ms,
            "ready": int(due_ms is None),
            "trajectories": len(record.trajectories),
            "head": self.head,
            "arrays": self.arrays,
            **self.more,
        }


def ingest(tx: Transaction, sessions: Sequence[Packed], now_ms: int, max_bytes: int) -> list[bool]:
    """Stores the sessions of a call; returns for each whether it is a repeat."""
    ids = tx.listed(packed.arrival.record.session_id for packed in sessions)
    rows = tx.rows(
        f"SELECT session_id FROM sessions WHERE session_id {tx.within(1)}"  # noqa: S608
        f" UNION ALL SELECT id FROM removed WHERE id {tx.within(1)}",
        ids,
    )
    known = {session_id for (session_id,) in rows}
    repeats: list[bool] = []
    new: list[Packed] = []
    for packed in sessions:
        session_id = packed.arrival.record.session_id
        repeats.append(session_id in known)
        if session_id not in known:
            new.append(packed)
            known.add(session_id)
    if new:
        _store(tx, new, now_ms, max_bytes)
    return repeats


def _store(tx: Transaction, sessions: Sequence[Packed], now_ms: int, max_bytes: int) -> None:
    size = sum(packed.size for packed in sessions)
    if tx.stored_bytes() + size > max_bytes:
        raise store_full()
    groups = _enter_groups(tx, [packed.arrival for packed in sessions], now_ms)
    rows = [packed.columns(now_ms) for packed in sessions]
    names = ", ".join(rows[0])
    places = ", ".join(f"?{number}" for number in range(1, len(rows[0]) + 1))
    tx.run_many(
        f"INSERT INTO sessions ({names}) VALUES ({places})",  # noqa: S608
        [list(row.values()) for row in rows],
    )
    tx.add_bytes(size)
    tx.add_total("sessions", len(sessions))
    tx.add_total("trajectories", sum(row["trajectories"] for row in rows))
    ready = [(row["session_id"], row["group_key"]) for row in rows if row["ready"]]
    _add_to_logs(tx, ready, groups, now_ms)


def set_rewards(
    tx: Transaction,
    session_id: str,
    rewards: session_pb2.SessionRewards,
    request_id: str,
    now_ms: int,
) -> bool:
    """Sets a session's rewards and adds it to the logs; returns whether it is a repeat."""
    row = tx.row("SELECT head, due_ms, group_key FROM sessions WHERE session_id = ?1", session_id)
    if row is None:
        raise session_unknown(session_id)
    digest = rewards_digest(rewards)
    first = tx.row(
        "SELECT digest FROM reward_requests WHERE session_id = ?1 AND request_id = ?2",
        session_id,
        request_id,
    )
    if first is not None:
        check_repeat(request_id, bytes(first[0]), digest)
        return True
    tx.run("INSERT INTO reward_requests VALUES (?1, ?2, ?3)", session_id, request_id, digest)
    head = read_head(session_id, row[0])
    apply_rewards(head, rewards)
    data = head.SerializeToString()
    tx.run("UPDATE sessions SET head = ?1 WHERE session_id = ?2", data, session_id)
    tx.add_bytes(len(data) - len(row[0]))
    if row[1] is not None:
        _make_ready(tx, [(session_id, row[2])], now_ms)
    return False


def tick(tx: Transaction, now_ms: int) -> bool:
    """Processes due deadlines; returns whether anything was due."""
    late = tx.rows(
        "SELECT session_id, group_key FROM sessions WHERE due_ms <= ?1 LIMIT ?2", now_ms, _DUE_BATCH
    )
    _make_ready(tx, late, now_ms)
    tx.add_total("reward_timeouts", len(late))
    due = tx.rows(
        "SELECT log, group_key FROM group_deadlines WHERE due_ms <= ?1 LIMIT ?2", now_ms, _DUE_BATCH
    )
    if due:
        _decide_due(tx, due, now_ms)
    return bool(late or due)


def _decide_due(tx: Transaction, due: Sequence[Row], now_ms: int) -> None:
    """Decides about groups whose deadline in a log has passed."""
    groups = find_groups(tx, {key for _, key in due})
    left = set(due)
    for log in tx.logs:
        keys = [key for name, key in due if name == log.name and key in groups]
        decided = decide(tx, log, [(groups[key], None) for key in keys], now_ms)
        left -= {(log.name, key) for key in decided}
    # All its sessions may be waiting for rewards, or its consumer's settings be damaged.
    tx.run_many(
        "UPDATE group_deadlines SET due_ms = ?1 WHERE log = ?2 AND group_key = ?3",
        [(now_ms + RETRY_MS, name, key) for name, key in sorted(left)],
    )


def is_due(tx: Transaction, now_ms: int) -> bool:
    """Returns whether `tick` has anything to do."""
    found: int = tx.value(
        "SELECT CASE WHEN EXISTS (SELECT 1 FROM sessions WHERE due_ms <= ?1)"
        " OR EXISTS (SELECT 1 FROM group_deadlines WHERE due_ms <= ?1) THEN 1 ELSE 0 END",
        now_ms,
    )
    return bool(found)


def _enter_groups(tx: Transaction, arrivals: Sequence[Arrival], now_ms: int) -> dict[str, Group]:
    """Returns the groups of sessions; a group is created by its first one."""
    sizes = [(arrival, arrival.group_size) for arrival in arrivals]
    keys = {arrival.group_key for arrival, size in sizes if size is not None}
    groups = find_groups(tx, keys)
    gone = _removed_groups(tx, keys - groups.keys())
    new: list[Group] = []
    for arrival, size in sizes:
        key = arrival.group_key
        if size is None or key in gone:
            continue
        if key not in groups:
            groups[key] = Group(key, size, now_ms)
            new.append(groups[key])
        elif groups[key].size != size:
            raise other_size(arrival, groups[key].size)
    tx.run_many("INSERT INTO groups (group_key, size, first_ms) VALUES (?1, ?2, ?3)", new)
    for log in tx.logs[1:]:
        await_deadlines(tx, log, new)
    return groups


def _make_ready(tx: Transaction, sessions: Sequence[Row], now_ms: int) -> None:
    """Adds sessions that waited for rewards, with the keys of their groups, to the logs."""
    tx.run_many(
        "UPDATE sessions SET ready = 1, due_ms = NULL WHERE session_id = ?1",
        [(session_id,) for session_id, _ in sessions],
    )
    _add_to_logs(tx, sessions, find_groups(tx, {key for _, key in sessions}), now_ms)


def _add_to_logs(
    tx: Transaction, sessions: Sequence[Row], groups: Mapping[str, Group], now_ms: int
) -> None:
    """Adds sessions to the logs, and the groups that they complete.

    Args:
        tx: The transaction.
        sessions: The id of each session, and the key of its group.
        groups: The groups that exist, by key.
        now_ms: The current time.
    """
    if not sessions:
        return
    made = [NewRow(session_id, LogPosition(tx.next_seq(), now_ms)) for session_id, _ in sessions]
    add_units(tx, SESSION_LOG, made)
    keys = dict.fromkeys(key for _, key in sessions)
    gone = _removed_groups(tx, keys.keys() - groups.keys())  # else superseded, so of no group
    for log in tx.logs:
        rows = tx.rows(
            f"SELECT unit_id FROM units WHERE log = ?2 AND unit_id {tx.within(1)}",  # noqa: S608
            tx.listed(keys),
            log.name,
        )
        late = gone | {key for (key,) in rows}
        entries = [surplus(key, session_id, now_ms) for session_id, key in sessions if key in late]
        add_filtered(tx, log.name, entries)
        waiting = [groups[key] for key in keys if key in groups and key not in late]
        decide(tx, log, [(group, None) for group in waiting], now_ms)


def _removed_groups(tx: Transaction, keys: Collection[str]) -> set[str]:
    """Returns the groups that were delivered to all and removed; later sessions are surplus."""
    if not keys:
        return set()
    prefix = f"{GROUP_LOG}:"
    rows = tx.rows(
        f"SELECT id FROM removed WHERE id {tx.within(1)}",  # noqa: S608
        tx.listed(prefix + key for key in keys),
    )
    return {id_.removeprefix(prefix) for (id_,) in rows}
