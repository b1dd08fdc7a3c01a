"""One frozen dataclass per service, filled from flags, the environment and a TOML file.

The field `max_nodes: Annotated[int, Bounds(1)] = 7` is the flag `--max-nodes`, the variable
`ROLLMESH_<SERVICE>_MAX_NODES` and the key `max_nodes` of the file. Flags win over the environment,
the environment over the file, the file over the default. The docstring under a field is its help.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

_Config = TypeVar("_Config")
_PASSWORD = re.compile(r"://[^/?#\s@]*:[^/?#\s@]+@|\bpassword\s*=", re.IGNORECASE)
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


def parse_config(
    cls: type[_Config], service: str, argv: Sequence[str], environ: Mapping[str, str]
) -> _Config:
    """Returns the config of a service.

    Args:
        cls: The dataclass; all its fields have defaults, of type str, int, float, bool, Path, or
            dict: a table in a file, a JSON object elsewhere.
        service: Name of the service: `router`.
        argv: Command-line arguments, without the program's name.
        environ: The environment.

    Raises:
        ConfigError: Names the setting and what is wrong with it; a flag must hold no password.
    """
    settings = {setting.name: setting for setting in describe(cls, service)}
    parser = argparse.ArgumentParser(prog=f"rollmesh {service}", description=inspect.getdoc(cls))
    parser.add_argument("--config", type=Path, help="TOML file with the same names as the flags")
    for setting in settings.values():
        kind = setting.kind.__name__
        parser.add_argument(setting.flag, dest=setting.name, metavar=kind, help=_help(setting))
    given = vars(parser.parse_args(argv))
    path = given["config"]
    values = read_file(path) if path else {}
    for name, setting in settings.items():
        if has_password(given[name]):
            raise ConfigError(
                f"{name}: a flag with a password is visible to every user of this host; set "
                f"{setting.variable}, write it into the file of --config, or leave the password to "
                "PGPASSFILE"
            )
        text = given[name] if given[name] is not None else environ.get(setting.variable)
        if text is not None:
            values[name] = text
    return fill(cls, values, f" in {path}" if path else "")


def has_password(value: object) -> bool:
    """Returns whether a value is a database's URL, or libpq's parameters, with a password."""
    return isinstance(value, str) and _PASSWORD.search(value) is not None


def read_file(path: Path) -> dict[str, Any]:
    """Returns the values of a TOML file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path}: {error}") from error


def fill(cls: type[_Config], values: Mapping[str, Any], origin: str = "") -> _Config:
    """Returns the config with the given values, and defaults for the others.

    Args:
        cls: The dataclass.
        values: By the names of fields; text is converted to the type of its field.
        origin: Says in errors where unknown names stand: " in mesh.toml".

    Raises:
        ConfigError: Names the setting and what is wrong with it.
    """
    kinds = {name: kind for name, kind, _ in _fields(cls)}
    for name in values:
        if name not in kinds:
            raise ConfigError(f"{name}: unknown setting{origin}; known are {', '.join(kinds)}")
    return cls(**{name: _convert(name, value, kinds[name]) for name, value in values.items()})


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


def _help(setting: Setting) -> str:
    default = json.dumps(setting.default) if setting.kind is bool else str(setting.default)
    notes = [f"default: {default}"] if default and setting.default != {} else []
    if setting.bound is not None:
        notes.append(str(setting.bound))
    return f"{setting.doc} [{', '.join(notes)}]".removesuffix(" []").replace("%", "%%")


def _convert(name: str, value: Any, kind: type[Any]) -> Any:
    converters: dict[type[Any], Callable[[Any], Any]] = {bool: _to_bool, dict: _to_table}
    if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}: is {value!r:.200}; give {_WORDS[kind]}")
    try:
        return converters.get(kind, kind)(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: is {value!r:.200}; give {_WORDS[kind]}") from error


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
