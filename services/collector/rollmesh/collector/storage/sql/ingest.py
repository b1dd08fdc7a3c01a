"""Stores sessions and adds them to the logs, as functions over a transaction."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollmesh.collector.delivery.entries import surplus
from rollmesh.collector.delivery.records import read_head
from rollmesh.collector.delivery.rewards import check_repeat, rewards_digest
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, Arrival
from rollmesh.collector.storage.sql.groups import (
    Group,
    LogPosition,
    add_unit,
    await_deadline,
    decide,
    find_group,
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
    for packed in sessions:
        session_id = packed.arrival.record.session_id
        repeats.append(session_id in known)
        if session_id not in known:
            _ingest_one(tx, packed, now_ms, max_bytes)
            known.add(session_id)
    return repeats


def _ingest_one(tx: Transaction, packed: Packed, now_ms: int, max_bytes: int) -> None:
    arrival, record = packed.arrival, packed.arrival.record
    if tx.stored_bytes() + packed.size > max_bytes:
        raise store_full()
    key, due_ms = arrival.group_key, arrival.due_ms(now_ms)
    group = _enter_group(tx, arrival, now_ms)
    columns = {
        "session_id": record.session_id,
        "group_key": key,
        "sample_index": record.sample_index,
        "due_ms": due_ms,
        "ready": int(due_ms is None),
        "trajectories": len(record.trajectories),
        "head": packed.head,
        "arrays": packed.arrays,
        **packed.more,
    }
    places = ", ".join(f"?{number}" for number in range(1, len(columns) + 1))
    names = ", ".join(columns)
    tx.run(f"INSERT INTO sessions ({names}) VALUES ({places})", *columns.values())  # noqa: S608
    tx.add_bytes(packed.size)
    tx.add_total("sessions", 1)
    tx.add_total("trajectories", len(record.trajectories))
    if due_ms is None:
        _add_to_logs(tx, record.session_id, key, group, now_ms)


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
        _make_ready(tx, session_id, row[2], now_ms)
    return False


def tick(tx: Transaction, now_ms: int) -> bool:
    """Processes due deadlines; returns whether anything was due."""
    late = tx.rows(
        "SELECT session_id, group_key FROM sessions WHERE due_ms <= ?1 LIMIT ?2", now_ms, _DUE_BATCH
    )
    for session_id, key in late:
        _make_ready(tx, session_id, key, now_ms)
    tx.add_total("reward_timeouts", len(late))
    due = tx.rows(
        "SELECT log, group_key FROM group_deadlines WHERE due_ms <= ?1 LIMIT ?2", now_ms, _DUE_BATCH
    )
    logs = {log.name: log for log in tx.logs} if due else {}
    for name, key in due:
        group = find_group(tx, key)
        # All its sessions may be waiting for rewards, or its consumer's settings be damaged.
        if name not in logs or group is None or not decide(tx, logs[name], group, now_ms):
            tx.run(
                "UPDATE group_deadlines SET due_ms = ?1 WHERE log = ?2 AND group_key = ?3",
                now_ms + RETRY_MS,
                name,
                key,
            )
    return bool(late or due)


def is_due(tx: Transaction, now_ms: int) -> bool:
    """Returns whether `tick` has anything to do."""
    found: int = tx.value(
        "SELECT CASE WHEN EXISTS (SELECT 1 FROM sessions WHERE due_ms <= ?1)"
        " OR EXISTS (SELECT 1 FROM group_deadlines WHERE due_ms <= ?1) THEN 1 ELSE 0 END",
        now_ms,
    )
    return bool(found)


def _enter_group(tx: Transaction, arrival: Arrival, now_ms: int) -> Group | None:
    """Returns the group of a session, which is created if it is the first; None without one."""
    key, size = arrival.group_key, arrival.group_size
    if size is None:
        return None
    group = find_group(tx, key)
    if group is None and not group_removed(tx, key):
        group = Group(key, size, now_ms)
        tx.run("INSERT INTO groups (group_key, size, first_ms) VALUES (?1, ?2, ?3)", *group)
        for log in tx.logs[1:]:
            await_deadline(tx, log, group)
    elif group is not None and group.size != size:
        raise other_size(arrival, group.size)
    return group


def _make_ready(tx: Transaction, session_id: str, key: str, now_ms: int) -> None:
    """Adds a session that waited for rewards to the logs."""
    tx.run("UPDATE sessions SET ready = 1, due_ms = NULL WHERE session_id = ?1", session_id)
    _add_to_logs(tx, session_id, key, find_group(tx, key), now_ms)


def _add_to_logs(
    tx: Transaction, session_id: str, key: str, group: Group | None, now_ms: int
) -> None:
    """Adds a session to the logs, and its group if the session completes it."""
    position = LogPosition(tx.next_seq(), now_ms)
    add_unit(tx, SESSION_LOG, session_id, position, (), partial=False)
    if group is None and not group_removed(tx, key):
        return  # superseded, so not part of any group
    for log in tx.logs:
        complete = group is not None and tx.row(
            "SELECT 1 FROM units WHERE log = ?1 AND unit_id = ?2", log.name, key
        )
        if group is None or complete:
            add_filtered(tx, log.name, surplus(key, session_id, now_ms))
        else:
            decide(tx, log, group, now_ms)


def group_removed(tx: Transaction, key: str) -> bool:
    """Returns whether a group was delivered to all and removed; later sessions are surplus."""
    return tx.row("SELECT 1 FROM removed WHERE id = ?1", f"{GROUP_LOG}:{key}") is not None
