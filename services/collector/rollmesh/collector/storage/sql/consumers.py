"""Consumers: created, changed, moved and deleted, as functions over a transaction."""

from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.collector.delivery.entries import filtered_counts, read_entry
from rollmesh.collector.delivery.settings import other_unit, updated
from rollmesh.collector.delivery.units import GROUP_LOG, SESSION_LOG, log_of, own_log
from rollmesh.collector.storage.sql.groups import backfill
from rollmesh.collector.storage.sql.transaction import LAST_SEQ, Transaction
from rollmesh.collector.storage.store import (
    Sought,
    Standing,
    Updated,
    consumer_exists,
    consumer_unknown,
    read_consumer,
    unit_unknown,
)
from rollmesh.v1 import collector_pb2 as pb

_OPEN = (
    "SELECT count(*) FROM units u WHERE u.log = ?1 AND u.seq > ?2 AND u.seq < ?4 AND NOT EXISTS"
    " (SELECT 1 FROM progress p WHERE p.consumer = ?3 AND p.unit_id = u.unit_id"
    " AND p.settled_ms IS NOT NULL)"
)
_NO_END = 2**62


class Known(NamedTuple):
    """The progress of a consumer."""

    log: str
    start_seq: int
    """Units up to this position are not delivered."""
    floor: int
    """All units up to this position are settled."""
    settled: int
    acknowledged: int


def known(tx: Transaction, name: str) -> Known:
    """Returns the progress of a consumer."""
    row = tx.row(
        "SELECT log, start_seq, floor, settled, acknowledged FROM consumers WHERE name = ?1", name
    )
    if row is None:
        raise consumer_unknown(name)
    return Known(*row)


def create_consumer(
    tx: Transaction, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
) -> None:
    """Creates a consumer."""
    name, log, data = consumer.name, log_of(consumer), consumer.SerializeToString()
    row = tx.row("SELECT settings, log FROM consumers WHERE name = ?1", name)
    if row is None:
        shared = SESSION_LOG if log == SESSION_LOG else GROUP_LOG
        start_seq = _first_seq(tx, shared, start) - 1 if start else 0
        tx.run(
            "INSERT INTO consumers (name, log, settings, start_seq, floor, settled, seen_ms)"
            " VALUES (?1, ?2, ?3, ?4, ?4, 0, ?5)",
            name,
            log,
            data,
            start_seq,
            now_ms,
        )
    elif read_consumer(name, bytes(row[0])) is not None:
        raise consumer_exists(name)
    elif (row[1] == SESSION_LOG) != (log == SESSION_LOG):
        raise other_unit(name)
    _decide_anew(tx, consumer, now_ms)


def update_consumer(tx: Transaction, changes: pb.Consumer, now_ms: int) -> Updated:
    """Changes the settings of a consumer."""
    stored = read(tx, changes.name)
    seen_ms = stored.seen_unix_ms
    stored.ClearField("seen_unix_ms")
    after = updated(stored, changes)
    moved = after.groups != stored.groups
    if moved:
        _decide_anew(tx, after, now_ms)
    elif after != stored:
        _set_settings(tx, after)
    after.seen_unix_ms = seen_ms
    return Updated(after, moved)


def read(tx: Transaction, name: str) -> pb.Consumer:
    """Returns a consumer."""
    row = tx.row("SELECT settings, seen_ms FROM consumers WHERE name = ?1", name)
    consumer = read_consumer(name, bytes(row[0])) if row else None
    if row is None or consumer is None:
        raise consumer_unknown(name)
    consumer.seen_unix_ms = row[1]
    return consumer


def read_page(tx: Transaction, page_size: int, after: str) -> tuple[list[pb.Consumer], str]:
    """Returns a page of consumers without damaged ones, and the token of the next page."""
    rows = tx.rows(
        "SELECT name, settings, seen_ms FROM consumers WHERE name > ?1 ORDER BY name LIMIT ?2",
        after,
        page_size,
    )
    consumers: list[pb.Consumer] = []
    for name, data, seen_ms in rows:
        if (consumer := read_consumer(name, bytes(data))) is not None:
            consumer.seen_unix_ms = seen_ms
            consumers.append(consumer)
    return consumers, rows[-1][0] if len(rows) == page_size else ""


def _set_settings(tx: Transaction, consumer: pb.Consumer) -> None:
    tx.run(
        "UPDATE consumers SET settings = ?1, log = ?2 WHERE name = ?3",
        consumer.SerializeToString(),
        log_of(consumer),
        consumer.name,
    )


def _decide_anew(tx: Transaction, consumer: pb.Consumer, now_ms: int) -> None:
    """Moves a consumer to the log of its group policy; settled units stay settled."""
    name = consumer.name
    _set_settings(tx, consumer)
    tx.run("DELETE FROM progress WHERE consumer = ?1 AND settled_ms IS NULL", name)
    _leave_own_log(tx, name)
    tx.run("UPDATE consumers SET floor = start_seq WHERE name = ?1", name)
    if log_of(consumer) == own_log(name):
        backfill(tx, consumer, now_ms)
    _count_open(tx, name)


