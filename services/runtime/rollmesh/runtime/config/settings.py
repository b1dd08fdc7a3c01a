"""Settings: what a service can be told, by whom it is checked, and what is said about bad ones."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

from rollmesh.runtime.config.secrets import masked

_Config = TypeVar("_Config")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_ACCEPTED: dict[type[Any], tuple[type[Any], ...]] = {
    str: (str, int, float),
    int: (str, int),
    float: (str, int, float),
    bool: (str, bool, int),
    Path: (str,),
    dict: (str, dict),
}
"""Types that a TOML file may give for a type: `int(7.9)` would lose the fraction silently."""
_WORDS: dict[type[Any], str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    dict: "a table",
}


class ConfigError(Exception):
    """A setting is unknown, malformed or out of bounds; the message names it."""


class Bound(Protocol):
    """Which values a setting may have; `str` of it is a phrase for its help."""

    def problem(self, value: Any) -> str:
        """Returns what to give instead of a value; empty if the value is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number from `least` to `most`."""

    least: float
    most: float = math.inf

    def problem(self, value: float) -> str:
        """Returns what to give instead of a value; empty if the value is allowed."""
        if not value >= self.least:  # a NaN is not
            return f"give at least {self.least}"
        return "" if value <= self.most else f"give at most {self.most}"

    def __str__(self) -> str:
        """Returns the phrase for the help."""
        at_least = f"at least {self.least}"
        return at_least if self.most == math.inf else f"{at_least}, at most {self.most}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def problem(self, value: str) -> str:
        """Returns what to give instead of a value; empty if the value is allowed."""
        return "" if value in self.words else f"give one of {', '.join(self.words)}"

    def __str__(self) -> str:
        """Returns the phrase for the help."""
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a service, as its help and the documentation show it."""

    name: str
    """Name of the field, and key in a TOML file."""
    flag: str
    """Command-line flag: `--max-nodes`."""
    variable: str
    """Environment variable: `ROLLMESH_GATEWAY_MAX_NODES`."""
    kind: type[Any]
    """Type of the value: str, int, float, bool, Path or dict."""
    default: Any
    """Value if nothing is given."""
    bound: Bound | None
    """Which values are allowed; None allows all of the type."""
    doc: str
    """Docstring of the field, on one line."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the settings of every service: checks the bounds of all fields."""

    def __post_init__(self) -> None:
        """Checks every field against its bound.

        Raises:
            ConfigError: Names the setting that is out of bounds, and says what to give.
        """
        for name, _, bound in _fields(type(self)):
            value = getattr(self, name)
            if bound is not None and (problem := bound.problem(value)):
                raise ConfigError(f"{name}: is {value!r}; {problem}")


def describe(cls: type[Any], service: str) -> list[Setting]:
    """Returns the settings of a service in the order of their fields.

    Args:
        cls: Its config; every field has a default.
        service: Name of the service: `router`.
    """
    docs = _field_docs(cls)
    defaults = vars(cls())
    return [
        Setting(
            name=name,
            flag="--" + name.replace("_", "-"),
            variable=f"ROLLMESH_{service}_{name}".upper(),
            kind=kind,
            default=defaults[name],
            bound=bound,
            doc=docs.get(name, ""),
        )
        for name, kind, bound in _fields(cls)
    ]


def fill(
    cls: type[_Config],
    values: Mapping[str, Any],
    origin: str = "",
    shown: Mapping[str, str] | None = None,
) -> _Config:
    """Returns the config with the given values, and defaults for the others.

    Args:
        cls: The dataclass.
        values: By the names of fields; text is converted to the type of its field.
        origin: Says in errors where unknown names stand: " in mesh.toml".
        shown: How errors name fields, if not by their names: `engine.dtype`.

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    config, problems = examine(cls, values, origin, shown)
    if problems or config is None:
        raise ConfigError(problems[0])
    return config


def examine(
    cls: type[_Config],
    values: Mapping[str, Any],
    origin: str = "",
    shown: Mapping[str, str] | None = None,
) -> tuple[_Config | None, list[str]]:
    """Returns the config, as `fill` does, and all problems instead of the first.

    A value that is refused counts as not given, so that what remains can be examined too. There is
    no config if a required setting is missing or what remains is refused.
    """
    shown = shown or {}
    fields = {name: (kind, bound) for name, kind, bound in _fields(cls)}
    good: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        where = shown.get(name, name)
        if name not in fields:
            problems.append(f"{where}: unknown setting{origin}; {_remedy(name, list(fields))}")
            continue
        kind, bound = fields[name]
        try:
            converted = _convert(where, value, kind)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if bound is not None and (problem := bound.problem(converted)):
            problems.append(f"{where}: is {converted!r}; {problem}")
            continue
        good[name] = converted
    try:
        return cls(**good), problems
    except ConfigError as error:
        name, _, rest = str(error).partition(": ")
        problems.append(f"{shown.get(name, name)}: {rest}")
    except TypeError:  # a required setting is missing, or was refused
        if not problems:
            raise
    return None, problems


def _remedy(name: str, known: list[str]) -> str:
    """Returns what to write instead of an unknown name."""
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    return f"known are {', '.join(known)}"


def _fields(cls: type[Any]) -> list[tuple[str, type[Any], Bound | None]]:
    """Returns the name, the type and the bound of every field of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    found: list[tuple[str, type[Any], Bound | None]] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, bound = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        found.append((field.name, get_origin(kind) or kind, bound))
    return found


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Reads the docstrings under the fields from the source, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, doc in itertools.pairwise(body):
            match field, doc:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def _convert(name: str, value: Any, kind: type[Any]) -> Any:
    converters: dict[type[Any], Callable[[Any], Any]] = {bool: _to_bool, dict: _to_table}
    problem = f"{name}: is {masked(repr(masked(value))):.200}; give {_WORDS[kind]}"
    if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(problem)
    try:
        return converters.get(kind, kind)(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(problem) from error


def _to_bool(value: Any) -> bool:
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(text)


def _to_table(value: Any) -> dict[str, Any]:
    table = json.loads(value or "{}") if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise TypeError(value)
    return table
