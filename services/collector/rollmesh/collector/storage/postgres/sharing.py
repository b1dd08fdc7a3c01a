"""What collectors that share a store know of each other, as functions over a transaction.

A collector holds the units that it fetched for a consumer. They stay its own as long as it is
alive, or until it releases them; then another collector takes them over.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.collector.delivery.units import Unit
from rollmesh.collector.storage.sql.transaction import LAST_SEQ, Transaction

_CHANGES = "changes"
"""Name of the total that counts changes of consumers."""
_FREE = ""
"""Holder of released units; never alive."""


class News(NamedTuple):
    """What tells a collector that others have changed something."""

    last_seq: int
    """The last position in any log."""
    changes: int
    """Changes of consumers."""


def stay_alive(tx: Transaction, me: str, alive_ms: int) -> None:
    """Marks a collector as alive for some time; forgets those that died long ago."""
    tx.run(
        "INSERT INTO collectors (id, alive_until)"
        " VALUES (?1, clock_timestamp() + ?2 * interval '1 millisecond')"
        " ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until",
        me,
        alive_ms,
    )
    tx.run("DELETE FROM collectors WHERE alive_until < clock_timestamp() - interval '1 day'")


def leave(tx: Transaction, me: str) -> None:
    """Frees everything that a collector holds."""
    tx.run("DELETE FROM collectors WHERE id = ?1", me)


def take_over(
    tx: Transaction, consumer: str, me: str, limit: int, *, forgotten: bool
) -> list[Unit]:
    """Holds the units that were released, or whose holder is no longer alive.

    Args:
        tx: The transaction.
        consumer: The consumer.
        me: The collector that takes them.
        limit: Largest number of units to take.
        forgotten: Whether the collector may hold units that it does not know of; those, too.
    """
    rows = tx.rows(
        "SELECT u.seq, u.unit_id, u.members, u.partial FROM consumers c"
        " JOIN progress p ON p.consumer = c.name AND p.settled_ms IS NULL"
        " JOIN units u ON u.log = c.log AND u.unit_id = p.unit_id AND u.seq > c.start_seq"
        " WHERE c.name = ?1 AND NOT EXISTS (SELECT 1 FROM collectors h"
        " WHERE h.id = p.holder AND h.alive_until > clock_timestamp() AND h.id <> ?3)"
        " ORDER BY u.seq LIMIT ?2",
        consumer,
        limit,
        me if forgotten else _FREE,
    )
    units = [
        Unit(seq, unit_id, tuple(json.loads(members)), bool(partial))
        for seq, unit_id, members, partial in rows
    ]
    hold(tx, consumer, me, units)
    return units


def hold(tx: Transaction, consumer: str, me: str, units: Sequence[Unit]) -> None:
    """Holds units."""
    if units:
        tx.run_many(
            "INSERT INTO progress (consumer, unit_id, attempts, holder) VALUES (?1, ?2, 0, ?3)"
            " ON CONFLICT (consumer, unit_id) DO UPDATE SET holder = excluded.holder",
            [(consumer, unit.unit_id, me) for unit in units],
        )


def held(tx: Transaction, consumer: str, me: str, unit_ids: Sequence[str]) -> set[str]:
    """Returns which of the units a collector still holds."""
    rows = tx.rows(
        "SELECT unit_id FROM progress WHERE consumer = ?1 AND settled_ms IS NULL"  # noqa: S608
        f" AND holder = ?2 AND unit_id {tx.within(3)}",
        consumer,
        me,
        tx.listed(unit_ids),
    )
    return {unit_id for (unit_id,) in rows}


def release(tx: Transaction, consumer: str, me: str) -> None:
    """Releases the units that a collector holds for a consumer."""
    tx.run(
        "UPDATE progress SET holder = ?3"
        " WHERE consumer = ?1 AND settled_ms IS NULL AND holder = ?2",
        consumer,
        me,
        _FREE,
    )


def to_score(tx: Transaction, me: str, limit: int) -> list[str]:
    """Takes the sessions that wait for the scorer of a collector that is no longer alive."""
    rows = tx.rows(
        "SELECT session_id FROM sessions s WHERE due_ms IS NOT NULL AND scorer IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM collectors h"
        " WHERE h.id = s.scorer AND h.alive_until > clock_timestamp())"
        " ORDER BY due_ms LIMIT ?1",
        limit,
    )
    ids = [session_id for (session_id,) in rows]
    tx.run_many("UPDATE sessions SET scorer = ?1 WHERE session_id = ?2", [(me, one) for one in ids])
    return ids


def turn(tx: Transaction, duty: str, every_ms: int) -> bool:
    """Returns whether it is time for a duty, which then is not due for a while."""
    rows = tx.rows(
        "INSERT INTO duties VALUES (?1, clock_timestamp() + ?2 * interval '1 millisecond')"
        " ON CONFLICT (duty) DO UPDATE SET next_at = excluded.next_at"
        " WHERE duties.next_at <= clock_timestamp() RETURNING duty",
        duty,
        every_ms,
    )
    return bool(rows)


def tell_changed(tx: Transaction) -> None:
    """Tells the other collectors that a consumer was changed."""
    tx.add_total(_CHANGES, 1)


def tell_moved(tx: Transaction, consumer: str, me: str) -> None:
    """Tells the other collectors that the units fetched for a consumer are void."""
    tell_changed(tx)
    tx.run(
        "UPDATE consumers SET moved_at = ?1, moved_by = ?2 WHERE name = ?3",
        tx.total(_CHANGES),
        me,
        consumer,
    )


def hear(tx: Transaction, heard: News, me: str) -> tuple[News, list[str]]:
    """Returns the news, and the consumers that others have moved since `heard`."""
    news = News(tx.total(LAST_SEQ), tx.total(_CHANGES))
    if news.changes == heard.changes:
        return news, []
    moved = tx.rows(
        "SELECT name FROM consumers WHERE moved_at > ?1 AND moved_by <> ?2 ORDER BY name",
        heard.changes,
        me,
    )
    return news, [name for (name,) in moved]
