"""The rules that every proto file of rollmesh keeps, over its text and its descriptors.

`buf lint` looks at names and comments too. These hold where only Python is at hand, and say what
buf has no rule for: units, `optional` where zero means something, errors only as status.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_UNCOMMENTED = re.compile(
    r"^(?P<indent> *)(?P<what>service|rpc|message|enum|oneof)\s+(?P<name>\w+)"
    r"|^(?P<indent2> *)(?:(?:repeated|optional)\s+)?[\w.<>, ]+\s+(?P<field>\w+)\s*=\s*\d+"
    r"|^(?P<indent3> *)(?P<value>[A-Z][A-Z0-9_]*)\s*=\s*\d+"
)
_SKIPPED = ("option ", "syntax", "package", "import", "reserved", "returns", "}")
_UNITS = {"timeout": "_ms", "delay": "_ms", "duration": "_ms", "age": "_ms"}
_STATUS = "google.rpc.Status"
_ZERO_COUNTS = ("temperature", "top_p", "min_p", "reward", "seed", "logprob", "penalty")


@dataclass(frozen=True)
class Problem:
    """One broken rule."""

    line: int
    rule: str
    name: str


def problems(text: str) -> list[Problem]:
    """Returns what is wrong with a proto file."""
    lines = text.splitlines()
    return sorted(
        [*_uncommented(lines), *_enums(lines), *_rpcs(lines), *_fields(lines)],
        key=lambda problem: problem.line,
    )


def _uncommented(lines: list[str]) -> Iterator[Problem]:
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith(("//", *_SKIPPED)) or not line.strip():
            continue
        found = _UNCOMMENTED.match(line)
        if found and not lines[number - 2].strip().startswith("//"):
            name = found["name"] or found["field"] or found["value"]
            yield Problem(number, "commented", name)


def _enums(lines: list[str]) -> Iterator[Problem]:
    enum, prefix = "", ""
    for number, line in enumerate(lines, start=1):
        if begins := re.match(r"\s*enum (\w+)", line):
            enum = begins[1]
            prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum).upper() + "_"
        elif enum and line.strip() == "}":
            enum = ""
        elif enum and (value := re.match(r"\s*([A-Z0-9_]+)\s*=\s*(\d+)", line)):
            if not value[1].startswith(prefix):
                yield Problem(number, "enum prefix", value[1])
            if (value[2] == "0") != (value[1] == f"{prefix}UNSPECIFIED"):
                yield Problem(number, "zero is unspecified", value[1])


def _rpcs(lines: list[str]) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith("service") and not re.match(r"service \w+Service \{", line):
            yield Problem(number, "service suffix", line.split()[1])
        rpc = re.match(r"\s*rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", line)
        if rpc is None:
            continue
        if (rpc[2], rpc[3]) != (f"{rpc[1]}Request", f"{rpc[1]}Response") or rpc[1] in seen:
            yield Problem(number, "own request and response", rpc[1])
        seen.add(rpc[1])


def _fields(lines: list[str]) -> Iterator[Problem]:
    for number, line in enumerate(lines, start=1):
        field = re.match(r"\s*((?:repeated |optional )?)([\w.]+) (\w+) = \d+;", line)
        if field is None or field[2] in {"enum", "option"}:
            continue
        label, kind, name = field[1].strip(), field[2], field[3]
        bare_number = kind in {"float", "double", "int64"} and not label
        if bare_number and any(word in name for word in _ZERO_COUNTS):
            yield Problem(number, "optional where zero counts", name)
        if re.search(r"(^|_)(error|status)(_|$)", name) and kind not in {"bool", _STATUS}:
            yield Problem(number, "errors only as status", name)
        if kind.startswith(("uint", "int")):
            for word, unit in _UNITS.items():
                if name.endswith(word):
                    yield Problem(number, f"unit {unit}", name)
        if kind == "bytes" and re.search(r"(ids|logprobs|mask)$", name):
            yield Problem(number, "dtype in the name", name)
