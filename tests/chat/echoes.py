"""How JSON libraries of other languages print arguments again that they have read.

`python -m tests.chat.echoes` records what those on this machine print, in `echoes.json`.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".json")
_NODE = """
const lines = require('fs').readFileSync(0, 'utf8').trim().split('\\n').map(JSON.parse);
console.log(JSON.stringify(lines.map((line) => {
  try { return JSON.stringify(JSON.parse(line)); } catch { return null; }
})));
"""
_PERL = """
use JSON::PP; my $j = JSON::PP->new->latin1->allow_nonref; my @out;
while (my $line = <STDIN>) {
  my $text = $j->decode($line);
  my $echo = eval { $j->ascii->encode($j->decode($text)) };
  push @out, $echo;
}
print JSON::PP->new->ascii->encode(\\@out);
"""
SOURCES = (
    *('{"a": 7.0}', '{"a": 1E2}', '{"a": -0.0}', '{"a": -0}', '{"a": 0.10}', '{"a": 1e-7}'),
    *('{"a": 9007199254740993}', '{"a": -9223372036854775809}', '{"a": 1e21}', '{"a": 1.5E+10}'),
    *('{"a": 123456789012345678901234567890}', '{"a": 100000000000000000000}', '{"a": 5e-324}'),
    *('{"a": 0.1234567890123456789}', '{"a": 1e400}', '{"a": -1e400, "b": 1}', '{"a": NaN}'),
    *(r'{"a": "\u0041\/"}', r'{"a": "\u00e9\u2028\u007f"}', '{"a": "\u00e9\u2028\u007f"}'),
    *(r'{"a": "\ud83d\ude00"}', '{"a": "\U0001f600"}', r'{"a": "x\ud800y"}', r'{"\udc00": 1}'),
    *('{"b": 1, "10": 2, "2": 3, "a": 4}', '{"a": 1, "a": 2}', '{"a": "<b>&\'"}'),
    *('{ "a" :\t[ 1 , { } , [ ] , "" , null , true ]}', '{"__proto__": {"x": 1}}', "{}", ""),
    '{"a": ' + "[" * 200 + "]" * 200 + "}",
)
"""Arguments as a model may sample them."""


@dataclass(frozen=True)
class Serialiser:
    """A program or library that reads JSON and prints it again."""

    name: str
    version: Callable[[], str]
    echo: Callable[[], list[str | None]]


def _output(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _lines() -> str:
    return "".join(json.dumps(source) + "\n" for source in SOURCES)


def _each(write: Callable[[str], str]) -> list[str | None]:
    found: list[str | None] = []
    for source in SOURCES:
        try:
            found.append(write(source))
        except (ValueError, TypeError, RecursionError):
            found.append(None)
    return found


def _orjson(source: str) -> str:
    orjson: Any = importlib.import_module("orjson")
    return str(orjson.dumps(orjson.loads(source)).decode())


def _msgspec(source: str) -> str:
    msgspec: Any = importlib.import_module("msgspec")
    return str(msgspec.json.encode(msgspec.json.decode(source)).decode())


def _pydantic(source: str) -> str:
    core: Any = importlib.import_module("pydantic_core")
    return str(core.to_json(core.from_json(source)).decode())


def _version(module: str) -> Callable[[], str]:
    return lambda: str(importlib.import_module(module).__version__)


SERIALISERS = (
    Serialiser(
        "node JSON",
        lambda: _output("node", "--version"),
        lambda: json.loads(_output("node", "-e", _NODE, given=_lines())),
    ),
    Serialiser(
        "perl JSON::PP",
        lambda: _output("perl", "-MJSON::PP", "-e", "print $JSON::PP::VERSION"),
        lambda: json.loads(_output("perl", "-e", _PERL, given=_lines())),
    ),
    Serialiser(
        "jq",
        lambda: _output("jq", "--version"),
        lambda: [_output("jq", "-c", ".", given=source) or None for source in SOURCES],
    ),
    Serialiser(
        "python json",
        lambda: sys.version.split()[0],
        lambda: _each(lambda source: json.dumps(json.loads(source))),
    ),
    Serialiser(
        "python json, not ASCII, sorted, indented",
        lambda: sys.version.split()[0],
        lambda: _each(
            lambda source: json.dumps(
                json.loads(source), ensure_ascii=False, sort_keys=True, indent=2
            )
        ),
    ),
    Serialiser("orjson", _version("orjson"), lambda: _each(_orjson)),
    Serialiser("msgspec", _version("msgspec"), lambda: _each(_msgspec)),
    Serialiser("pydantic_core", _version("pydantic_core"), lambda: _each(_pydantic)),
)


def record() -> list[dict[str, object]]:
    """What each prints for each source. Nothing where it refuses to read or print it."""
    return [
        {
            "serialiser": one.name,
            "version": one.version(),
            "echoes": {
                source: echo
                for source, echo in zip(SOURCES, one.echo(), strict=True)
                if echo is not None
            },
        }
        for one in SERIALISERS
    ]


if __name__ == "__main__":
    PAGE.write_text(json.dumps(record(), indent=1) + "\n")
