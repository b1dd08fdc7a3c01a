"""Makes groups units of logs, as functions over a transaction."""

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rollmesh.collector.delivery.groups import NewUnit, Sample, form_unit
from rollmesh.collector.delivery.units import GROUP_LOG, GroupLog, own_log
from rollmesh.collector.storage.sql.lists import list_once
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.v1 import collector_pb2 as pb

_BACKFILL_BATCH = 200


class LogPosition(NamedTuple):
    """The position of a unit in a log."""

    seq: int
    made_ms: int
    """When the unit was completed."""


class NewRow(NamedTuple):
    """A unit to be added to a log."""

    unit_id: str
    position: LogPosition
    members: tuple[str, ...] = ()
    partial: bool = False


class Group(NamedTuple):
    """A stored group."""

    key: str
    size: int
    first_ms: int
    """When its first session arrived."""


def find_groups(tx: Transaction, keys: Collection[str]) -> dict[str, Group]:
    """Returns the groups that exist, by key: superseded sessions belong to no group."""
    if not keys:
        return {}
    rows = tx.rows(
        f"SELECT group_key, size, first_ms FROM groups WHERE group_key {tx.within(1)}",  # noqa: S608
        tx.listed(keys),
    )
    return {row[0]: Group(*row) for row in rows}


def decide(
    tx: Transaction,
    log: GroupLog,
    groups: Sequence[tuple[Group, LogPosition | None]],
    now_ms: int,
) -> list[str]:
    """Makes groups units of a log if it is time; returns the keys of those that are.

    Args:
        tx: The transaction.
        log: The log.
        groups: The groups, and the positions of their units in the log; None: at the end.
        now_ms: The current time.
    """
    if not groups:
        return []
    samples = _samples(tx, log, [group.key for group, _ in groups])
    units: dict[str, NewUnit] = {}
    rows: list[NewRow] = []
    for group, place in groups:
        key, times_ms = group.key, (group.first_ms, now_ms)
        unit = form_unit(log, key, group.size, samples[key], times_ms)
        if unit is not None:
            units[key] = unit
            position = place or LogPosition(tx.next_seq(), now_ms)
            rows.append(NewRow(key, position, unit.members, unit.partial))
    if not units:
        return []
    add_units(tx, log.name, rows)
    if log.name == GROUP_LOG:
        tx.run_many("UPDATE groups SET open = 0 WHERE group_key = ?1", [(key,) for key in units])
    else:
        _settle_in_own_log(tx, log, units, now_ms)
    tx.run(  # including those that settled a group under another policy
        "UPDATE consumers SET settled = settled + (SELECT count(*) FROM progress p"  # noqa: S608
        " WHERE p.consumer = consumers.name AND p.settled_ms IS NOT NULL"
        f" AND p.unit_id {tx.within(1)}) WHERE log = ?2",
        tx.listed(units),
        log.name,
    )
    list_once(tx, log.name, [entry for unit in units.values() for entry in unit.entries])
    return list(units)


def _samples(tx: Transaction, log: GroupLog, keys: Sequence[str]) -> dict[str, list[Sample]]:
    """Returns the sessions of groups that are ready, in order of arrival."""
    head = "head" if log.judges else "NULL"
    rows = tx.rows(
        f"SELECT group_key, session_id, sample_index, {head} FROM sessions"  # noqa: S608
        f" WHERE group_key {tx.within(1)} AND ready = 1 ORDER BY n",
        tx.listed(keys),
    )
    samples: dict[str, list[Sample]] = {key: [] for key in keys}
    for key, *sample in rows:
        samples[key].append(Sample(*sample))
    return samples


def _settle_in_own_log(
    tx: Transaction, log: GroupLog, units: dict[str, NewUnit], now_ms: int
) -> None:
    """Forgets the deadlines of groups; those that are dropped are settled from the first."""
    tx.run_many(
        "DELETE FROM group_deadlines WHERE log = ?1 AND group_key = ?2",
        [(log.name, key) for key in units],
    )
    tx.run_many(
        "INSERT INTO progress (consumer, unit_id, attempts, settled_ms) VALUES (?1, ?2, 0, ?3)"
        " ON CONFLICT (consumer, unit_id)"
        " DO UPDATE SET settled_ms = coalesce(progress.settled_ms, excluded.settled_ms)",
        [(log.consumer.name, key, now_ms) for key, unit in units.items() if unit.dropped],
    )


def backfill(tx: Transaction, consumer: pb.Consumer, now_ms: int) -> None:
    """Fills the log of a consumer with its own group policy from the stored sessions.

    Groups with all their samples get the positions that they have in `GROUP_LOG`.
    """
    log = GroupLog(own_log(consumer.name), consumer)
    rows = tx.rows(
        "SELECT g.group_key, g.size, g.first_ms, u.seq, u.made_ms FROM units u"
        " JOIN groups g ON g.group_key = u.unit_id WHERE u.log = ?1 ORDER BY u.seq",
        GROUP_LOG,
    )
    stored: list[tuple[Group, LogPosition | None]]
    stored = [(Group(*row[:3]), LogPosition(*row[3:])) for row in rows]
    rows = tx.rows("SELECT group_key, size, first_ms FROM groups WHERE open = 1 ORDER BY n")
    waiting = [Group(*row) for row in rows]
    await_deadlines(tx, log, waiting)
    stored += [(group, None) for group in waiting]
    for at in range(0, len(stored), _BACKFILL_BATCH):
        decide(tx, log, stored[at : at + _BACKFILL_BATCH], now_ms)


def await_deadlines(tx: Transaction, log: GroupLog, groups: Sequence[Group]) -> None:
    """Notes the deadlines of groups in a log, if it has any."""
    rows = [
        (log.name, group.key, due_ms)
        for group in groups
        if (due_ms := log.deadline_ms(group.first_ms)) is not None
    ]
    tx.run_many(
        "INSERT INTO group_deadlines VALUES (?1, ?2, ?3)"
        " ON CONFLICT (log, group_key) DO UPDATE SET due_ms = excluded.due_ms",
        rows,
    )


def add_units(tx: Transaction, log: str, units: Sequence[NewRow]) -> None:
    """Adds units to a log."""
    tx.run_many(
        "INSERT INTO units (log, seq, unit_id, members, partial, made_ms)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        [
            (log, at.seq, unit_id, json.dumps(members), int(partial), at.made_ms)
            for unit_id, at, members, partial in units
        ],
    )
    tx.add_total(f"log:{log}", len(units))
