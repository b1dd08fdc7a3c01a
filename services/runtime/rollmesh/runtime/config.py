"""Settings of every process: one frozen dataclass per service, one TOML file for all of them.

The field `max_nodes: Annotated[int, Bounds(1)] = 7` is the flag `--max-nodes`, the variable
`ROLLMESH_<SERVICE>_MAX_NODES` and the key `max_nodes` of the service's table in the file. Flags win
over the environment, the environment over the file, the file over the default. The docstring under
a field is its help. `mesh_file` reads the file.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

# Secret values: they come by file or environment and are never printed.

_PASSWORD = re.compile(r"://[^/?#\s@]*:[^/?#\s@]+@|\bpassword\s*=", re.IGNORECASE)
_OF_URL = re.compile(r"(://[^/?#\s@:]*:)\S*@")
_OF_PARAMETER = re.compile(r"(\bpassword\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)
_OF_JSON = re.compile(
    r"""(["'][^"']*(?:token|password|secret|api_key)["']\s*:\s*)(["'])(?:(?!\2).)+\2?""",
    re.IGNORECASE,
)
_SECRET_KEY = re.compile(r"(?:token|password|secret|api_key)$", re.IGNORECASE)
_MASK = "***"


def has_secret(value: object) -> bool:
    """Returns whether a value has a password or a token.

    So do a database's URL or libpq's parameters with a password, and a table, also as JSON, with a
    key such as vLLM's `hf_token`.
    """
    if isinstance(value, str):
        return _PASSWORD.search(value) is not None or has_secret(_table(value))
    if isinstance(value, Mapping):
        return any(_is_secret(key, one) for key, one in value.items())
    return False


def masked(value: Any) -> Any:
    """Returns a value to print: with `***` in place of each password and token."""
    if isinstance(value, str):
        if has_secret(table := _table(value)):
            return json.dumps(masked(table))
        for pattern, mask in (
            (_OF_URL, rf"\g<1>{_MASK}@"),
            (_OF_PARAMETER, rf"\g<1>{_MASK}"),
            (_OF_JSON, rf"\g<1>{_MASK}"),
        ):
            value = pattern.sub(mask, value)
        return value
    if isinstance(value, Mapping):
        return {
            key: _MASK if _is_secret(key, one) and isinstance(one, str) else masked(one)
            for key, one in value.items()
        }
    return value


def _table(text: str) -> object:
    """Returns the table of a text in JSON, or None if it is not one."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_secret(key: object, value: object) -> bool:
    if isinstance(value, str) and value and _SECRET_KEY.search(str(key)):
        return True
    return has_secret(value)


# Settings of a service: their checks and the errors of bad ones.

_Config = TypeVar("_Config")
_BOOLS: dict[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
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
    """A setting is unknown, malformed or out of bounds. The message names it."""


class Bound(Protocol):
    """Which values a setting may have. `str` of it is a phrase for its help."""

    def problem(self, value: Any) -> str:
        """Returns the remedy for a value, empty if the value is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number from `least` to `most`."""

    least: float
    most: float = math.inf

    def problem(self, value: float) -> str:
        """Returns the remedy for a value, empty if the value is allowed."""
        if not value >= self.least:  # a NaN is not
            return f"give at least {self.least}"
        return "" if value <= self.most else f"give at most {self.most}"

    def __str__(self) -> str:
        at_least = f"at least {self.least}"
        return at_least if self.most == math.inf else f"{at_least}, at most {self.most}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def problem(self, value: str) -> str:
        """Returns the remedy for a value, empty if the value is allowed."""
        return "" if value in self.words else f"give one of {', '.join(self.words)}"

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class HttpUrl:
    """A URL of HTTP or HTTPS, or nothing."""

    def problem(self, value: str) -> str:
        """Returns the remedy for a value, empty if the value is allowed."""
        try:
            url = urlsplit(value)
            is_one = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
        except ValueError:
            is_one = False
        return "" if is_one or not value else "give a URL such as http://127.0.0.1:4318"

    def __str__(self) -> str:
        return "an http or https URL"


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
    """Which values are allowed. None allows all of the type."""
    doc: str
    """Docstring of the field, on one line."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of the settings of every service: checks the bounds of all fields."""

    def __post_init__(self) -> None:
        """Checks every field against its bound.

        Raises:
            ConfigError: Names the setting that is out of bounds, and the remedy.
        """
        for name, (_, bound) in _fields(type(self)).items():
            value = getattr(self, name)
            if bound is not None and (problem := bound.problem(value)):
                raise ConfigError(f"{name}: is {value!r}; {problem}")


def describe(cls: type[Any], service: str) -> list[Setting]:
    """Returns the settings of a service in the order of their fields."""
    docs = _field_docs(cls)
    defaults = vars(cls())
    return [
        Setting(
            name=name,
            flag=_flag(name),
            variable=f"ROLLMESH_{service}_{name}".upper(),
            kind=kind,
            default=defaults[name],
            bound=bound,
            doc=docs.get(name, ""),
        )
        for name, (kind, bound) in _fields(cls).items()
    ]


def fill(
    cls: type[_Config],
    values: Mapping[str, Any],
    origin: str = "",
    shown: Callable[[str], str] = str,
) -> _Config:
    """Returns the config with the given values, and defaults for the others.

    Args:
        cls: The dataclass.
        values: By the names of fields. Text is converted to the type of its field.
        origin: Place of unknown names in errors: " in mesh.toml".
        shown: Returns the name of a field in errors: `engine.dtype`.

    Raises:
        ConfigError: Names the setting and the problem.
    """
    config, problems = examine(cls, values, origin, shown)
    if problems or config is None:
        raise ConfigError(problems[0])
    return config


def examine(
    cls: type[_Config],
    values: Mapping[str, Any],
    origin: str = "",
    shown: Callable[[str], str] = str,
) -> tuple[_Config | None, list[str]]:
    """Returns the config, as `fill` does, and all problems instead of the first.

    A refused value counts as not given, so that the others can be examined too. There is no config
    if a required setting is missing or the others are refused.
    """
    fields = _fields(cls)
    good: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        where = shown(name)
        if name not in fields:
            near = difflib.get_close_matches(name, list(fields), n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
            problems.append(f"{where}: unknown setting{origin}; {remedy}")
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
        problems.append(f"{shown(name)}: {rest}")
    except TypeError:  # a required setting is missing, or was refused
        if not problems:
            raise
    return None, problems


def _fields(cls: type[Any]) -> Mapping[str, tuple[type[Any], Bound | None]]:
    """Returns the type and the bound of every field of a dataclass, by its name."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, tuple[type[Any], Bound | None]] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, bound = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        found[field.name] = get_origin(kind) or kind, bound
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
    problem = f"{name}: is {masked(repr(masked(value))):.200}; give {_WORDS[kind]}"
    if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(problem)
    made: Callable[[Any], Any] = kind
    given: Any = value
    if kind is bool:
        made, given = _BOOLS.__getitem__, str(value).lower()
    elif kind is dict and isinstance(value, str):
        made, given = json.loads, value or "{}"
    try:
        found = made(given)
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(problem) from error
    if not isinstance(found, kind):  # JSON that is no table
        raise ConfigError(problem)
    return found


# What several services share.

ROUTER_PORT = 7100
"""Default port of a router."""
LOCAL_ROUTER = f"127.0.0.1:{ROUTER_PORT}"
"""Where a router with default settings is, and where its callers look for it by default."""
SCORER_PORT = 7500
"""Default port of a scorer."""
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing binds it
"""Where callers of this host reach a service that listens on all addresses."""


@dataclass(frozen=True, kw_only=True)
class TracesConfig(Config):
    """Settings of traces, which every service has. The keys of `[traces]` lack the prefix."""

    traces_endpoint: Annotated[str, HttpUrl()] = ""
    """URL of the receiver of OTLP that traces of turns are sent to, such as http://127.0.0.1:4318.
    Empty: no traces."""
    traces_protocol: Annotated[str, OneOf(("http", "grpc"))] = "http"
    """How the receiver is called: by HTTP, at /v1/traces unless the URL has a path, or by gRPC."""
    traces_ratio: Annotated[float, Bounds(0, 1)] = 1.0
    """Share of the traces that are sent. The service in which a trace begins decides. An agent's
    `traceparent` that is not sampled is never sent."""
    traces_content: bool = False
    """Whether spans have the messages and tools of a turn. They are as private as the sessions."""
    traces_headers_file: str = ""
    """File with headers for the receiver, such as a key: NAME: VALUE on each line. Others must not
    be able to read it (mode 0600)."""


# Where the settings of a process come from: flags, the environment, the mesh file, defaults.

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Given:
    """A given value of a setting."""

    value: Any
    source: str
    """Who gave it: `--port`, `ROLLMESH_ROUTER_PORT`, `mesh.toml [router]`."""
    shown: str
    """How errors name the setting: `router.port` if the file gave it."""


@dataclass(frozen=True, slots=True)
class Resolved(Generic[_Config]):
    """The settings of a process and their sources."""

    config: _Config | None
    """None if the given values make no config."""
    given: Mapping[str, Given]
    """By the setting's name. Others have their defaults."""
    problems: list[str]

    def source(self, name: str) -> str:
        """Returns who gave a setting its value."""
        return self.given[name].source if name in self.given else DEFAULT


def parse_config(
    cls: type[_Config],
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    in_part: bool = False,
) -> _Config:
    """Returns the config of a service.

    Args:
        cls: The dataclass. All its fields have defaults, of type str, int, float, bool, Path, or
            dict: a table in a file, a JSON object elsewhere.
        service: Name of the service: `router`.
        argv: Command-line arguments, without the program's name.
        environ: The environment.
        in_part: Whether it is a part of the service's config: the file's other settings are not
            read, and a file with several models need not say which.

    Raises:
        ConfigError: Names the setting and the problem. A flag must hold no secret.
    """
    found = resolve(cls, service, argv, environ, in_part=in_part)
    if found.problems or found.config is None:
        raise ConfigError(found.problems[0])
    return found.config


def resolve(
    cls: type[_Config],
    service: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    in_part: bool = False,
) -> Resolved[_Config]:
    """Returns the config of a service, who gave each setting, and all problems.

    Raises:
        ConfigError: The file cannot be read, or is wrong outside the service's table.
    """
    settings = describe(cls, service)
    parser = argparse.ArgumentParser(prog=f"rollmesh {service}", description=inspect.getdoc(cls))
    parser.add_argument(
        "--config", type=Path, help="TOML file of the mesh: [mesh], and a table for each service"
    )
    for one in settings:
        kind, default = one.kind.__name__, one.default
        default = json.dumps(default) if one.kind is bool else str(default)
        notes = [f"default: {default}"] if default and one.default != {} else []
        notes += [] if one.bound is None else [str(one.bound)]
        text = f"{one.doc} [{', '.join(notes)}]".removesuffix(" []").replace("%", "%%")
        parser.add_argument(one.flag, dest=one.name, metavar=kind, help=text)
    flags = vars(parser.parse_args(argv))
    path: Path | None = flags.pop("config")
    flags = {name: text for name, text in flags.items() if text is not None}
    problems = [
        f"{one.name}: a flag with a password or a token is visible to every user of this host; set "
        f"{one.variable}, or write it into the file of --config"
        for one in settings
        if has_secret(flags.get(one.name))
    ]
    over = from_environment(settings, environ)
    over |= {name: Given(text, _flag(name), name) for name, text in flags.items()}
    given: dict[str, Given] = {}
    if path is not None:
        from rollmesh.runtime.mesh_file import from_file, read_mesh

        tables = read_mesh(path, service)
        model = over["model"].value if "model" in over else ""
        known = {one.name for one in settings}
        if in_part and not model:
            tables = {name: table for name, table in tables.items() if name != "model"}
        given = from_file(tables, service, model, str(path), known)
        if in_part:
            given = {name: one for name, one in given.items() if name in known}
    given |= over
    config, found = examine(
        cls,
        {name: one.value for name, one in given.items()},
        f" in {path}" if path else "",
        lambda name: given[name].shown if name in given else name,
    )
    return Resolved(config, given, problems + found)


def from_environment(settings: Sequence[Setting], environ: Mapping[str, str]) -> dict[str, Given]:
    """Returns the settings of a service that the environment gives."""
    return {
        one.name: Given(environ[one.variable], one.variable, one.name)
        for one in settings
        if one.variable in environ
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
