"""Closed sessions in SQLite, to be selected, listed, searched, grouped and summed.

It is a copy without tokens, which a viewer makes anew whenever it starts.
"""

import json
import math
import re
import shlex
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from rollmesh.client import pass_at
from rollmesh.runtime import STRIDE, run_of, told, version_of
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import session_pb2, trajectory_pb2

# Which sessions a reader means: a query as a condition in SQL.

VALUE_CHARACTERS = 500
"""Longest value of metadata that is compared. Of a longer one, its beginning is."""
NUMBERS = {
    "reward": "reward",
    "turns": "turns",
    "tokens": "tokens",
    "sampled": "sampled",
    "trained": "trained",
    "malformed": "malformed",
    "lag": f"CASE WHEN last_version / {STRIDE} = first_version / {STRIDE}"
    " THEN last_version - first_version END",
    "seconds": "(closed - opened) / 1000.0",
}
"""The numbers of a session that may be bounded: the name and its SQL."""
_TERM = re.compile(r"(metadata\.[^=]+|[^=<>]+)(<=|>=|=|<|>)(.*)", re.DOTALL)
_METADATA = "metadata."
_MOST_TERMS = 20
_UNSPACED = re.compile("([\u3040-\u30ff\u3400-\u9fff])")
_Condition: TypeAlias = tuple[str, list[Any]]
"""SQL and its arguments."""


