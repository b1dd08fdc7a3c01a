"""One frozen dataclass per service; flags, environment and a TOML file fill it.

A field `max_nodes: int = 7` is the flag `--max-nodes`, the variable `ROLLMESH_<SERVICE>_MAX_NODES`
and the key `max_nodes`. Flags win over the environment, the environment over the file, the file
over the default. The docstring under a field is its help.
"""

import argparse
import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

_Config = TypeVar("_Config")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_TAKES: dict[type[Any], tuple[type[Any], ...]] = {
    str: (str, int, float),
    int: (str, int),
    float: (str, int, float),
    bool: (str, bool, int),
    Path: (str,),
    dict: (str, dict),
}
"""What a TOML file may give for a setting: `int(7.9)` would pass in silence."""


class ConfigError(Exception):
    """A setting is unknown or has a value of the wrong form; the message names it."""


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
        ConfigError: Names the setting and what is wrong.
    """
    hints = {name: get_origin(kind) or kind for name, kind in get_type_hints(cls).items()}
    docs = _field_docs(cls)
    parser = argparse.ArgumentParser(prog=f"rollmesh {service}", description=inspect.getdoc(cls))
    parser.add_argument("--config", type=Path, help="TOML file with the same names as the flags")
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in names:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, metavar=hints[name].__name__, help=docs.get(name))
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    if path := given["config"]:
        values |= _read_file(path, names)
    for name in names:
        variable = f"ROLLMESH_{service}_{name}".upper()
        text = given[name] if given[name] is not None else environ.get(variable)
        if text is not None:
            values[name] = text
    return cls(**{name: _convert(name, value, hints[name]) for name, value in values.items()})


def check_least(config: object, least: Mapping[str, float]) -> None:
    """Checks numbers of a config against the least that each may be.

    Raises:
        ConfigError: Names the setting that is below.
    """
    for name, number in least.items():
        if not getattr(config, name) >= number:  # nor is a NaN
            raise ConfigError(f"{name}: is {getattr(config, name)}; give at least {number}")


def check_one_of(config: object, choices: Mapping[str, Sequence[str]]) -> None:
    """Checks settings of a config that must be one of a few words.

    Raises:
        ConfigError: Names the setting that is none of its own.
    """
    for name, words in choices.items():
        if (value := getattr(config, name)) not in words:
            raise ConfigError(f"{name}: is {value!r}; give one of {', '.join(words)}")


def _read_file(path: Path, names: Sequence[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path}: {error}") from error
    for name in table:
        if name not in names:
            raise ConfigError(f"{name}: unknown setting in {path}; known are {', '.join(names)}")
    return table


def _convert(name: str, value: Any, kind: type[Any]) -> Any:
    converters: dict[type[Any], Callable[[Any], Any]] = {bool: _to_bool, dict: _to_table}
    if not isinstance(value, _TAKES[kind]) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}: {value!r} is not a {kind.__name__}")
    try:
        return converters.get(kind, kind)(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {value!r} is not a {kind.__name__}") from error


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


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """Reads the docstrings that stand under the fields, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            source = inspect.getsource(base)
            found = re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.M | re.S)
            docs |= {name: " ".join(text.split()).replace("%", "%%") for name, text in found}
    return docs