def seek(tx: Transaction, name: str, position: pb.Position) -> Sought:
    """Moves a consumer; units it had settled at or after the position are redelivered."""
    consumer = known(tx, name)
    first = _first_seq(tx, consumer.log, position)
    again: int = tx.value(
        "SELECT count(*) FROM units u JOIN progress p ON p.consumer = ?1"
        " AND p.unit_id = u.unit_id AND p.settled_ms IS NOT NULL"
        " WHERE u.log = ?2 AND u.seq >= ?3",
        name,
        consumer.log,
        first,
    )
    # Those skipped by an earlier start or seek have no progress.
    again += tx.value(_OPEN, consumer.log, first - 1, name, consumer.start_seq + 1)
    skipped: int = tx.value(_OPEN, consumer.log, consumer.start_seq, name, first)
    tx.run(
        "DELETE FROM progress WHERE consumer = ?1 AND (settled_ms IS NULL"
        " OR unit_id IN (SELECT unit_id FROM units WHERE log = ?2 AND seq >= ?3))",
        name,
        consumer.log,
        first,
    )
    tx.run("UPDATE consumers SET start_seq = ?1, floor = ?1 WHERE name = ?2", first - 1, name)
    _count_open(tx, name)
    return Sought(again, skipped)


def delete_consumer(tx: Transaction, name: str) -> bool:
    """Deletes a consumer and everything kept for it."""
    deleted = tx.rows("DELETE FROM consumers WHERE name = ?1 RETURNING name", name)
    tx.run("DELETE FROM progress WHERE consumer = ?1", name)
    _leave_own_log(tx, name)
    tx.run("DELETE FROM filtered WHERE owner = ?1", own_log(name))
    tx.run("DELETE FROM filtered_counts WHERE owner = ?1", own_log(name))
    return bool(deleted)


def touch(tx: Transaction, names: Sequence[str], now_ms: int) -> None:
    """Records that consumers have streams now."""
    rows = [(now_ms, name) for name in sorted(names)]
    tx.run_many("UPDATE consumers SET seen_ms = ?1 WHERE name = ?2", rows)


def expire(tx: Transaction, before_ms: int) -> list[str]:
    """Deletes the consumers that have had no stream since; returns their names."""
    rows = tx.rows("SELECT name FROM consumers WHERE seen_ms < ?1 ORDER BY name", before_ms)
    names = [name for (name,) in rows]
    for name in names:
        delete_consumer(tx, name)
    return names


def standing(tx: Transaction, name: str) -> Standing:
    """Counts the units of a consumer."""
    consumer = known(tx, name)
    rows = tx.rows(
        "SELECT reason, CAST(sum(units) AS BIGINT), CAST(sum(trajectories) AS BIGINT)"
        " FROM filtered_counts WHERE owner IN (?1, ?2) GROUP BY reason",
        own_log(name),
        consumer.log,
    )
    counts = {reason: (units, trajectories) for reason, units, trajectories in rows}
    left = tx.total(f"log:{consumer.log}") - consumer.settled
    return Standing(consumer.acknowledged, left, filtered_counts(counts))


def filtered(
    tx: Transaction, name: str, page_size: int, after: int
) -> tuple[list[pb.FilteredEntry], str]:
    """Returns a page of entries filtered for a consumer, and the token of the next page."""
    rows = tx.rows(
        "SELECT n, unit_id, entry FROM filtered WHERE owner IN (?1, ?2) AND n > ?3"
        " ORDER BY n LIMIT ?4",
        own_log(name),
        known(tx, name).log,
        after,
        page_size,
    )
    token = str(rows[-1][0]) if len(rows) == page_size else ""
    return [read_entry(unit_id, entry) for _, unit_id, entry in rows], token


def _first_seq(tx: Transaction, log: str, position: pb.Position) -> int:
    """Returns the position of the first unit at or after `position`, which must be set."""
    if position.HasField("delivery_id"):
        row = tx.row(
            "SELECT seq FROM units WHERE log = ?1 AND unit_id = ?2", log, position.delivery_id
        )
        if row is None:
            raise unit_unknown(position.delivery_id)
        return int(row[0])
    if position.end == pb.LOG_END_EARLIEST:
        return 1
    if position.HasField("unix_ms"):
        seq = tx.value(
            "SELECT min(seq) FROM units WHERE log = ?1 AND made_ms >= ?2", log, position.unix_ms
        )
        if seq is not None:
            return int(seq)
    return tx.total(LAST_SEQ) + 1


def _leave_own_log(tx: Transaction, name: str) -> None:
    log = own_log(name)
    tx.run("DELETE FROM group_deadlines WHERE log = ?1", log)
    tx.run("DELETE FROM units WHERE log = ?1", log)
    tx.forget_total(f"log:{log}")


def _count_open(tx: Transaction, name: str) -> None:
    """Recounts the settled units; only after a change of log or position, as it scans all units."""
    consumer = known(tx, name)
    left: int = tx.value(_OPEN, consumer.log, consumer.start_seq, name, _NO_END)
    settled = tx.total(f"log:{consumer.log}") - left
    tx.run("UPDATE consumers SET settled = ?1 WHERE name = ?2", settled, name)
