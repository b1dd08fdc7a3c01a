"""Units on their way to a consumer: fetched, loaded and settled, over a transaction."""

import json
from collections.abc import Mapping, Sequence

from rollmesh.collector.delivery.loads import Judge, Loaded, damage, judge_unit
from rollmesh.collector.delivery.records import arrays_size
from rollmesh.collector.delivery.units import Page, Settlement, Unit, own_log
from rollmesh.collector.storage.sql.consumers import known
from rollmesh.collector.storage.sql.lists import add_filtered
from rollmesh.collector.storage.sql.transaction import Transaction
from rollmesh.collector.storage.store import LOAD_BYTES
from rollmesh.runtime.errors import SessionDamagedError

_SCAN = 2000
"""Largest number of units examined for one page."""


def fetch(tx: Transaction, name: str, after: int, limit: int) -> Page:
    """Returns a page of unsettled units; advances the floor past the leading settled units."""
    consumer = known(tx, name)
    begin = cursor = max(after, consumer.floor)
    rows = tx.rows(
        f"SELECT u.seq, u.unit_id, u.members, u.partial, p.settled_ms, {tx.held}"  # noqa: S608
        " FROM units u LEFT JOIN progress p ON p.consumer = ?1 AND p.unit_id = u.unit_id"
        " WHERE u.log = ?2 AND u.seq > ?3 ORDER BY u.seq LIMIT ?4",
        name,
        consumer.log,
        begin,
        _SCAN,
    )
    units: list[Unit] = []
    floor, leading = begin, True
    for seq, unit_id, members, partial, settled_ms, held in rows:
        if settled_ms is None:
            if not held and len(units) == limit:
                break
            leading = False
            if not held:
                units.append(Unit(seq, unit_id, tuple(json.loads(members)), bool(partial)))
        elif leading:
            floor = seq
        cursor = seq
    if begin == consumer.floor and floor > begin:
        tx.run("UPDATE consumers SET floor = ?1 WHERE name = ?2", floor, name)
    more = len(rows) == _SCAN or (bool(rows) and cursor < rows[-1][0])
    return Page(units, cursor, more)


def load(tx: Transaction, units: Sequence[Unit], judge: Judge) -> list[Loaded | None]:
    """Loads the first of the units, up to `LOAD_BYTES`."""
    ids = dict.fromkeys(session_id for unit in units for session_id in unit.session_ids)
    rows = tx.rows(
        f"SELECT session_id, head FROM sessions WHERE session_id {tx.within(1)}",  # noqa: S608
        tx.listed(ids),
    )
    heads: dict[str, bytes] = dict(rows)
    found: list[Loaded | None] = []
    size = 0
    for unit in units:
        loaded = judge_unit(unit, [heads.get(session_id) for session_id in unit.session_ids], judge)
        found.append(loaded)
        if loaded and loaded.verdict.delivers:
            size += sum(map(arrays_size, loaded.heads))
            if size >= LOAD_BYTES:
                break
    out = [one for one in found if one and one.verdict.delivers]
    arrays = tx.arrays([session_id for one in out for session_id in one.unit.session_ids])
    return [one and _with_arrays(one, arrays) for one in found]


def _with_arrays(loaded: Loaded, arrays: Mapping[str, bytes | SessionDamagedError]) -> Loaded:
    """Returns a unit with its arrays, if it is delivered and they are not damaged."""
    if not loaded.verdict.delivers:
        return loaded
    for session_id in loaded.unit.session_ids:
        found = arrays[session_id]
        if isinstance(found, SessionDamagedError):
            return Loaded(loaded.unit, damage(found))
        loaded.arrays.append(found)
    return loaded


def count_attempts(
    tx: Transaction, name: str, loaded: Sequence[Loaded | None], now_ms: int
) -> list[Loaded | None]:
    """Counts attempts for the units that are delivered, and lists what is removed from them.

    Returns:
        The units; None in place of one that left the consumer's log.

    Raises:
        ConsumerUnknownError: The consumer was deleted.
    """
    found = {one.unit.unit_id: one for one in loaded if one and one.verdict.delivers}
    rows = tx.rows(
        "INSERT INTO progress (consumer, unit_id, attempts)"  # noqa: S608
        " SELECT c.name, u.unit_id, 1 FROM consumers c JOIN units u ON u.log = c.log"
        f" WHERE c.name = ?1 AND u.unit_id {tx.within(2)}"
        " ON CONFLICT (consumer, unit_id) DO UPDATE SET attempts = progress.attempts + 1"
        " RETURNING unit_id, attempts",
        name,
        tx.listed(found),
    )
    if not rows and found:
        known(tx, name)
    for unit_id, attempts in rows:
        found[unit_id].attempt = attempts
    removed = [one.removed(now_ms) for one in found.values()]
    add_filtered(tx, own_log(name), [entry for entry in removed if entry])
    return [one if one and (one.attempt or not one.verdict.delivers) else None for one in loaded]


def settle(tx: Transaction, name: str, settlements: Sequence[Settlement], now_ms: int) -> list[str]:
    """Settles units; returns the ids of those that were open."""
    log = known(tx, name).log
    rows = tx.rows(
        "UPDATE progress SET settled_ms = ?2 WHERE consumer = ?1 AND settled_ms IS NULL"  # noqa: S608
        f" AND attempts > 0 AND unit_id {tx.within(3)} RETURNING unit_id",
        name,
        now_ms,
        tx.listed(one.unit_id for one in settlements if not one.reason),
    )
    done = {unit_id for (unit_id,) in rows}
    count = len(done)
    filtered = {one.unit_id: one for one in settlements if one.reason}
    if filtered:
        rows = tx.rows(
            "INSERT INTO progress (consumer, unit_id, attempts, settled_ms)"  # noqa: S608
            f" SELECT ?1, unit_id, 0, ?2 FROM units WHERE log = ?3 AND unit_id {tx.within(4)}"
            " ON CONFLICT (consumer, unit_id) DO UPDATE SET settled_ms = excluded.settled_ms"
            " WHERE progress.settled_ms IS NULL RETURNING unit_id",
            name,
            now_ms,
            log,
            tx.listed(filtered),
        )
        changed = {unit_id for (unit_id,) in rows}
        entries = [one.entry(now_ms) for id_, one in filtered.items() if id_ in changed]
        add_filtered(tx, own_log(name), entries)
        done |= changed
    if done:
        tx.run(
            "UPDATE consumers SET settled = settled + ?1, acknowledged = acknowledged + ?2"
            " WHERE name = ?3",
            len(done),
            count,
            name,
        )
    return [id_ for id_ in dict.fromkeys(one.unit_id for one in settlements) if id_ in done]
