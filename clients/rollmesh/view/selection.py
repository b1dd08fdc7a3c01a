"""Which sessions a reader means: a query as a condition in SQL. No I/O."""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from rollmesh.runtime.errors import InvalidFieldError

VALUE_CHARACTERS = 500
"""Longest value of metadata that is compared. Of a longer one, its beginning is."""
NUMBERS = {
    "reward": "reward",
    "turns": "turns",
    "tokens": "tokens",
    "sampled": "sampled",
    "trained": "trained",
    "malformed": "malformed",
    "lag": "last_version - first_version",
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
