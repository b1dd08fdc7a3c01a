"""Makes groups units of logs, as functions over a transaction."""

import json
from typing import NamedTuple

from rollmesh.collector.delivery.groups import Sample, form_unit
from rollmesh.collector.delivery.units import GROUP_LOG, GroupLog, own_log
from rollmesh.collector.storage.sql.lists import list_once
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.v1 import collector_pb2 as pb


class LogPosition(NamedTuple):
    """The position of a unit in a log."""

    seq: int
    made_ms: int
    """When the unit was completed."""


class Group(NamedTuple):
    """A stored group."""

    key: str
    size: int
    first_ms: int
    """When its first session arrived."""


def find_group(tx: Transaction, key: str) -> Group | None:
    """Returns a group; None if there is none: superseded sessions belong to no group."""
    row = tx.row("SELECT group_key, size, first_ms FROM groups WHERE group_key = ?1", key)
    return Group(*row) if row else None


def decide(
    tx: Transaction, log: GroupLog, group: Group, now_ms: int, position: LogPosition | None = None
) -> bool:
    """Makes a group a unit of a log if it is time; returns whether it is a unit.

    Args:
        tx: The transaction.
        log: The log.
        group: The group.
        now_ms: The current time.
        position: The unit's position in the log; None: at the end.
    """
    key, head = group.key, "head" if log.judges else "NULL"
    rows = tx.rows(
        f"SELECT session_id, sample_index, {head} FROM sessions"  # noqa: S608
        " WHERE group_key = ?1 AND ready = 1 ORDER BY n",
        key,
    )
    times_ms = (group.first_ms, now_ms)
    unit = form_unit(log, key, group.size, [Sample(*row) for row in rows], times_ms)
    if unit is None:
        return False
    position = position or LogPosition(tx.next_seq(), now_ms)
    add_unit(tx, log.name, key, position, unit.members, partial=unit.partial)
    if log.name == GROUP_LOG:
        tx.run("UPDATE groups SET open = 0 WHERE group_key = ?1", key)
    else:
        tx.run("DELETE FROM group_deadlines WHERE log = ?1 AND group_key = ?2", log.name, key)
    if unit.dropped:
        tx.run(
            "INSERT INTO progress (consumer, unit_id, attempts, settled_ms) VALUES (?1, ?2, 0, ?3)"
            " ON CONFLICT (consumer, unit_id)"
            " DO UPDATE SET settled_ms = coalesce(progress.settled_ms, excluded.settled_ms)",
            log.consumer.name,
            key,
            now_ms,
        )
    tx.run(  # including those that settled the group under another policy
        "UPDATE consumers SET settled = settled + 1 WHERE log = ?1 AND EXISTS"
        " (SELECT 1 FROM progress p WHERE p.consumer = consumers.name AND p.unit_id = ?2"
        " AND p.settled_ms IS NOT NULL)",
        log.name,
        key,
    )
    for entry in unit.entries:
        list_once(tx, log.name, entry)
    return True


def backfill(tx: Transaction, consumer: pb.Consumer, now_ms: int) -> None:
    """Fills the log of a consumer with its own group policy from the stored sessions.

    Groups with all their samples get the positions that they have in `GROUP_LOG`.
    """
    log = GroupLog(own_log(consumer.name), consumer)
    complete = tx.rows(
        "SELECT g.group_key, g.size, g.first_ms, u.seq, u.made_ms FROM units u"
        " JOIN groups g ON g.group_key = u.unit_id WHERE u.log = ?1 ORDER BY u.seq",
        GROUP_LOG,
    )
    for key, size, first_ms, seq, made_ms in complete:
        decide(tx, log, Group(key, size, first_ms), now_ms, LogPosition(seq, made_ms))
    waiting = tx.rows("SELECT group_key, size, first_ms FROM groups WHERE open = 1 ORDER BY n")
    for row in waiting:
        group = Group(*row)
        await_deadline(tx, log, group)
        decide(tx, log, group, now_ms)


def await_deadline(tx: Transaction, log: GroupLog, group: Group) -> None:
    """Notes the deadline of a group in a log, if it has one."""
    due_ms = log.deadline_ms(group.first_ms)
    if due_ms is not None:
        tx.run(
            "INSERT INTO group_deadlines VALUES (?1, ?2, ?3)"
            " ON CONFLICT (log, group_key) DO UPDATE SET due_ms = excluded.due_ms",
            log.name,
            group.key,
            due_ms,
        )


def add_unit(
    tx: Transaction,
    log: str,
    unit_id: str,
    position: LogPosition,
    members: tuple[str, ...],
    *,
    partial: bool,
) -> None:
    """Adds a unit to a log."""
    tx.run(
        "INSERT INTO units (log, seq, unit_id, members, partial, made_ms)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        log,
        position.seq,
        unit_id,
        json.dumps(members),
        int(partial),
        position.made_ms,
    )
    tx.add_total(f"log:{log}", 1)