def spaced(text: str) -> str:
    """Returns a text whose Chinese and Japanese signs are words, so that each of them is found."""
    return _UNSPACED.sub(r" \1 ", text.replace("\0", " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which sessions are meant. None means any, as does an empty field of the last three."""

    run_id: str | None = None
    group_id: str | None = None
    model: str | None = None
    outcome: str | None = None
    purpose: str | None = None
    reason: str = ""
    words: str = ""
    """Words that stand in the session, each as a whole or as its beginning."""
    where: str = ""
    """Terms with blanks between them. All must hold.

    A term bounds a number of `NUMBERS`, as `reward>=0.5`, or is a pair of the metadata, as
    `task=sort`. `metadata.turns=5` is a pair whose key is also a number's name. `reward=none`
    means a session without the number. Quotes keep blanks: `task="two words"`.
    """

    @classmethod
    def read(cls, query: Mapping[str, str]) -> "Selection":
        """Takes its fields from a query."""
        names = [one.name for one in fields(cls)]
        return cls(**{name: query[name][:1000] for name in names if name in query})

    def sql(self) -> _Condition:
        """Returns the condition.

        Raises:
            InvalidFieldError: `where` has a term that is none.
        """
        return _all(self._equal("run_id", "group_id", "model", "purpose"), self._of_session())

    def sql_of_groups(self) -> _Condition:
        """Returns the condition of groups with a session that is meant. Raises as `sql`."""
        where, given = self._equal("run_id", "group_id", "model", "purpose")
        meant, more = self._of_session()
        having = f" HAVING max(n IN (SELECT n FROM sessions WHERE {meant}))" if meant != "1" else ""
        return f"{where} GROUP BY run_id, group_id{having}", given + more

    def _equal(self, *names: str) -> _Condition:
        given = {name: one for name in names if (one := getattr(self, name)) is not None}
        return " AND ".join(f"{name} = ?" for name in given) or "1", [*given.values()]

    def _of_session(self) -> _Condition:
        """Returns the condition on fields that differ between the sessions of a group."""
        parts = [self._equal("outcome")]
        if self.reason:
            parts.append(("n IN (SELECT n FROM reasons WHERE reason = ?)", [self.reason]))
        if found := self.words.split():
            words = " ".join('"' + spaced(one).replace('"', '""') + '"*' for one in found[:20])
            parts.append(("n IN (SELECT rowid FROM words WHERE words MATCH ?)", [words]))
        return _all(*parts, *map(_term, self._terms()))

    def _terms(self) -> list[str]:
        try:
            found = shlex.split(self.where)
        except ValueError:
            raise InvalidFieldError("where", "has a quote that does not end; add it") from None
        if len(found) > _MOST_TERMS:
            raise InvalidFieldError("where", f"has {len(found)} terms; give {_MOST_TERMS} at most")
        return found


def _all(*parts: _Condition) -> _Condition:
    wheres = [where for where, _ in parts if where != "1"]
    return " AND ".join(wheres) or "1", [value for _, given in parts for value in given]


def _term(text: str) -> _Condition:
    """Returns the condition of a term.

    Raises:
        InvalidFieldError: It is none.
    """
    found = _TERM.fullmatch(text)
    if found is None:
        raise InvalidFieldError("where", f"{text[:100]!r} is none of NAME=VALUE, NAME<NUMBER")
    name, sign, value = found.groups()
    if name in NUMBERS:
        if (sign, value) == ("=", "none"):
            return f"({NUMBERS[name]}) IS NULL", []
        return f"{NUMBERS[name]} {sign} ?", [_number(name, value)]
    if sign != "=":
        known = ", ".join(NUMBERS)
        raise InvalidFieldError("where", f"{name[:100]!r} is no number; give one of {known}")
    pair = [name.removeprefix(_METADATA), value[:VALUE_CHARACTERS]]
    return "n IN (SELECT n FROM metadata WHERE key = ? AND value = ?)", pair


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidFieldError("where", f"{name}: {text[:100]!r} is no number")
    return value


# The copy, and what it answers.

_BUCKETS = 200
_LAST, _LONGEST_PAGE = 2**31, 1000
_WORDS_CHARACTERS = 100_000
"""Longest text of a session that is searched."""
_MALFORMED = trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL
_LENGTH_CUT = trajectory_pb2.FIDELITY_REASON_LENGTH_CUT
_SCHEMA = """
CREATE TABLE sessions (
  n INTEGER PRIMARY KEY, session_id TEXT UNIQUE, run_id TEXT, group_id TEXT, sample_index INTEGER,
  group_size INTEGER, outcome TEXT, purpose TEXT, model TEXT, superseded INTEGER, reward REAL,
  turns INTEGER, tokens INTEGER, sampled INTEGER, trained INTEGER, malformed INTEGER, cut INTEGER,
  first_version INTEGER, last_version INTEGER, opened INTEGER, closed INTEGER, due INTEGER,
  error TEXT, task TEXT, numerics TEXT, file TEXT, in_mesh INTEGER
);
CREATE INDEX by_group ON sessions (
  run_id, group_id, superseded, group_size, reward, turns, tokens, malformed, opened, closed,
  last_version
);
CREATE INDEX by_version ON sessions (
  last_version, first_version, reward, turns, sampled, trained, outcome, cut, malformed, closed
);
CREATE INDEX evaluated ON sessions (run_id, model, last_version, task) WHERE purpose = 'EVAL';
CREATE INDEX by_due ON sessions (due) WHERE reward IS NULL;
CREATE INDEX by_closed ON sessions (closed);
CREATE INDEX by_reward ON sessions (reward IS NULL, reward, closed DESC);
CREATE INDEX by_best ON sessions (reward IS NULL, reward DESC, closed DESC);
CREATE INDEX by_turns ON sessions (turns DESC, closed DESC);
CREATE INDEX by_tokens ON sessions (tokens DESC, closed DESC);
CREATE INDEX by_malformed ON sessions (malformed DESC, closed DESC);
CREATE INDEX by_duration ON sessions (closed - opened DESC);
CREATE TABLE reasons (n INTEGER, reason TEXT, PRIMARY KEY (n, reason)) WITHOUT ROWID;
CREATE INDEX by_reason ON reasons (reason, n);
CREATE TABLE metadata (
  key TEXT, value TEXT, n INTEGER, PRIMARY KEY (key, value, n)
) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5 (body);
"""
_COLUMNS = (
    "session_id, run_id, group_id, sample_index, group_size, outcome, purpose, model, superseded,"
    " reward, turns, tokens, sampled, trained, malformed, cut, first_version, last_version,"
    " opened, closed, due, error, task, numerics, file, in_mesh"
)
_SESSION_ORDERS = {
    "newest": "closed DESC",
    "oldest": "closed",
    "lowest reward": "reward IS NULL, reward, closed DESC",
    "highest reward": "reward IS NULL, reward DESC, closed DESC",
    "most turns": "turns DESC, closed DESC",
    "most tokens": "tokens DESC, closed DESC",
    "most malformed calls": "malformed DESC, closed DESC",
    "longest": "closed - opened DESC",
}
_GROUP_ORDERS = {
    "newest": "closed DESC",
    "all wrong": "mean IS NULL, highest > lowest, mean, closed DESC",
    "all right": "mean IS NULL, highest > lowest, mean DESC, closed DESC",
    "largest spread": "variance IS NULL, variance DESC, closed DESC",
    "most tokens": "tokens DESC, closed DESC",
    "most malformed calls": "malformed DESC, closed DESC",
    "longest": "seconds DESC, closed DESC",
}


class Index:
    """The sessions. Its methods may be called by any thread."""

    def __init__(self) -> None:
        """Creates an empty index, in a file without a name: it ends with the process."""
        self._lock = threading.Lock()
        self._db = sqlite3.connect("", check_same_thread=False)
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._db.close()

    def add(self, records: Iterable[session_pb2.SessionRecord], file: str | None = None) -> int:
        """Adds sessions, or replaces them. Messages are searched. Other arrays are not needed.

        A session of a mesh and of a record is there once, and has the reward that the mesh says.

        Args:
            records: The sessions.
            file: The file of a record that has them. None: a mesh has them.

        Returns:
            The number of sessions that were left out, because a number of theirs is too large.
        """
        left_out = 0
        with self._lock, self._db:
            for record in records:
                try:
                    self._add(record, file)
                except OverflowError:
                    left_out += 1
        return left_out

    def set_rewards(self, rewards: Mapping[str, float]) -> None:
        """Sets the rewards of sessions that only a record has, by their ids."""
        with self._lock, self._db:
            self._db.executemany(
                "UPDATE sessions SET reward = ? WHERE session_id = ? AND NOT in_mesh",
                [(reward, session_id) for session_id, reward in rewards.items()],
            )

    def file_of(self, session_id: str) -> str | None:
        """Returns the file of a record that has a session."""
        found = self._rows("SELECT file FROM sessions WHERE session_id = ?", [session_id])
        return found[0]["file"] if found else None

    def _add(self, record: session_pb2.SessionRecord, file: str | None) -> None:
        row = (*_row(record), file, file is None)
        n = self._db.execute(
            f"INSERT INTO sessions ({_COLUMNS}) VALUES ({', '.join('?' * len(row))})"
            " ON CONFLICT (session_id) DO UPDATE SET"
            " reward = CASE WHEN in_mesh > excluded.in_mesh THEN reward ELSE excluded.reward END,"
            " file = coalesce(excluded.file, file), in_mesh = max(in_mesh, excluded.in_mesh)"
            " RETURNING n",
            row,
        ).fetchone()[0]
        reasons = {(n, one) for one in _reasons(record)}
        self._db.executemany("INSERT OR IGNORE INTO reasons VALUES (?, ?)", reasons)
        most = VALUE_CHARACTERS
        pairs = [(key[:most], value[:most], n) for key, value in record.metadata.items()]
        self._db.executemany("INSERT OR IGNORE INTO metadata VALUES (?, ?, ?)", pairs)
        self._db.execute(
            "INSERT OR REPLACE INTO words (rowid, body) VALUES (?, ?)", (n, _words(record))
        )

    def waiting(self, unix_ms: int) -> list[str]:
        """Returns ids of a mesh's sessions whose reward may come after a time, at most 100."""
        sql = (
            "SELECT session_id FROM sessions WHERE reward IS NULL AND due > ? AND due > closed"
            " AND in_mesh ORDER BY due LIMIT 100"
        )
        return [str(one["session_id"]) for one in self._rows(sql, [unix_ms])]

    def choices(self) -> dict[str, list[str]]:
        """Returns the values of the fields of a selection, at most 1,000 of each."""
        found = {
            name: [
                str(one["value"])
                for one in self._rows(
                    f"SELECT {name} value FROM sessions GROUP BY {name}"
                    " ORDER BY max(n) DESC LIMIT 1000",
                    [],
                )
            ]
            for name in ("run_id", "model", "outcome", "purpose")
        }
        reasons = self._rows("SELECT DISTINCT reason FROM reasons ORDER BY reason", [])
        return found | {
            "reason": [one["reason"] for one in reasons],
            "session_order": list(_SESSION_ORDERS),
            "group_order": list(_GROUP_ORDERS),
            "numbers": list(NUMBERS),
        }

    def sessions(
        self, chosen: Selection, order: str = "newest", offset: int = 0, limit: int = 100
    ) -> dict[str, Any]:
        """Returns a page of sessions, and the number of all pages' sessions."""
        where, given = chosen.sql()
        found = self._page(
            f"SELECT * FROM sessions WHERE {where}",
            given,
            _chosen("order", order, _SESSION_ORDERS),
            offset,
            limit,
        )
        total = self._rows(f"SELECT count(*) total FROM sessions WHERE {where}", given)
        return {"total": total[0]["total"], "rows": found}

    def groups(
        self, chosen: Selection, order: str = "newest", offset: int = 0, limit: int = 100
    ) -> dict[str, Any]:
        """Returns a page of groups with the numbers of their sessions, and the number of groups.

        A group is there with all of its sessions if one of them is meant.
        """
        where, given = chosen.sql_of_groups()
        found = self._page(
            "SELECT *, count(*) OVER () total FROM (SELECT run_id, group_id,"
            " max(group_size) group_size, count(*) sessions, avg(reward) mean,"
            " min(reward) lowest, max(reward) highest,"
            " avg(reward * reward) - avg(reward) * avg(reward) variance,"
            " sum(turns) turns, sum(tokens) tokens, sum(malformed) malformed,"
            " max(closed - opened) / 1000.0 seconds, max(closed) closed,"
            " max(last_version) last_version FROM sessions"
            f" WHERE group_id <> '' AND NOT superseded AND {where})",
            given,
            _chosen("order", order, _GROUP_ORDERS),
            offset,
            limit,
        )
        total = found[0]["total"] if found else 0
        return {"total": total, "rows": found}

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the last 100 evaluations, newest first: pass@k, errors and numerics of each.

        An evaluation is the sessions of a run for "eval" that one policy version sampled.
        """
        tasks = self._rows(
            "SELECT run_id, model, last_version, task, count(reward) results,"
            " coalesce(sum(reward >= 1), 0) passed, avg(reward) reward, count(*) sessions,"
            " group_concat(DISTINCT numerics) numerics, max(closed) closed FROM sessions"
            " WHERE purpose = 'EVAL' AND NOT superseded AND last_version IS NOT NULL"
            " GROUP BY run_id, model, last_version, task",
            [],
        )
        found = defaultdict[tuple[str, str, int], list[dict[str, Any]]](list)
        for one in tasks:
            found[one["run_id"], one["model"], one["last_version"]].append(one)
        rows = [_evaluation(*key, tasks=of_tasks) for key, of_tasks in found.items()]
        return sorted(rows, key=lambda one: one["closed"], reverse=True)[:100]

    def series(self, chosen: Selection, by: str = "version") -> dict[str, Any]:
        """Returns sums over policy versions or over time, and counts of reasons and of lags.

        The lag of a session is the number of versions between its tokens, if they are of one run.

        Args:
            chosen: The sessions.
            by: "version", of the newest token of a session, or "time", of its close.
        """
        where, given = chosen.sql()
        width = 1
        if by == "version":
            where += " AND last_version IS NOT NULL"
            key = "last_version"
        else:
            _chosen("by", by, {"time": ""})
            ends = self._rows(
                f"SELECT min(closed) first, max(closed) last FROM sessions WHERE {where}",
                given,
            )[0]
            span = (ends["last"] or 0) - (ends["first"] or 0)
            width = max(1000, math.ceil(span / _BUCKETS))
            key = f"closed / {width} * {width}"
        points = self._rows(
            f"SELECT {key} at, count(*) sessions, avg(reward) reward,"
            " avg(CASE WHEN reward IS NOT NULL THEN reward >= 1 END) passed,"
            " avg(turns) turns, avg(sampled) sampled, sum(sampled) sampled_sum,"
            " sum(trained) trained_sum, avg(outcome <> 'COMPLETED') failed, avg(cut > 0) cut,"
            f" avg(malformed > 0) malformed, avg({NUMBERS['lag']}) lag,"
            f" max(last_version) newest FROM sessions WHERE {where} GROUP BY at"
            " ORDER BY at DESC LIMIT 1000",
            given,
        )
        of = f" WHERE n IN (SELECT n FROM sessions WHERE {where})" if where != "1" else ""
        reasons = self._rows(
            f"SELECT reason, count(*) sessions FROM reasons{of}"
            " GROUP BY reason ORDER BY sessions DESC",
            given,
        )
        lags = self._rows(
            f"SELECT {NUMBERS['lag']} lag, count(*) sessions FROM sessions"
            f" WHERE {where} AND lag IS NOT NULL GROUP BY lag ORDER BY lag LIMIT 100",
            given,
        )
        if by == "version":
            points = [
                one | {"run": run_of(one["at"]), "at": version_of(one["at"])} for one in points
            ]
        shown = {"points": points[::-1], "reasons": reasons, "lags": lags}
        return shown | {"width_ms": width}

    def _page(
        self, sql: str, given: list[Any], order: str, offset: int, limit: int
    ) -> list[dict[str, Any]]:
        if not (0 <= offset <= _LAST and 1 <= limit <= _LONGEST_PAGE):
            raise InvalidFieldError("offset, limit", f"give 0 or more, and 1 to {_LONGEST_PAGE}")
        return self._rows(f"{sql} ORDER BY {order} LIMIT {limit} OFFSET {offset}", given)

    def _rows(self, sql: str, given: list[Any]) -> list[dict[str, Any]]:
        with self._lock:
            cursor = self._db.execute(sql, given)
            names = [one[0] for one in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]


def _evaluation(
    run_id: str, model: str, number: int, *, tasks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    results = [(one["results"], one["passed"]) for one in tasks if one["results"]]
    rewards = [one["reward"] for one in tasks if one["results"]]
    attempts = min((count for count, _ in results), default=0)
    numerics = {name for one in tasks for name in re.split("[ ,]+", one["numerics"]) if name}
    return {
        "run_id": run_id,
        "model": model,
        "version": told(number),
        "tasks": len(tasks),
        "sessions": sum(one["sessions"] for one in tasks),
        "without_result": sum(one["sessions"] - one["results"] for one in tasks),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "pass_at": {k: asdict(pass_at(results, k)) for k in {min(1, attempts), attempts} if k},
        "numerics": sorted(numerics),
        "closed": max(one["closed"] for one in tasks),
    }


def _chosen(name: str, value: str, choices: Mapping[str, str]) -> str:
    if value not in choices:
        raise InvalidFieldError(name, f"is {value!r}; give one of {', '.join(choices)}")
    return choices[value]


def _row(record: session_pb2.SessionRecord) -> tuple[Any, ...]:
    parts, tokens = _parts(record)
    sampled = [one for one in parts if one.sampled]
    spans = [
        span.policy_version
        for one in (*record.trajectories, *([record.tree] if record.HasField("tree") else ()))
        for span in one.version_spans
    ]

    def size(nodes: Iterable[Any]) -> int:
        return sum(one.end - one.start - getattr(one, "scaffold_tokens", 0) for one in nodes)

    return (
        record.session_id,
        record.run_id,
        record.group_id,
        record.sample_index,
        record.group_size,
        name_of(session_pb2.SessionOutcome.DESCRIPTOR, record.outcome),
        name_of(
            session_pb2.SessionPurpose.DESCRIPTOR,
            record.purpose or session_pb2.SESSION_PURPOSE_TRAIN,
        ),
        record.model,
        record.superseded,
        record.reward if record.HasField("reward") and math.isfinite(record.reward) else None,
        record.turns,
        tokens,
        size(sampled),
        size(one for one in sampled if one.trained),
        sum(_MALFORMED in one.reasons for one in sampled),
        sum(_LENGTH_CUT in one.reasons for one in sampled),
        min(spans, default=None),
        max(spans, default=None),
        record.opened_unix_ms,
        record.closed_unix_ms,
        record.closed_unix_ms + record.reward_timeout_ms,
        record.metadata.get("error", record.abandoned)[:500],
        record.metadata.get("task_id", record.group_id),
        " ".join(sorted(one.id for one in record.numerics)),
    )


def _parts(record: session_pb2.SessionRecord) -> tuple[list[Any], int]:
    """Returns each part of a node once, and the number of tokens."""
    if record.HasField("tree"):
        nodes = list(record.tree.nodes)
        return nodes, nodes[-1].end if nodes else 0
    found: dict[tuple[int, bool], trajectory_pb2.TrajectorySegment] = {}
    for trajectory in record.trajectories:
        for segment in trajectory.segments:
            key = (segment.node_id, segment.sampled)
            if key not in found or segment.trained:
                found[key] = segment
    return list(found.values()), sum(one.end - one.start for one in found.values())


def _reasons(record: session_pb2.SessionRecord) -> Iterable[str]:
    enum = trajectory_pb2.FidelityReason.DESCRIPTOR
    for one in (*record.trajectories, *([record.tree] if record.HasField("tree") else ())):
        for reason in one.reasons:
            yield name_of(enum, reason)


def _words(record: session_pb2.SessionRecord) -> str:
    """Returns the text of a session that is searched, without JSON's escapes."""
    ids = [record.session_id, record.run_id, record.group_id, record.model, record.abandoned]
    messages = [one.data.decode(errors="replace") for one in record.messages]
    found, length = list[str](), 0
    for text in _texts([*ids, dict(record.metadata), *messages]):
        found.append(text)
        length += len(text) + 1
        if length > _WORDS_CHARACTERS:
            break
    text = " ".join(found)[:_WORDS_CHARACTERS]
    return spaced(text.encode(errors="replace").decode())  # messages may have lone surrogates


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a value of JSON. A text may be JSON again."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [part for pair in reversed(one.items()) for part in reversed(pair)]
        elif isinstance(one, list):
            waiting += reversed(one)
        elif isinstance(one, str) and one.startswith(("{", "[")):
            try:
                waiting.append(json.loads(one))
            except (ValueError, RecursionError):  # it is no JSON, or too deep
                yield one
        elif one is not None:
            yield str(one)
