"""The session store: its contents and operations, over either database.

An operation is a function over a `Transaction`. `Store` runs each in a transaction of its own, and
a dialect extends it: `sqlite.py` (one collector, large arrays in files) and
`postgres.py` (several collectors that share the work of every consumer).

Every operation is durable before it returns, and a repeat changes nothing. Times are milliseconds
since 1970 UTC, and `now_ms` is the current time.
"""

import asyncio
import hashlib
import json
import logging
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from rollmesh.collector import log
from rollmesh.collector.log import (
    GROUP_LOG,
    SESSION_LOG,
    Arrival,
    Loaded,
    Member,
    Page,
    Settlement,
    Unit,
    own_log,
)
from rollmesh.collector.settings import other_unit, updated
from rollmesh.runtime import Row, Statements, check_current
from rollmesh.runtime.codec import apply_rewards
from rollmesh.runtime.errors import (
    CheckpointUnknownError,
    ConsumerExistsError,
    ConsumerUnknownError,
    GroupSizeError,
    InvalidFieldError,
    RepeatConflictError,
    SessionDamagedError,
    SessionUnknownError,
    StoreFullError,
    TooManyCheckpointsError,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2 as pb, session_pb2

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")
LOAD_BYTES = 4 * 1024 * 1024
"""Bytes of arrays after which `load` stops. The last unit may exceed them."""
RETRY_MS = 1000
"""Delay before a refused call is retried, milliseconds."""
LAST_SEQ = "last_seq"
"""Name of the total that is the last position in any log."""
_SCAN = 2000
"""Largest number of units examined for one page."""
_GROUPS_AT_ONCE, _DUE_AT_ONCE, _REMOVED_AT_ONCE, _REMOVALS = 200, 200, 200, 20
_MAX_TOKEN_DIGITS = 18
_NO_END = 2**62


REMEMBERED_MS = 30 * 24 * 3600 * 1000
"""How long ids of removed sessions are kept, milliseconds. A gateway may resend until then."""
_NEAR_FULL = 0.9
"""Fraction of the room above which settled sessions are removed at once, oldest first."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long settled sessions are kept, and how many bytes may be stored."""

    settled_ms: int
    """How long settled sessions are kept for a backward `Seek`, milliseconds."""
    max_bytes: int
    """Stored bytes at which new sessions are rejected."""

    def settled_before(self, stored_bytes: int, now_ms: int) -> int:
        """Returns the time before which a unit must have been settled to be removed now."""
        full = stored_bytes > _NEAR_FULL * self.max_bytes
        return now_ms if full else now_ms - self.settled_ms


class Transaction:
    """A transaction, which sees its own changes.

    Totals are kept in a table, so that no hot path counts rows. `write_totals` writes them.
    """

    def __init__(self, db: Statements, store: "Store") -> None:
        """Starts without changes. The connection is in a transaction already."""
        self.db = db
        """Its statements."""
        self.store = store
        self.left: set[int] = set()
        """Array files that may have lost their last session, in a store that has such files."""
        self._totals: dict[str, int] = {}
        self._added: Counter[str] = Counter()

    def total(self, name: str) -> int:
        """Returns a total."""
        if name not in self._totals:
            row = self.db.row("SELECT value FROM totals WHERE name = ?1", name)
            self._totals[name] = int(row[0]) if row else 0
        return self._totals[name] + self._added[name]

    def add(self, name: str, value: int) -> None:
        """Adds to a total."""
        self._added[name] += value

    def next(self, name: str) -> int:
        """Counts a total up and returns it."""
        self._added[name] += 1
        return self.total(name)

    def set(self, name: str, value: int) -> None:
        """Sets a total."""
        self._added[name] += value - self.total(name)

    def forget_totals(self, *names: str) -> None:
        """Removes totals."""
        for name in names:
            self.db.run("DELETE FROM totals WHERE name = ?1", name)
            self._totals[name] = self._added[name] = 0

    def write_totals(self) -> None:
        """Writes the totals that have changed. The commit follows."""
        added = [(name, value) for name, value in self._added.items() if value]
        if added:
            self.db.run_many(
                "INSERT INTO totals (name, value) VALUES (?1, ?2)"
                " ON CONFLICT (name) DO UPDATE SET value = totals.value + excluded.value",
                added,
            )


Work: TypeAlias = Callable[Concatenate[Transaction, _Arguments], _Result]


def store_id(tx: Transaction) -> str:
    """Returns the id of the store. A new store gets one."""
    row = tx.db.row("SELECT store_id FROM identity")
    if row is None:
        row = (uuid.uuid4().hex,)
        tx.db.run("INSERT INTO identity VALUES (?1)", *row)
    return str(row[0])


# Sessions that arrive, and the groups that they complete.


class Group(NamedTuple):
    """A stored group."""

    key: str
    size: int
    first_ms: int
    """When its first session arrived."""


def _ingest(tx: Transaction, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
    """Stores sessions that are new. A group is created by its first one."""
    ids: list[str] = []
    tombstones: list[str] = []  # of the sessions and their groups, if these were removed
    for arrival in arrivals:
        ids.append(arrival.record.session_id)
        tombstones += arrival.record.session_id, f"{GROUP_LOG}:{arrival.group()[0]}"
    found = tx.db.rows(
        f"SELECT session_id, 0 FROM sessions WHERE session_id {tx.db.within(1)}"
        f" UNION ALL SELECT id, 1 FROM removed WHERE id {tx.db.within(2)}",
        ids,
        tombstones,
    )
    known = {id_ for id_, _ in found}
    gone = {id_ for id_, is_removed in found if is_removed}
    repeats: list[bool] = []
    new: list[tuple[Arrival, str, int | None]] = []
    size, keys = 0, set[str]()
    for arrival in arrivals:
        session_id = arrival.record.session_id
        repeats.append(session_id in known)
        if session_id in known:
            continue
        known.add(session_id)
        key, group_size = arrival.group()
        if f"{GROUP_LOG}:{key}" in gone:  # delivered to all, so this one is surplus
            group_size = None
        new.append((arrival, key, group_size))
        size += len(arrival.head) + len(arrival.arrays or b"")
        if group_size is not None:
            keys.add(key)
    tx.store.stored(tx, arrivals)
    if not new:
        return repeats
    _check_room(tx, size)
    groups = _find_groups(tx, keys)
    created: list[Group] = []
    rows: list[tuple[Any, ...]] = []
    ready: list[tuple[str, str]] = []
    for arrival, key, group_size in new:
        record, due_ms = arrival.record, arrival.due_ms(now_ms)
        if group_size is not None and key not in groups:
            groups[key] = Group(key, group_size, now_ms)
            created.append(groups[key])
        elif group_size is not None and groups[key].size != group_size:
            raise GroupSizeError(
                "group_size",
                f"is {group_size}, and group {record.group_id!r} of run {record.run_id!r} has "
                f"{groups[key].size}; give all its sessions one, and each run a run_id",
            )
        count = len(record.trajectories)
        given = (record.session_id, key, record.sample_index, due_ms, int(due_ms is None), count)
        rows.append((*given, arrival.head, arrival.arrays, *arrival.columns))
        tx.add("trajectories", count)
        if due_ms is None:
            ready.append((record.session_id, key))
    tx.db.run_many("INSERT INTO groups (group_key, size, first_ms) VALUES (?1, ?2, ?3)", created)
    names = ("session_id", "group_key", "sample_index", "due_ms", "ready", "trajectories", "head")
    columns = (*names, "arrays", *tx.store.columns)
    places = ", ".join([f"?{number}" for number in range(1, len(columns) + 1)])
    tx.db.run_many(f"INSERT INTO sessions ({', '.join(columns)}) VALUES ({places})", rows)
    tx.store.resized(tx, size)
    tx.add("sessions", len(rows))
    _add_to_logs(tx, ready, groups, now_ms)
    return repeats


def _check_room(tx: Transaction, size: int) -> None:
    if tx.store.stored_bytes(tx) + size > tx.store.retention.max_bytes:
        held: int = tx.db.value("SELECT count(*) FROM marks")
        why = f"; {held} of its units are kept for checkpoints, so release some" if held else ""
        raise StoreFullError(f"the collector's store is full{why}", retry_delay_ms=RETRY_MS)


def _find_groups(tx: Transaction, keys: Collection[str]) -> dict[str, Group]:
    """Returns the groups that exist, by key: superseded sessions belong to no group."""
    if not keys:
        return {}
    rows = tx.db.rows(
        f"SELECT group_key, size, first_ms FROM groups WHERE group_key {tx.db.within(1)}",
        [*keys],
    )
    return {row[0]: Group(*row) for row in rows}


def _make_ready(tx: Transaction, sessions: Sequence[Row], now_ms: int) -> None:
    """Adds sessions that waited for rewards, with the keys of their groups, to the logs."""
    tx.db.run_many(
        "UPDATE sessions SET ready = 1, due_ms = NULL WHERE session_id = ?1",
        [(session_id,) for session_id, _ in sessions],
    )
    _add_to_logs(tx, sessions, _find_groups(tx, {key for _, key in sessions}), now_ms)


def _add_to_logs(
    tx: Transaction, sessions: Sequence[Row], groups: Mapping[str, Group], now_ms: int
) -> None:
    """Adds sessions, with the keys of their groups, to the shared logs.

    The logs of consumers with a group policy are filled later, by `_fill`.
    """
    if not sessions:
        return
    made = [(SESSION_LOG, tx.next(LAST_SEQ), one, "[]", 0, now_ms) for one, _ in sessions]
    _add_units(tx, SESSION_LOG, made)
    _decide(tx, GROUP_LOG, log.SHARED_POLICY, sessions, groups, now_ms)


def _add_units(
    tx: Transaction, name: str, units: Sequence[tuple[str, int, str, str, int, int]]
) -> None:
    """Adds units to a log: its name, position, id, members as JSON, whether partial, when made."""
    tx.db.run_many(
        "INSERT INTO units (log, seq, unit_id, members, partial, made_ms)"
        " VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        units,
    )
    tx.add(f"log:{name}", len(units))


def _decide(
    tx: Transaction,
    name: str,
    consumer: pb.Consumer,
    sessions: Sequence[Row],
    groups: Mapping[str, Group],
    now_ms: int,
) -> None:
    """Makes groups units of a log if it is time, and lists sessions that came too late.

    In the log of one consumer, groups with all their samples get the positions that they have in
    `GROUP_LOG`.
    """
    keys = {key for _, key in sessions} | groups.keys()
    rows = tx.db.rows(
        f"SELECT unit_id, members FROM units WHERE log = ?2 AND unit_id {tx.db.within(1)}",
        [*keys],
        name,
    )
    formed_before: dict[str, str] = dict(rows)
    gone: set[str] = set()
    if others := keys - groups.keys():  # of superseded sessions, or removed
        rows = tx.db.rows(
            f"SELECT id FROM removed WHERE id {tx.db.within(1)}",
            [f"{GROUP_LOG}:{key}" for key in others],
        )
        gone = {id_.removeprefix(f"{GROUP_LOG}:") for (id_,) in rows}
    entries: list[pb.FilteredEntry] = []
    for session_id, key in sessions:
        unit = formed_before.get(key)
        if key in gone or (unit is not None and session_id not in json.loads(unit)):
            entries.append(log.left_out(key, session_id, now_ms))
    waiting = [group for key, group in groups.items() if key not in formed_before]
    for at in range(0, len(waiting), _GROUPS_AT_ONCE):
        some = waiting[at : at + _GROUPS_AT_ONCE]
        waiting_keys = [group.key for group in some]
        members_of = _members(tx, consumer, waiting_keys)
        positions: dict[str, tuple[int, int]] = {}
        if name != GROUP_LOG:
            rows = tx.db.rows(
                "SELECT unit_id, seq, made_ms FROM units"
                f" WHERE log = ?2 AND unit_id {tx.db.within(1)}",
                waiting_keys,
                GROUP_LOG,
            )
            positions = {unit_id: (seq, made_ms) for unit_id, seq, made_ms in rows}
        units: list[tuple[str, int, str, str, int, int]] = []
        dropped: list[tuple[str, str, int]] = []
        for key, size, first_ms in some:
            members = members_of.get(key, [])
            formed = log.form(consumer.groups, size, members, now_ms - first_ms)
            if formed is None:
                continue
            seq, made_ms = positions.get(key) or (tx.next(LAST_SEQ), now_ms)
            members_json = json.dumps(formed.members)
            units.append((name, seq, key, members_json, int(formed.partial), made_ms))
            dropped += [(consumer.name, key, now_ms)] * formed.dropped
            entries += log.entries_of(key, formed, members, now_ms)
        if not units:
            continue
        _add_units(tx, name, units)
        formed_now = [key for _, _, key, *_ in units]
        if name == GROUP_LOG:
            tx.db.run(f"UPDATE groups SET open = 0 WHERE group_key {tx.db.within(1)}", formed_now)
        tx.db.run_many(
            "INSERT INTO progress (consumer, unit_id, attempts, settled_ms) VALUES (?1, ?2, 0, ?3)"
            " ON CONFLICT (consumer, unit_id)"
            " DO UPDATE SET settled_ms = coalesce(progress.settled_ms, excluded.settled_ms)",
            dropped,
        )
        tx.db.run(  # including those that settled a group under another policy
            "UPDATE consumers SET settled = settled + (SELECT count(*) FROM progress p"
            " WHERE p.consumer = consumers.name AND p.settled_ms IS NOT NULL"
            f" AND p.unit_id {tx.db.within(1)}) WHERE log = ?2",
            formed_now,
            name,
        )
    if entries and name != GROUP_LOG:  # without those that an earlier policy listed
        rows = tx.db.rows(
            f"SELECT unit_id, entry FROM filtered WHERE unit_id {tx.db.within(1)} AND owner = ?2",
            [entry.delivery_id for entry in entries],
            name,
        )
        found = [log.read_entry(unit_id, data, is_group=False) for unit_id, data in rows]
        known = {(one.delivery_id, one.reason, one.session_id) for one in found}
        entries = [
            one for one in entries if (one.delivery_id, one.reason, one.session_id) not in known
        ]
    _list_filtered(tx, name, entries)


def _members(tx: Transaction, consumer: pb.Consumer, keys: list[str]) -> dict[str, list[Member]]:
    """Returns the ready members of groups in order of arrival, by the keys of the groups.

    A head is read only where it decides: under a policy that asks for usable samples or whole
    groups, and where sessions share a seat. Without its head a member is taken for a usable sample.
    """
    policy = consumer.groups
    judges = policy.whole or policy.HasField("samples") or policy.HasField("min_samples")
    rows = tx.db.rows(
        f"SELECT group_key, session_id, sample_index, {'head' if judges else 'NULL'} FROM sessions"
        f" WHERE group_key {tx.db.within(1)} AND ready = 1 ORDER BY n",
        keys,
    )
    heads: dict[str, bytes] = {}
    seats = Counter([(key, index) for key, _, index, _ in rows])
    if not judges and len(seats) < len(rows):
        rivals = [one for key, one, index, _ in rows if seats[key, index] > 1]
        heads = dict(
            tx.db.rows(
                f"SELECT session_id, head FROM sessions WHERE session_id {tx.db.within(1)}",
                rivals,
            )
        )
    members: dict[str, list[Member]] = {}
    for key, session_id, index, data in rows:
        member = Member(session_id, index)
        if (data := data or heads.get(session_id)) is not None:
            try:
                head = log.read_head(session_id, data)
            except SessionDamagedError:
                member = Member(session_id, index, usable=False)
            else:
                usable = not policy.HasField("samples") or log.usable(consumer, head)
                is_lost = head.outcome == session_pb2.SESSION_OUTCOME_LOST
                member = Member(session_id, index, usable, is_lost)
        members.setdefault(key, []).append(member)
    return members


def _fill(tx: Transaction, consumer: pb.Consumer, now_ms: int) -> bool:
    """Decides about the groups of a consumer with its own group policy, and fills its log.

    Looks at the groups of the sessions that became ready since the last call, and at open groups
    whose deadline has passed since. Groups with all their samples never wait, so these are all.

    Returns:
        Whether there are new units.
    """
    name = own_log(consumer.name)
    judged, late_to, before = _JUDGED + name, _LATE_TO + name, tx.total(f"log:{name}")
    sessions = tx.db.rows(
        "SELECT s.session_id, s.group_key FROM units u JOIN sessions s ON s.session_id = u.unit_id"
        " WHERE u.log = ?1 AND u.seq > ?2 ORDER BY u.seq",
        SESSION_LOG,
        tx.total(judged),
    )
    tx.set(judged, tx.total(LAST_SEQ))
    groups = _find_groups(tx, {key for _, key in sessions})
    if (overdue_ms := _overdue_ms(consumer, now_ms)) is not None:
        rows = tx.db.rows(_OVERDUE, tx.total(late_to), overdue_ms)
        groups |= {row[0]: Group(*row) for row in rows}
        tx.set(late_to, overdue_ms + 1)  # also back, if a clock was set back
    if sessions or groups:
        _decide(tx, name, consumer, sessions, groups, now_ms)
    return tx.total(f"log:{name}") > before


def _fill_own_log(tx: Transaction, name: str, now_ms: int) -> "Known":
    """Returns the progress of a consumer, after filling its log if it is its own."""
    known = _known(tx, name)
    if known.log != own_log(name):
        return known
    _fill(tx, find_consumer(tx, name), now_ms)
    return _known(tx, name)


def _overdue_ms(consumer: pb.Consumer, now_ms: int) -> int | None:
    """Returns until when the first session of a group whose deadline has passed arrived."""
    policy = consumer.groups
    return now_ms - policy.deadline_ms if policy.HasField("deadline_ms") else None


def _with_policies(tx: Transaction) -> list[pb.Consumer]:
    rows = tx.db.rows(
        "SELECT name, settings FROM consumers WHERE log NOT IN (?1, ?2)", SESSION_LOG, GROUP_LOG
    )
    return [one for row in rows if (one := _read_consumer(*row)) is not None]


def _tick(tx: Transaction, now_ms: int) -> bool:
    late = tx.db.rows(
        "SELECT session_id, group_key FROM sessions WHERE due_ms <= ?1 LIMIT ?2",
        now_ms,
        _DUE_AT_ONCE,
    )
    _make_ready(tx, late, now_ms)
    tx.add("reward_timeouts", len(late))
    filled = [_fill(tx, consumer, now_ms) for consumer in _with_policies(tx)]
    return bool(late) or any(filled)


def _is_due(tx: Transaction, now_ms: int) -> bool:
    """Returns whether `_tick` has anything to do."""
    if tx.db.rows("SELECT 1 FROM sessions WHERE due_ms <= ?1 LIMIT 1", now_ms):
        return True
    for consumer in _with_policies(tx):
        name, overdue_ms = own_log(consumer.name), _overdue_ms(consumer, now_ms)
        if tx.total(_JUDGED + name) < tx.total(LAST_SEQ):
            return True
        since_ms = tx.total(_LATE_TO + name)
        if overdue_ms is not None and tx.db.rows(f"{_OVERDUE} LIMIT 1", since_ms, overdue_ms):
            return True
    return False


def set_rewards(
    tx: Transaction,
    session_id: str,
    rewards: session_pb2.SessionRewards,
    request_id: str,
    now_ms: int,
    *,
    is_late: bool = False,
) -> bool:
    """Sets a session's rewards and returns whether it is a repeat, which changes nothing.

    Late rewards change nothing either, if the session has a reward or others were set.

    Raises:
        SessionUnknownError: There is no such session.
        RepeatConflictError: An earlier request with this id set other rewards.
        InvalidFieldError: A reward does not fit the session.
    """
    row = tx.db.row(
        "SELECT head, due_ms, group_key FROM sessions WHERE session_id = ?1", session_id
    )
    if row is None:
        raise _session_unknown(session_id)
    data = rewards.SerializeToString(deterministic=True)
    digest = hashlib.blake2b(data, digest_size=16).digest()
    sql = "SELECT digest FROM reward_requests WHERE session_id = ?1 AND request_id = ?2"
    first = tx.db.row(sql, session_id, request_id)
    if first is not None:
        if bytes(first[0]) != digest:
            raise RepeatConflictError(
                f"request_id: {request_id!r} was already used with other rewards, which were kept; "
                "use another id"
            )
        return True
    tx.db.run("INSERT INTO reward_requests VALUES (?1, ?2, ?3)", session_id, request_id, digest)
    head = log.read_head(session_id, row[0])
    others = "SELECT 1 FROM reward_requests WHERE session_id = ?1 AND request_id <> ?2"
    if is_late and (head.HasField("reward") or tx.db.row(others, session_id, request_id)):
        return True
    apply_rewards(head, rewards)
    data = head.SerializeToString()
    tx.db.run("UPDATE sessions SET head = ?1 WHERE session_id = ?2", data, session_id)
    tx.store.resized(tx, len(data) - len(row[0]))
    if row[1] is not None:
        _make_ready(tx, [(session_id, row[2])], now_ms)
    else:
        _list_change(tx, session_id)
    return False


# What changes of sessions that may be delivered already.

_CHANGE = "last_change"
"""Name of the total that is the number of the last change."""


def _list_change(tx: Transaction, session_id: str) -> None:
    tx.db.run(
        "INSERT INTO changes VALUES (?1, ?2) ON CONFLICT (session_id) DO UPDATE SET n = excluded.n",
        session_id,
        tx.next(_CHANGE),
    )


def changes_after(tx: Transaction, token: str, limit: int) -> list[tuple[str, str]]:
    """Returns the token after each change and its session, in order of the last changes.

    A token of another store, which this one may have replaced, begins.

    Raises:
        InvalidFieldError: The token is invalid.
    """
    store, _, after = token.rpartition("-")
    own = tx.store.store_id
    begin = _read_token(after, "resume_token") if store == own or not store else 0
    rows = tx.db.rows(
        "SELECT n, session_id FROM changes WHERE n > ?1 ORDER BY n LIMIT ?2", begin, limit
    )
    return [(f"{own}-{n}", session_id) for n, session_id in rows]


# What consumers do not receive: listed and counted.


def _list_filtered(tx: Transaction, owner: str, entries: Sequence[pb.FilteredEntry]) -> None:
    """Lists and counts filtered units of a consumer, or for all readers of a log."""
    if not entries:
        return
    tx.db.run_many(
        "INSERT INTO filtered (owner, unit_id, entry) VALUES (?1, ?2, ?3)",
        [(owner, entry.delivery_id, entry.SerializeToString()) for entry in entries],
    )
    tx.db.run_many(
        "INSERT INTO filtered_counts VALUES (?1, ?2, ?3, ?4) ON CONFLICT (owner, reason)"
        " DO UPDATE SET units = filtered_counts.units + excluded.units,"
        " trajectories = filtered_counts.trajectories + excluded.trajectories",
        [(owner, reason, *counts) for reason, counts in log.counts_of(entries).items()],
    )


# Consumers: created, changed, moved and deleted.

_JUDGED, _LATE_TO = "judged:", "late_to:"
"""Prefixes of the totals of a consumer's own log: the position up to which sessions were looked at,
and from when the first session of the groups arrived whose deadline was not looked at."""
_OVERDUE = (
    "SELECT group_key, size, first_ms FROM groups WHERE open = 1 AND first_ms >= ?1"
    " AND first_ms <= ?2"
)
_OPEN = (
    "SELECT count(*) FROM units u WHERE u.log = ?1 AND u.seq > ?2 AND u.seq < ?4 AND NOT EXISTS"
    " (SELECT 1 FROM progress p WHERE p.consumer = ?3 AND p.unit_id = u.unit_id"
    " AND p.settled_ms IS NOT NULL)"
)


class Known(NamedTuple):
    """The progress of a consumer."""

    log: str
    start_seq: int
    """Units up to this position are not delivered."""
    floor: int
    """All units up to this position are settled."""
    settled: int
    acknowledged: int


def _known(tx: Transaction, name: str) -> Known:
    row = tx.db.row(
        "SELECT log, start_seq, floor, settled, acknowledged FROM consumers WHERE name = ?1", name
    )
    if row is None:
        raise consumer_unknown(name)
    return Known(*row)


def create_consumer(
    tx: Transaction, consumer: pb.Consumer, start: pb.Position | None, now_ms: int
) -> pb.Consumer:
    """Creates and returns a consumer. One with damaged settings gets these, and keeps its position.

    Raises:
        ConsumerExistsError: A consumer has this name.
        InvalidFieldError: The start position does not exist.
    """
    name, read = consumer.name, log.log_of(consumer)
    row = tx.db.row("SELECT settings, log FROM consumers WHERE name = ?1", name)
    if row is None:
        shared = SESSION_LOG if read == SESSION_LOG else GROUP_LOG
        start_seq = _first_seq(tx, shared, start) - 1 if start else 0
        tx.db.run(
            "INSERT INTO consumers (name, log, settings, start_seq, floor, settled, seen_ms)"
            " VALUES (?1, ?2, ?3, ?4, ?4, 0, ?5)",
            name,
            read,
            consumer.SerializeToString(),
            start_seq,
            now_ms,
        )
    elif _read_consumer(name, row[0]) is not None:
        raise ConsumerExistsError(
            f"consumer.name: {name!r} exists; update it, or choose another name"
        )
    elif (row[1] == SESSION_LOG) != (read == SESSION_LOG):
        raise other_unit(name)
    _decide_anew(tx, consumer, now_ms)
    tx.store.tell(tx, name)
    return find_consumer(tx, name)


def update_consumer(tx: Transaction, changes: pb.Consumer, now_ms: int) -> tuple[pb.Consumer, bool]:
    """Changes the settings of a consumer, as `settings.updated` says.

    With a new group policy or a later run, every group that is not settled is decided anew.

    Returns:
        The consumer, and whether one of these changed, so that units fetched for it are void.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
        InvalidFieldError: A field is invalid.
    """
    stored = find_consumer(tx, changes.name)
    seen_ms = stored.seen_unix_ms
    stored.ClearField("seen_unix_ms")
    after = updated(stored, changes)
    moved = (after.groups, after.policy_run) != (stored.groups, stored.policy_run)
    if moved:
        _decide_anew(tx, after, now_ms)
    elif after != stored:
        _set_settings(tx, after)
    tx.store.tell(tx, after.name, moved=moved)
    after.seen_unix_ms = seen_ms
    return after, moved


def find_consumer(tx: Transaction, name: str) -> pb.Consumer:
    """Returns a consumer.

    Raises:
        ConsumerUnknownError: The consumer is unknown, or its settings are damaged.
    """
    row = tx.db.row("SELECT name, settings, seen_ms FROM consumers WHERE name = ?1", name)
    consumer = _read_consumer(*row) if row else None
    if consumer is None:
        raise consumer_unknown(name)
    return consumer


def find_consumers(
    tx: Transaction, page_size: int, page_token: str
) -> tuple[list[pb.Consumer], str]:
    """Returns consumers ordered by name, without damaged ones, and the token of the next page."""
    sql = "SELECT name, settings, seen_ms FROM consumers WHERE name > ?1 ORDER BY name LIMIT ?2"
    rows = tx.db.rows(sql, page_token, page_size)
    found = [_read_consumer(*row) for row in rows]
    return [one for one in found if one], rows[-1][0] if len(rows) == page_size else ""


def _read_consumer(name: str, data: bytes, seen_ms: int = 0) -> pb.Consumer | None:
    """Parses the stored settings of a consumer, or returns None if they cannot be read.

    Such a consumer keeps its position until it is created again.
    """
    with suppress(DecodeError):
        consumer = pb.Consumer.FromString(data)
        if consumer.name == name:
            consumer.seen_unix_ms = seen_ms
            return consumer
    _tell_damaged(name, bytes(data))
    return None


@lru_cache(maxsize=64)
def _tell_damaged(consumer: str, data: bytes) -> None:  # noqa: ARG001 - once for what is stored
    _log.error("consumer damaged: its settings cannot be read", extra=fields(consumer=consumer))


def _set_settings(tx: Transaction, consumer: pb.Consumer) -> None:
    tx.db.run(
        "UPDATE consumers SET settings = ?1, log = ?2 WHERE name = ?3",
        consumer.SerializeToString(),
        log.log_of(consumer),
        consumer.name,
    )


def _decide_anew(tx: Transaction, consumer: pb.Consumer, now_ms: int) -> None:
    """Moves a consumer to the log of its group policy. Settled units stay settled."""
    name = consumer.name
    _set_settings(tx, consumer)
    tx.db.run("DELETE FROM progress WHERE consumer = ?1 AND settled_ms IS NULL", name)
    _leave_own_log(tx, name)
    tx.db.run("UPDATE consumers SET floor = start_seq WHERE name = ?1", name)
    if log.log_of(consumer) == own_log(name):
        _fill(tx, consumer, now_ms)
    _count_open(tx, name)


def seek(tx: Transaction, name: str, position: pb.Position, now_ms: int) -> pb.SeekResponse:
    """Moves a consumer. Units it had settled at or after the position are redelivered.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
        InvalidFieldError: The position does not exist.
    """
    consumer = _fill_own_log(tx, name, now_ms)
    first = _first_seq(tx, consumer.log, position)
    again: int = tx.db.value(
        "SELECT count(*) FROM units u JOIN progress p ON p.consumer = ?1"
        " AND p.unit_id = u.unit_id AND p.settled_ms IS NOT NULL"
        " WHERE u.log = ?2 AND u.seq >= ?3",
        name,
        consumer.log,
        first,
    )
    # Those skipped by an earlier start or seek have no progress.
    again += tx.db.value(_OPEN, consumer.log, first - 1, name, consumer.start_seq + 1)
    skipped: int = tx.db.value(_OPEN, consumer.log, consumer.start_seq, name, first)
    tx.db.run(
        "DELETE FROM progress WHERE consumer = ?1 AND (settled_ms IS NULL"
        " OR unit_id IN (SELECT unit_id FROM units WHERE log = ?2 AND seq >= ?3))",
        name,
        consumer.log,
        first,
    )
    tx.db.run("UPDATE consumers SET start_seq = ?1, floor = ?1 WHERE name = ?2", first - 1, name)
    _forget_checkpoints(tx, name)
    tx.db.run("DELETE FROM scores WHERE length(scores) = 0")  # a teacher may have changed
    _count_open(tx, name)
    tx.store.tell(tx, name, moved=True)
    return pb.SeekResponse(again=again, skipped=skipped)


def delete_consumer(tx: Transaction, name: str) -> bool:
    """Deletes a consumer and its data, and returns whether it was known."""
    deleted = tx.db.rows("DELETE FROM consumers WHERE name = ?1 RETURNING name", name)
    tx.db.run("DELETE FROM progress WHERE consumer = ?1", name)
    tx.db.run("DELETE FROM steps WHERE consumer = ?1", name)
    _forget_checkpoints(tx, name)
    _leave_own_log(tx, name)
    tx.db.run("DELETE FROM filtered WHERE owner = ?1", own_log(name))
    tx.db.run("DELETE FROM filtered_counts WHERE owner = ?1", own_log(name))
    tx.store.tell(tx, name)
    return bool(deleted)


def touch(tx: Transaction, names: Iterable[str], now_ms: int) -> None:
    """Records that consumers have streams now. Unknown consumers are ignored."""
    sql = "UPDATE consumers SET seen_ms = ?1 WHERE name = ?2"
    tx.db.run_many(sql, [(now_ms, name) for name in sorted(names)])


def expire_consumers(tx: Transaction, before_ms: int) -> list[str]:
    """Deletes the consumers that have had no stream since and returns their names."""
    rows = tx.db.rows("SELECT name FROM consumers WHERE seen_ms < ?1", before_ms)
    return [name for (name,) in sorted(rows) if delete_consumer(tx, name)]


def standing(tx: Transaction, name: str) -> pb.ConsumerStats:
    """Counts the units of a consumer. With its own group policy, as of the last `tick`.

    Returns:
        Its stored counts. Units that are not settled count as ready, including leased ones.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
    """
    consumer = _known(tx, name)
    rows = tx.db.rows(
        "SELECT reason, CAST(sum(units) AS BIGINT), CAST(sum(trajectories) AS BIGINT)"
        " FROM filtered_counts WHERE owner IN (?1, ?2) GROUP BY reason ORDER BY reason",
        own_log(name),
        consumer.log,
    )
    return pb.ConsumerStats(
        name=name,
        acknowledged=consumer.acknowledged,
        ready=tx.total(f"log:{consumer.log}") - consumer.settled,
        filtered=[
            pb.FilteredCount(reason=reason, units=units, trajectories=trajectories)
            for reason, units, trajectories in rows
        ],
    )


def _first_seq(tx: Transaction, name: str, position: pb.Position) -> int:
    """Returns the position of the first unit at or after `position`, which must be set."""
    if position.HasField("delivery_id"):
        row = tx.db.row(
            "SELECT seq FROM units WHERE log = ?1 AND unit_id = ?2", name, position.delivery_id
        )
        if row is None:
            raise InvalidFieldError(
                "position.delivery_id", f"unit {position.delivery_id!r} is not stored"
            )
        return int(row[0])
    if position.end == pb.LOG_END_EARLIEST:
        return 1
    if position.HasField("unix_ms"):
        seq = tx.db.value(
            "SELECT min(seq) FROM units WHERE log = ?1 AND made_ms >= ?2", name, position.unix_ms
        )
        if seq is not None:
            return int(seq)
    return tx.total(LAST_SEQ) + 1


def _leave_own_log(tx: Transaction, name: str) -> None:
    own = own_log(name)
    tx.db.run("DELETE FROM units WHERE log = ?1", own)
    tx.forget_totals(f"log:{own}", _JUDGED + own, _LATE_TO + own)


def _count_open(tx: Transaction, name: str) -> None:
    """Recounts the settled units after a change of log or position. It scans all units."""
    consumer = _known(tx, name)
    left: int = tx.db.value(_OPEN, consumer.log, consumer.start_seq, name, _NO_END)
    settled = tx.total(f"log:{consumer.log}") - left
    tx.db.run("UPDATE consumers SET settled = ?1 WHERE name = ?2", settled, name)


# Checkpoints of a consumer. A unit that is settled after one has the number of the last one as its
# mark. A unit that a checkpoint would redeliver is therefore one with its number or a higher mark.

MOST_CHECKPOINTS = 64
"""Maximum number of checkpoints of a consumer."""
_LAST_CHECKPOINT = "last_checkpoint"
_MARK = (
    "INSERT INTO marks (consumer, unit_id, mark) SELECT p.consumer, p.unit_id, k.n FROM progress p"
    " JOIN (SELECT max(n) AS n FROM checkpoints WHERE consumer = ?1) k ON k.n IS NOT NULL"
    " WHERE p.consumer = ?1 AND p.settled_ms IS NOT NULL AND p.unit_id {within}"
    " ON CONFLICT (consumer, unit_id) DO UPDATE SET mark = excluded.mark"
)


def create_checkpoint(
    tx: Transaction, request: pb.CreateCheckpointRequest, now_ms: int
) -> pb.Checkpoint:
    """Makes a checkpoint and returns it. One with this id stays as it is.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
        TooManyCheckpointsError: The consumer has as many as it may have.
        InvalidFieldError: A delivery that is not trained was removed.
    """
    name, made = request.consumer, request.checkpoint_id
    known, settings = _known(tx, name), find_consumer(tx, name)
    check_current("run", request.run, settings.policy_run)
    found = {one.checkpoint_id: one for one in find_checkpoints(tx, name)}
    if made not in found:
        if not request.HasField("keep") and len(found) >= MOST_CHECKPOINTS:
            raise TooManyCheckpointsError(
                f"consumer: {name!r} has {len(found)} checkpoints; release some, or give `keep`"
            )
        version = settings.policy_version if settings.HasField("policy_version") else None
        tx.db.run(
            "INSERT INTO checkpoints (consumer, checkpoint_id, n, start_seq, policy_version,"
            " made_ms) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            *(name, made, tx.next(_LAST_CHECKPOINT), known.start_seq, version, now_ms),
        )
        untrained = [*request.untrained_delivery_ids]
        rows = tx.db.rows(
            f"SELECT unit_id FROM units WHERE log = ?2 AND unit_id {tx.db.within(1)}",
            untrained,
            known.log,
        )
        if gone := set(request.untrained_delivery_ids) - {unit_id for (unit_id,) in rows}:
            raise InvalidFieldError(
                "untrained_delivery_ids",
                f"{sorted(gone)[0]!r} is not stored any more; make a checkpoint before the first "
                "acknowledgement, or acknowledge what is trained",
            )
        tx.db.run(_MARK.format(within=tx.db.within(2)), name, untrained)
        if request.HasField("keep"):
            for older in [*found, made][: -request.keep]:
                release_checkpoint(tx, name, older)
        found = {one.checkpoint_id: one for one in find_checkpoints(tx, name)}
    return found[made]


def find_checkpoints(tx: Transaction, name: str) -> list[pb.Checkpoint]:
    """Returns the checkpoints of a consumer, oldest first."""
    rows = tx.db.rows(
        "SELECT checkpoint_id, made_ms, policy_version, (SELECT count(*) FROM marks m"
        " WHERE m.consumer = k.consumer AND m.mark >= k.n)"
        " FROM checkpoints k WHERE consumer = ?1 ORDER BY n",
        name,
    )
    return [
        pb.Checkpoint(
            checkpoint_id=id_, created_unix_ms=made_ms, units=units, policy_version=version
        )
        for id_, made_ms, version, units in rows
    ]


def restore_checkpoint(tx: Transaction, request: pb.RestoreCheckpointRequest) -> int:
    """Moves a consumer back to a checkpoint. Returns the number of units that it gets again.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
        CheckpointUnknownError: It has no such checkpoint.
        RunAbandonedError: The consumer is of a later run.
    """
    name, checkpoint_id = request.consumer, request.checkpoint_id
    consumer = find_consumer(tx, name)
    row = tx.db.row(
        "SELECT n, start_seq, policy_version FROM checkpoints"
        " WHERE consumer = ?1 AND checkpoint_id = ?2",
        name,
        checkpoint_id,
    )
    if row is None:
        raise CheckpointUnknownError(
            f"checkpoint_id: consumer {name!r} has no checkpoint {checkpoint_id!r}; it was "
            "released, by a restore of an older one or by Seek too. Restore another one"
        )
    n, start_seq, version = row
    marked = "FROM marks WHERE consumer = ?1 AND mark >= ?2"
    again: int = tx.db.value(f"SELECT count(*) {marked}", name, n)
    tx.db.run(
        "DELETE FROM progress WHERE consumer = ?1"
        f" AND (settled_ms IS NULL OR unit_id IN (SELECT unit_id {marked}))",
        name,
        n,
    )
    tx.db.run(f"DELETE {marked}", name, n)
    tx.db.run("DELETE FROM checkpoints WHERE consumer = ?1 AND n > ?2", name, n)
    tx.db.run("UPDATE consumers SET start_seq = ?1, floor = ?1 WHERE name = ?2", start_seq, name)
    consumer.ClearField("policy_version")
    if version is not None or consumer.filter.HasField("max_policy_lag"):  # which needs one
        consumer.policy_version = version or 0
    _set_settings(tx, updated(consumer, pb.Consumer(name=name, policy_run=request.policy_run)))
    _count_open(tx, name)
    tx.store.tell(tx, name, moved=True)
    return again


def release_checkpoint(tx: Transaction, name: str, checkpoint_id: str) -> None:
    """Releases a checkpoint of a consumer. An unknown one changes nothing.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
    """
    _known(tx, name)
    tx.db.run(
        "DELETE FROM checkpoints WHERE consumer = ?1 AND checkpoint_id = ?2", name, checkpoint_id
    )
    tx.db.run(
        "DELETE FROM marks WHERE consumer = ?1 AND mark < coalesce("
        "(SELECT min(n) FROM checkpoints WHERE consumer = ?1), ?2)",
        name,
        _NO_END,
    )


def _forget_checkpoints(tx: Transaction, name: str) -> None:
    tx.db.run("DELETE FROM checkpoints WHERE consumer = ?1", name)
    tx.db.run("DELETE FROM marks WHERE consumer = ?1", name)


# Steps that the trainer of a consumer reported.

MOST_STEPS = 1000
"""Maximum number of steps that are kept for a consumer."""


def report_step(tx: Transaction, name: str, step: pb.TrainingStep, run: int) -> None:
    """Stores a step of a run, in the place of itself and of later ones.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
        RunAbandonedError: The consumer is of a later run.
    """
    check_current("run", run, find_consumer(tx, name).policy_run)
    tx.db.run("DELETE FROM steps WHERE consumer = ?1 AND step >= ?2", name, step.step)
    tx.db.run(
        "INSERT INTO steps (consumer, step, report) VALUES (?1, ?2, ?3)",
        *(name, step.step, step.SerializeToString()),
    )
    tx.db.run(
        "DELETE FROM steps WHERE consumer = ?1 AND step <= (SELECT step FROM steps"
        " WHERE consumer = ?1 ORDER BY step DESC LIMIT 1 OFFSET ?2)",
        *(name, MOST_STEPS),
    )


def find_steps(tx: Transaction, name: str, limit: int) -> list[pb.TrainingStep]:
    """Returns the last steps of a consumer's trainer, oldest first.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
    """
    _known(tx, name)
    rows = tx.db.rows(
        "SELECT report FROM steps WHERE consumer = ?1 ORDER BY step DESC LIMIT ?2", name, limit
    )
    return [pb.TrainingStep.FromString(report) for (report,) in reversed(rows)]


# Units on their way to a consumer: fetched, loaded and settled.


def fetch(tx: Transaction, name: str, after: int, limit: int, now_ms: int) -> Page:
    """Returns units that the consumer has not settled and that were not fetched before.

    The groups of a consumer with its own group policy are judged here. The floor advances past
    the leading settled units.

    Raises:
        ConsumerUnknownError: The consumer was deleted.
    """
    consumer = _fill_own_log(tx, name, now_ms)
    begin = cursor = max(after, consumer.floor)
    sql = (
        f"SELECT u.seq, u.unit_id, u.members, u.partial, p.settled_ms, {tx.store.held}"
        " FROM units u LEFT JOIN progress p ON p.consumer = ?1 AND p.unit_id = u.unit_id"
        " WHERE u.log = ?2 AND u.seq > ?3 ORDER BY u.seq LIMIT ?4"
    )
    rows = tx.db.rows(sql, name, consumer.log, begin, _SCAN)
    units: list[Unit] = []
    floor, leading = begin, True
    for seq, unit_id, members, partial, settled_ms, held in rows:
        if settled_ms is None:
            if not held and len(units) == limit:
                break
            leading = False
            if not held:
                ids = tuple(json.loads(members)) or (unit_id,)
                units.append(Unit(seq, unit_id, ids, bool(partial)))
        elif leading:
            floor = seq
        cursor = seq
    if begin == consumer.floor and floor > begin:
        tx.db.run("UPDATE consumers SET floor = ?1 WHERE name = ?2", floor, name)
    return Page(units, cursor, len(rows) == _SCAN or (bool(rows) and cursor < rows[-1][0]))


def load(
    tx: Transaction, consumer: pb.Consumer, units: Sequence[Unit], now_ms: int
) -> list[Loaded | None]:
    """Loads units, and counts attempts for those the filter does not drop.

    Returns:
        The units in order, at least the first, up to `LOAD_BYTES` of arrays, or None for a unit
        that was removed, left the consumer's log, or was taken over by another collector.

    Raises:
        ConsumerUnknownError: The consumer was deleted.
    """
    return count_attempts(tx, consumer.name, read_units(tx, consumer, units), now_ms)


def read_units(
    tx: Transaction, consumer: pb.Consumer, units: Sequence[Unit]
) -> list[Loaded | None]:
    """Reads and filters the first of the units, up to `LOAD_BYTES`."""
    ids = [session_id for unit in units for session_id in unit.session_ids]
    rows = tx.db.rows(
        f"SELECT session_id, head FROM sessions WHERE session_id {tx.db.within(1)}",
        ids,
    )
    heads: dict[str, bytes] = dict(rows)
    scores: dict[log.RowKey, bytes] = {}  # by the consumer's teacher. Empty ones are a refusal
    if consumer.HasField("teacher"):
        rows = tx.db.rows(
            "SELECT session_id, row_index, scores FROM scores"
            f" WHERE teacher = ?1 AND session_id {tx.db.within(2)}",
            _teacher_key(consumer.teacher),
            ids,
        )
        scores = {(session_id, at): bytes(data) for session_id, at, data in rows}
    found: list[Loaded | None] = []
    out: list[Loaded] = []
    size = 0
    for unit in units:
        loaded = log.judge_unit(
            unit, [heads.get(one) for one in unit.session_ids], consumer, scores
        )
        found.append(loaded)
        if loaded and loaded.delivers:
            out.append(loaded)
            size += sum(map(log.arrays_size, loaded.heads))
            size += sum([len(data) for (one, _), data in scores.items() if one in unit.session_ids])
            if size >= LOAD_BYTES:
                break
    arrays = tx.store.arrays(tx, [one for loaded in out for one in loaded.unit.session_ids])
    for loaded in out:
        for session_id in loaded.unit.session_ids:
            data = arrays[session_id]
            if isinstance(data, SessionDamagedError):
                loaded.drop_damaged(data)
                break
            loaded.arrays.append(data)
    return found


def count_attempts(
    tx: Transaction, name: str, loaded: Sequence[Loaded | None], now_ms: int
) -> list[Loaded | None]:
    """Counts attempts for delivered units, and lists the trajectories removed from them."""
    found = {one.unit.unit_id: one for one in loaded if one and one.delivers}
    rows = tx.db.rows(
        "INSERT INTO progress (consumer, unit_id, attempts)"
        " SELECT c.name, u.unit_id, 1 FROM consumers c JOIN units u ON u.log = c.log"
        f" WHERE c.name = ?1 AND u.unit_id {tx.db.within(2)}"
        " ON CONFLICT (consumer, unit_id) DO UPDATE SET attempts = progress.attempts + 1"
        " RETURNING unit_id, attempts",
        name,
        [*found],
    )
    if not rows and found:
        _known(tx, name)
    entries: list[pb.FilteredEntry] = []
    for unit_id, attempt in rows:
        one = found[unit_id]
        one.attempt = attempt
        if attempt == 1 and one.verdict.removed:
            removed = one.verdict.removed
            entries.append(pb.FilteredEntry(delivery_id=unit_id, unix_ms=now_ms, removed=removed))
    _list_filtered(tx, own_log(name), entries)
    return [one if one and (one.attempt or not one.delivers) else None for one in loaded]


def settle(
    tx: Transaction,
    name: str,
    settlements: Sequence[Settlement],
    now_ms: int,
    run: int | None = None,
) -> list[str]:
    """Settles units and returns the ids of those that were open.

    An acknowledgement counts only for units delivered since the consumer's last seek. `run` is the
    run of the trainer that sent it.

    Raises:
        RunAbandonedError: Another collector has moved the consumer to a later run.
    """
    read = _known(tx, name).log
    if run is not None:
        check_current("acknowledge", run, find_consumer(tx, name).policy_run)
    rows = tx.db.rows(
        "UPDATE progress SET settled_ms = ?2 WHERE consumer = ?1 AND settled_ms IS NULL"
        f" AND attempts > 0 AND unit_id {tx.db.within(3)} RETURNING unit_id",
        name,
        now_ms,
        [one.unit_id for one in settlements if not one.reason],
    )
    done = {unit_id for (unit_id,) in rows}
    acknowledged = len(done)
    filtered = {one.unit_id: one for one in settlements if one.reason}
    if filtered:
        rows = tx.db.rows(
            "INSERT INTO progress (consumer, unit_id, attempts, settled_ms)"
            f" SELECT ?1, unit_id, 0, ?2 FROM units WHERE log = ?3 AND unit_id {tx.db.within(4)}"
            " ON CONFLICT (consumer, unit_id) DO UPDATE SET settled_ms = excluded.settled_ms"
            " WHERE progress.settled_ms IS NULL RETURNING unit_id",
            name,
            now_ms,
            read,
            [*filtered],
        )
        dropped = {unit_id for (unit_id,) in rows}
        entries = [
            pb.FilteredEntry(delivery_id=id_, reason=reason, unix_ms=now_ms, removed=removed)
            for id_, reason, removed in filtered.values()
            if id_ in dropped
        ]
        _list_filtered(tx, own_log(name), entries)
        done |= dropped
    if done:
        tx.db.run(_MARK.format(within=tx.db.within(2)), name, [*done])
        tx.db.run(
            "UPDATE consumers SET settled = settled + ?1, acknowledged = acknowledged + ?2"
            " WHERE name = ?3",
            len(done),
            acknowledged,
            name,
        )
    return [id_ for id_ in dict.fromkeys(one.unit_id for one in settlements) if id_ in done]


# What teachers have scored.


class Unscored(NamedTuple):
    """A trajectory that a teacher is to score."""

    key: log.RowKey
    model: str
    """The model that answered in its session."""
    token_ids: bytes
    """uint32 [N], little-endian."""
    start: int
    """Index of the first sampled token."""


def _teacher_key(teacher: pb.Teacher) -> str:
    return f"{teacher.top_k}:{teacher.model}"


def find_unscored(
    tx: Transaction, consumer: pb.Consumer, unit: Unit, session_id: str
) -> list[Unscored]:
    """Returns the trajectories of a session that its consumer's teacher is to score.

    Those of a damaged session have no token ids.
    """
    (loaded,) = read_units(tx, consumer, [unit])
    rows = [at for one, at in loaded.unscored if one == session_id] if loaded else []
    if loaded is None or not rows:
        return []
    head = loaded.heads[unit.session_ids.index(session_id)]
    arrays = tx.store.arrays(tx, [session_id])[session_id]
    if not isinstance(arrays, SessionDamagedError):
        log.join(head, arrays)
    trajectories = [(at, head.trajectories[at]) for at in rows]
    return [
        Unscored((session_id, at), head.model, row.tokens.token_ids_u32le, row.prompt_tokens)
        for at, row in trajectories
    ]


def add_scores(tx: Transaction, teacher: pb.Teacher, key: log.RowKey, scores: bytes) -> None:
    """Stores the scores of a trajectory, or empty bytes if the teacher cannot score it.

    Nothing changes if it has some, or if its session was removed. A full store has a tenth more
    room for scores: the sessions that fill it may wait for them, and are not removed before.

    Raises:
        StoreFullError: There is no room until sessions are settled and removed.
    """
    _check_room(tx, len(scores) - tx.store.retention.max_bytes // 10)
    added = tx.db.changed(
        "INSERT INTO scores (session_id, row_index, teacher, scores)"
        " SELECT session_id, ?2, ?3, ?4 FROM sessions WHERE session_id = ?1"
        " ON CONFLICT (session_id, teacher, row_index) DO NOTHING",
        *key,
        _teacher_key(teacher),
        scores,
    )
    if added:
        tx.store.resized(tx, len(scores))
        if scores:
            _list_change(tx, key[0])


def find_scores(tx: Transaction, session_id: str) -> list[tuple[int, bytes]]:
    """Returns the scores of a session by all teachers, with the index of each trajectory."""
    rows = tx.db.rows(
        "SELECT row_index, scores FROM scores WHERE session_id = ?1 ORDER BY row_index, teacher",
        session_id,
    )
    return [(at, bytes(data)) for at, data in rows if data]


MOST_ANNOTATIONS = 16
"""Largest number of annotations of a trajectory."""


def annotate(tx: Transaction, session_id: str, annotations: Sequence[pb.Annotation]) -> None:
    """Stores a trainer's numbers for the tokens of a session. An equal name replaces them.

    Raises:
        SessionUnknownError: There is no such session.
        InvalidFieldError: An annotation does not fit the session, or it has too many of them.
        StoreFullError: A tenth of the room is left, which is for sessions.
    """
    head = read_session(tx, session_id, arrays=False)
    counts = {one.trajectory_id: log.tokens_of(one) for one in head.trajectories}
    if head.HasField("tree"):
        counts[""] = log.tokens_of(head.tree)
    for at, one in enumerate(annotations):
        if one.trajectory_id not in counts:
            raise InvalidFieldError(
                f"annotations[{at}].trajectory_id",
                f"{one.trajectory_id!r} is not of this session; give one of {sorted(counts)[:8]}",
            )
        if len(one.values_f32le) != 4 * (count := counts[one.trajectory_id]):
            raise InvalidFieldError(
                f"annotations[{at}].values_f32le",
                f"has {len(one.values_f32le)} bytes; give 4 for each of the {count} tokens",
            )
    reserved = tx.store.retention.max_bytes // 10
    _check_room(tx, reserved + sum(len(one.values_f32le) for one in annotations))
    size = _annotations_size(tx, [session_id])
    tx.db.run_many(
        "INSERT INTO annotations VALUES (?1, ?2, ?3, ?4)"
        " ON CONFLICT (session_id, trajectory_id, name) DO UPDATE SET data = excluded.data",
        [(session_id, one.trajectory_id, one.name, one.values_f32le) for one in annotations],
    )
    most = tx.db.value(
        "SELECT max(names) FROM (SELECT count(*) AS names FROM annotations WHERE session_id = ?1"
        " GROUP BY trajectory_id) AS counted",
        session_id,
    )
    if most > MOST_ANNOTATIONS:
        raise InvalidFieldError(
            "annotations", f"makes {most} names of a trajectory; give at most {MOST_ANNOTATIONS}"
        )
    tx.store.resized(tx, _annotations_size(tx, [session_id]) - size)
    _list_change(tx, session_id)


def _annotations_size(tx: Transaction, session_ids: Sequence[str]) -> int:
    size: int = tx.db.value(
        "SELECT CAST(coalesce(sum(length(data)), 0) AS BIGINT) FROM annotations"
        f" WHERE session_id {tx.db.within(1)}",
        [*session_ids],
    )
    return size


def find_annotations(tx: Transaction, session_id: str) -> list[pb.Annotation]:
    """Returns the annotations of a session, by trajectory and name."""
    rows = tx.db.rows(
        "SELECT trajectory_id, name, data FROM annotations WHERE session_id = ?1"
        " ORDER BY trajectory_id, name",
        session_id,
    )
    return [
        pb.Annotation(name=name, trajectory_id=of, values_f32le=bytes(data))
        for of, name, data in rows
    ]


# Removal of the groups of sessions that every consumer has settled.

_NEEDED = """
SELECT 1 FROM consumers c JOIN sessions s ON s.group_key = k.group_key
LEFT JOIN units u ON u.log = c.log
  AND u.unit_id = CASE WHEN c.log = ?1 THEN s.session_id ELSE s.group_key END
LEFT JOIN progress p ON p.consumer = c.name
  AND p.unit_id = CASE WHEN c.log = ?1 THEN s.session_id ELSE s.group_key END
WHERE (c.log = ?1 OR EXISTS (SELECT 1 FROM groups g WHERE g.group_key = k.group_key))
  AND (u.seq IS NULL OR CASE WHEN p.settled_ms IS NULL THEN u.seq > c.start_seq
    ELSE p.settled_ms > ?4 OR EXISTS (SELECT 1 FROM marks m
      WHERE m.consumer = p.consumer AND m.unit_id = p.unit_id) END)"""
"""Units of a group that some consumer needs: it waits for them, or has not settled them, or settled
them too recently, or a checkpoint of it would redeliver them."""
_OVER = f"""
SELECT k.group_key FROM (SELECT DISTINCT group_key FROM sessions WHERE n > ?2 AND n <= ?3) k
WHERE NOT EXISTS (SELECT 1 FROM sessions w WHERE w.group_key = k.group_key AND w.ready = 0)
  AND NOT EXISTS ({_NEEDED})"""


def remove(tx: Transaction, keys: Sequence[str], now_ms: int) -> int:
    """Removes groups except their ids, and returns the number of sessions removed."""
    db = tx.db
    db.run("DELETE FROM removed WHERE removed_ms < ?1", now_ms - REMEMBERED_MS)
    if not keys:
        return 0
    rows = db.rows(
        f"SELECT session_id, trajectories FROM sessions WHERE group_key {db.within(1)}",
        [*keys],
    )
    tx.store.removing(tx, keys)
    ids, groups = [(session_id,) for session_id, _ in rows], [(key,) for key in keys]
    consumers = db.rows("SELECT name, log FROM consumers")
    logs = {GROUP_LOG, *(name for _, name in consumers)} - {SESSION_LOG}
    listed = [(GROUP_LOG, key) for key in keys]
    for name, read in consumers:  # a group may have the id of another session
        gone = [unit_id for (unit_id,) in (ids if read == SESSION_LOG else groups)]
        in_progress = [(name, unit_id) for unit_id in gone]
        db.run_many("DELETE FROM progress WHERE consumer = ?1 AND unit_id = ?2", in_progress)
        listed += [(own_log(name), unit_id) for unit_id in gone]
    in_logs = [(SESSION_LOG, *id_) for id_ in ids]
    in_logs += [(name, *key) for name in sorted(logs) for key in groups]
    db.run_many("DELETE FROM units WHERE log = ?1 AND unit_id = ?2", in_logs)
    db.run_many("DELETE FROM reward_requests WHERE session_id = ?1", ids)
    of_ids = f"FROM scores WHERE session_id {db.within(1)}"
    session_ids = [session_id for (session_id,) in ids]
    size: int = db.value(
        f"SELECT CAST(coalesce(sum(length(scores)), 0) AS BIGINT) {of_ids}", session_ids
    )
    tx.store.resized(tx, -size - _annotations_size(tx, session_ids))
    db.run(f"DELETE {of_ids}", session_ids)
    db.run_many("DELETE FROM annotations WHERE session_id = ?1", ids)
    db.run_many("DELETE FROM changes WHERE session_id = ?1", ids)
    db.run_many("DELETE FROM filtered WHERE owner = ?1 AND unit_id = ?2", listed)
    db.run_many("DELETE FROM sessions WHERE group_key = ?1", groups)
    db.run_many("DELETE FROM groups WHERE group_key = ?1", groups)
    tombstones = [*(id_ for (id_,) in ids), *(f"{GROUP_LOG}:{key}" for key in keys)]
    db.run_many(
        "INSERT INTO removed VALUES (?1, ?2)"
        " ON CONFLICT (id) DO UPDATE SET removed_ms = excluded.removed_ms",
        [(id_, now_ms) for id_ in tombstones],
    )
    tx.add("sessions", -len(rows))
    tx.add("trajectories", -sum(count for _, count in rows))
    tx.add("removed_sessions", len(rows))
    return len(rows)


# The stored rows, as they are listed and read.


def filtered(
    tx: Transaction, consumer: str, page_size: int, page_token: str
) -> tuple[list[pb.FilteredEntry], str]:
    """Returns the entries filtered for a consumer, and the token of the next page.

    Raises:
        ConsumerUnknownError: The consumer is unknown.
    """
    after = _read_token(page_token)
    owners = (own_log(consumer), _known(tx, consumer).log)
    is_group = owners[1] != SESSION_LOG
    sql = (
        "SELECT n, unit_id, entry FROM filtered WHERE owner IN (?1, ?2) AND n > ?3"
        " ORDER BY n LIMIT ?4"
    )
    rows = tx.db.rows(sql, *owners, after, page_size)
    token = str(rows[-1][0]) if len(rows) == page_size else ""
    entries = [log.read_entry(unit_id, entry, is_group=is_group) for _, unit_id, entry in rows]
    return entries, token


def list_groups(
    tx: Transaction, request: pb.ListGroupsRequest, only: str, page_size: int
) -> pb.ListGroupsResponse:
    """Returns a page of groups. `only` is the key of a group, or empty."""
    after, page = _read_token(request.page_token), pb.ListGroupsResponse()
    states = {pb.GROUP_STATE_OPEN: " AND open = 1", pb.GROUP_STATE_COMPLETE: " AND open = 0"}
    named = "group_key = ?2" if only else "?2 = ''"
    sql = (
        "SELECT n, group_key, size, first_ms, open, (SELECT count(DISTINCT sample_index)"
        " FROM sessions s WHERE s.group_key = g.group_key) FROM groups g WHERE n > ?1"
        f"{states.get(request.state, '')} AND {named} ORDER BY n LIMIT ?3"
    )
    rows = tx.db.rows(sql, after, only, page_size)
    for n, key, size, first_ms, is_open, samples in rows:
        run_id, group_id = log.run_and_group(key)
        group = page.groups.add(run_id=run_id, group_id=group_id, group_size=size)
        group.samples, group.first_unix_ms = samples, first_ms
        group.state = pb.GROUP_STATE_OPEN if is_open else pb.GROUP_STATE_COMPLETE
        page.next_page_token = str(n) if len(rows) == page_size else ""
    return page


def read_session(tx: Transaction, session_id: str, *, arrays: bool) -> session_pb2.SessionRecord:
    """Returns one session.

    Raises:
        SessionUnknownError: There is no such session.
        SessionDamagedError: It cannot be read.
    """
    row = tx.db.row("SELECT head FROM sessions WHERE session_id = ?1", session_id)
    if row is None:
        raise _session_unknown(session_id)
    head = log.read_head(session_id, row[0])
    if not arrays:
        return head
    found = tx.store.arrays(tx, [session_id])[session_id]
    if isinstance(found, SessionDamagedError):
        raise found
    return log.join(head, found)


def sessions_after(
    tx: Transaction, token: str, limit: int, group: str = ""
) -> list[tuple[str, str]]:
    """Returns the token after each session and its id, after `token`, in order of arrival."""
    where, given = (" AND group_key = ?3", [group]) if group else ("", [])
    sql = f"SELECT n, session_id FROM sessions WHERE n > ?1{where} ORDER BY n LIMIT ?2"
    rows = tx.db.rows(sql, _read_token(token, "resume_token"), limit, *given)
    return [(str(n), session_id) for n, session_id in rows]


def counts(tx: Transaction) -> pb.GetStatsResponse:
    """Returns totals of the stored sessions, without the consumers."""
    return pb.GetStatsResponse(
        sessions=tx.total("sessions"),
        trajectories=tx.total("trajectories"),
        complete_groups=tx.total(f"log:{GROUP_LOG}"),
        open_groups=tx.db.value("SELECT count(*) FROM groups WHERE open = 1"),
        waiting_for_rewards=tx.db.value("SELECT count(*) FROM sessions WHERE due_ms IS NOT NULL"),
        reward_timeouts=tx.total("reward_timeouts"),
        stored_bytes=tx.store.stored_bytes(tx),
        removed_sessions=tx.total("removed_sessions"),
    )


def _read_token(token: str, field: str = "page_token") -> int:
    """Parses the token of a page or a read. An empty token begins.

    Raises:
        InvalidFieldError: The token is invalid.
    """
    if token and not (token.isascii() and token.isdigit() and len(token) <= _MAX_TOKEN_DIGITS):
        raise InvalidFieldError(field, "is invalid; give the token of an answer or leave it empty")
    return int(token or "0")


def _session_unknown(session_id: str) -> SessionUnknownError:
    return SessionUnknownError(f"session_id: no session {session_id!r} is stored here")


def consumer_unknown(name: str) -> ConsumerUnknownError:
    """Returns the error that no such consumer is known."""
    return ConsumerUnknownError(f"consumer: {name!r} is not known; create it first")


# The operations as methods, each in a transaction.


def _method(
    work: Work[_Arguments, _Result], *, reads: bool = False
) -> Callable[Concatenate["Store", _Arguments], Coroutine[Any, Any, _Result]]:
    """Returns a method that runs a function in a transaction, which may only read."""

    async def run(self: "Store", /, *args: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        return await (self.read if reads else self.write)(work, *args, **named)

    return run


class Store:
    """The stored sessions, groups and consumers. See `rollmesh.collector.open_store`.

    A dialect says how its database and the collectors that share it differ. The defaults are those
    of a store that only one collector has. The other methods are the functions above, which get
    their transaction from it.
    """

    store_id: str
    """Identifies the store: collectors with the same one share a store."""
    columns: ClassVar[tuple[str, ...]]
    """Its own columns of the table of sessions."""
    held: ClassVar[str] = "0"
    """SQL for whether the progress `p` of a unit means that a collector fetched it: 0 or 1."""

    @abstractmethod
    async def write(
        self, work: Work[_Arguments, _Result], *args: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Runs work in a transaction while no one else writes, and returns once it is durable."""

    async def read(
        self, work: Work[_Arguments, _Result], *args: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Runs work that only reads, in a transaction."""
        return await self.write(work, *args, **named)

    @abstractmethod
    def pack(self, arrivals: Sequence[Arrival]) -> None:
        """Brings sessions into their stored form. Runs in a worker thread."""

    def forget(self, packed: Sequence[Arrival]) -> None:
        """Undoes `pack` for sessions that were not stored. Runs in a worker thread."""

    @abstractmethod
    def stored_bytes(self, tx: Transaction) -> int:
        """Returns the bytes in use."""

    def resized(self, tx: Transaction, count: int) -> None:
        """Counts bytes of sessions that were added or, if negative, removed."""

    def stored(self, tx: Transaction, packed: Sequence[Arrival]) -> None:
        """Is called with the sessions that a call packed, before they are stored."""

    @abstractmethod
    def arrays(
        self, tx: Transaction, session_ids: Sequence[str]
    ) -> dict[str, bytes | SessionDamagedError]:
        """Returns the arrays of stored sessions, or the error that they are damaged.

        Raises:
            StoreError: The arrays cannot be read now.
        """

    @abstractmethod
    def removing(self, tx: Transaction, keys: Sequence[str]) -> None:
        """Is called before the sessions of groups are removed."""

    @abstractmethod
    async def to_score(self, limit: int) -> list[str]:
        """Takes sessions that wait for rewards and that no living collector has taken to score.

        Sessions that were ingested with a `hold_ms` are taken by the collector that ingested them.

        Returns:
            Their ids, most urgent first. Some may wait for other rewards than a scorer's.
        """

    async def changed(self) -> list[str]:
        """Waits until another collector makes something deliverable, or changes a consumer.

        Returns:
            The consumers that another collector moved, or whose group policy it changed: units
            fetched for them are void.
        """
        return await asyncio.Future[list[str]]()

    async def lost(self) -> str:
        """Returns the reason once the store is lost for good, and never if it may come back."""
        return await asyncio.Future[str]()

    def tell(self, tx: Transaction, consumer: str, *, moved: bool = False) -> None:
        """Tells other collectors that a consumer changed. `moved` voids the units they fetched."""

    async def release(self, consumer: str) -> None:
        """Releases everything that this collector fetched for the consumer."""

    def __init__(self, retention: Retention) -> None:
        """Takes the settings. The database has the tables of `SCHEMA`."""
        self.retention = retention
        self._retained_to = 0

    async def ingest(self, arrivals: Sequence[Arrival], now_ms: int) -> list[bool]:
        """Stores sessions, and returns for each whether it is a repeat, which changes nothing.

        After an error, any of them may or may not have been stored.

        Raises:
            GroupSizeError: A group was announced with a different size in its run.
            StoreFullError: There is no room until sessions are settled and removed.
        """
        await asyncio.to_thread(self.pack, arrivals)
        try:
            repeats = await self.write(_ingest, arrivals, now_ms)
        except (StoreFullError, InvalidFieldError):
            await asyncio.to_thread(self.forget, arrivals)
            raise
        if all(repeats):
            await asyncio.to_thread(self.forget, arrivals)
        return repeats

    set_rewards = _method(set_rewards)
    fetch = _method(fetch)
    load = _method(load)
    settle = _method(settle)
    unscored = _method(find_unscored, reads=True)
    add_scores = _method(add_scores)
    scores = _method(find_scores, reads=True)
    seek = _method(seek)
    create_checkpoint = _method(create_checkpoint)
    restore_checkpoint = _method(restore_checkpoint)
    release_checkpoint = _method(release_checkpoint)
    checkpoints = _method(find_checkpoints, reads=True)
    report_step = _method(report_step)
    steps = _method(find_steps, reads=True)
    annotate = _method(annotate)
    annotations = _method(find_annotations, reads=True)
    changes_after = _method(changes_after, reads=True)
    create_consumer = _method(create_consumer)
    update_consumer = _method(update_consumer)
    delete_consumer = _method(delete_consumer)
    expire_consumers = _method(expire_consumers)
    touch = _method(touch)
    consumer = _method(find_consumer, reads=True)
    consumers = _method(find_consumers, reads=True)
    standing = _method(standing, reads=True)
    filtered = _method(filtered, reads=True)
    groups = _method(list_groups, reads=True)
    session = _method(read_session, reads=True)
    sessions_after = _method(sessions_after, reads=True)
    counts = _method(counts, reads=True)

    async def tick(self, now_ms: int) -> bool:
        """Acts on deadlines that have passed and returns whether anything became deliverable."""
        return await self.read(_is_due, now_ms) and await self.write(_tick, now_ms)

    async def retain(self, now_ms: int) -> int:
        """Removes sessions that every consumer has settled, and expired records, in parts.

        A call examines a few thousand sessions and the next resumes there. Sessions are examined
        without a lock, and again with it before they are removed.

        Returns:
            The number of sessions removed.
        """

        def examine(tx: Transaction) -> tuple[int, list[str]]:
            """Returns where the next call begins, 0 at the end, and the groups nobody needs."""
            begin = self._retained_to
            sql = "SELECT n FROM sessions WHERE n > ?1 ORDER BY n LIMIT ?2"
            rows = tx.db.rows(sql, begin, _REMOVED_AT_ONCE)
            if not rows or not tx.db.row("SELECT 1 FROM consumers LIMIT 1"):
                return 0, []
            before_ms = self.retention.settled_before(self.stored_bytes(tx), now_ms)
            last: int = rows[-1][0]
            found = tx.db.rows(_OVER, SESSION_LOG, begin, last, before_ms)
            return last if len(rows) == _REMOVED_AT_ONCE else 0, [key for (key,) in found]

        removed = await self.write(remove, [], now_ms)
        for _ in range(_REMOVALS):
            cursor, keys = await self.read(examine)
            if keys:
                removed += await self.write(lambda tx: remove(tx, examine(tx)[1], now_ms))
            self._retained_to = cursor
            if not cursor:
                break
        return removed


# The tables. Their types, and columns that only one database has, are left open.

SCHEMA = """
CREATE TABLE IF NOT EXISTS identity (store_id {text} NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
  n {key}, session_id {text} NOT NULL UNIQUE, group_key {text} NOT NULL,
  sample_index BIGINT NOT NULL, due_ms BIGINT, ready BIGINT NOT NULL DEFAULT 0,
  trajectories BIGINT NOT NULL, head {blob} NOT NULL, arrays {blob}{of_sessions});
CREATE INDEX IF NOT EXISTS sessions_by_group ON sessions (group_key);
CREATE INDEX IF NOT EXISTS sessions_due ON sessions (due_ms) WHERE due_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS groups (
  n {key}, group_key {text} NOT NULL UNIQUE, size BIGINT NOT NULL,
  first_ms BIGINT NOT NULL, open BIGINT NOT NULL DEFAULT 1);
CREATE INDEX IF NOT EXISTS groups_waiting ON groups (n) WHERE open = 1;
CREATE INDEX IF NOT EXISTS groups_overdue ON groups (first_ms) WHERE open = 1;
DROP TABLE IF EXISTS group_deadlines;
CREATE TABLE IF NOT EXISTS units (
  log {text} NOT NULL, seq BIGINT NOT NULL, unit_id {text} NOT NULL, members {text} NOT NULL,
  partial BIGINT NOT NULL, made_ms BIGINT NOT NULL,
  PRIMARY KEY (log, seq), UNIQUE (log, unit_id)){by_key};
CREATE INDEX IF NOT EXISTS units_by_time ON units (log, made_ms, seq);
CREATE TABLE IF NOT EXISTS consumers (
  name {text} PRIMARY KEY, log {text} NOT NULL, settings {blob} NOT NULL, start_seq BIGINT NOT NULL,
  floor BIGINT NOT NULL, settled BIGINT NOT NULL, acknowledged BIGINT NOT NULL DEFAULT 0,
  seen_ms BIGINT NOT NULL{of_consumers});
CREATE TABLE IF NOT EXISTS progress (
  consumer {text} NOT NULL, unit_id {text} NOT NULL, attempts BIGINT NOT NULL, settled_ms BIGINT
  {of_progress}, PRIMARY KEY (consumer, unit_id)){by_key};
CREATE TABLE IF NOT EXISTS checkpoints (
  consumer {text} NOT NULL, n BIGINT NOT NULL, checkpoint_id {text} NOT NULL,
  start_seq BIGINT NOT NULL, policy_version BIGINT, made_ms BIGINT NOT NULL,
  PRIMARY KEY (consumer, n)){by_key};
CREATE TABLE IF NOT EXISTS marks (
  consumer {text} NOT NULL, unit_id {text} NOT NULL, mark BIGINT NOT NULL,
  PRIMARY KEY (consumer, unit_id)){by_key};
CREATE TABLE IF NOT EXISTS steps (
  consumer {text} NOT NULL, step BIGINT NOT NULL, report {blob} NOT NULL,
  PRIMARY KEY (consumer, step)){by_key};
CREATE TABLE IF NOT EXISTS filtered (
  n {key}, owner {text} NOT NULL, unit_id {text} NOT NULL, entry {blob} NOT NULL);
CREATE INDEX IF NOT EXISTS filtered_by_owner ON filtered (owner, n);
CREATE INDEX IF NOT EXISTS filtered_by_unit ON filtered (unit_id);
CREATE TABLE IF NOT EXISTS filtered_counts (
  owner {text} NOT NULL, reason BIGINT NOT NULL, units BIGINT NOT NULL,
  trajectories BIGINT NOT NULL, PRIMARY KEY (owner, reason)){by_key};
CREATE TABLE IF NOT EXISTS reward_requests (
  session_id {text} NOT NULL, request_id {text} NOT NULL, digest {blob} NOT NULL,
  PRIMARY KEY (session_id, request_id)){by_key};
CREATE TABLE IF NOT EXISTS scores (
  session_id {text} NOT NULL, teacher {text} NOT NULL, row_index BIGINT NOT NULL,
  scores {blob} NOT NULL, PRIMARY KEY (session_id, teacher, row_index));
CREATE TABLE IF NOT EXISTS annotations (
  session_id {text} NOT NULL, trajectory_id {text} NOT NULL, name {text} NOT NULL,
  data {blob} NOT NULL, PRIMARY KEY (session_id, trajectory_id, name)){by_key};
CREATE TABLE IF NOT EXISTS changes (
  session_id {text} PRIMARY KEY, n BIGINT NOT NULL){by_key};
CREATE INDEX IF NOT EXISTS changes_in_order ON changes (n);
CREATE TABLE IF NOT EXISTS removed (
  id {text} PRIMARY KEY, removed_ms BIGINT NOT NULL){by_key};
CREATE INDEX IF NOT EXISTS removed_by_time ON removed (removed_ms);
CREATE TABLE IF NOT EXISTS totals (name {text} PRIMARY KEY, value BIGINT NOT NULL){by_key};
"""
