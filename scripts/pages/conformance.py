"""Generates docs/conformance.md: the checks of the kit, and what they showed at `vllm serve`.

    python -m scripts.pages.conformance > docs/conformance.md

`python -m scripts.pages.conformance VERSION REPORT.xml > docs/conformance-vllm.json` takes a JUnit
report of the kit as the new record of vLLM's server.
"""

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from rollmesh.conformance import CHECKS

RECORD = Path(__file__).parents[2] / "docs" / "conformance-vllm.json"
_LONGEST = 120
_KINDS = {"": "passed", "failure": "failed", "skipped": "not seen"}
_INTRO = """# Conformance

`rollmesh-conformance` checks a server the way agents use it. Each check is something that a
published agent or its SDK was seen to do, or that training on the answers needs; it says what
breaks for whom where it does not hold. The kit speaks HTTP only, needs nothing but `httpx2`, and
works against any server that is compatible with OpenAI's chat completions or Responses, or with
Anthropic's Messages.

```sh
pip install dist/rollmesh_conformance-0.1.0-py3-none-any.whl
rollmesh-conformance --base-url http://127.0.0.1:8000/v1 --key-file key --junit report.xml
```

- `--base-url` is what OpenAI's clients take: paths such as `/chat/completions` are added to it.
- `--key-file` has the key in its first line; without it, `ROLLMESH_CONFORMANCE_KEY` has it. It is
  no flag, because `ps` shows flags to everybody.
- `--protocols chat,responses,messages` names the protocols that must be served. Without it, a
  protocol that the server does not serve is one skipped row.
- `--model` names the model; the default is the first one listed. `--context-tokens` is its
  context length, for the checks that exceed it.
- `--capture-url` names a place that opens sessions and shows their records, for the checks of
  training. Without it, they are one skipped row.
- `--timeout-s` bounds each check.

The exit code is 0 if nothing failed, 1 if a check failed, and 2 if the run could not begin.

The server samples from a real model, and no check depends on what it samples. A check that needs
a tool call forces one; if the model does not complete it, the check is *not seen*, which is no
failure. So are the token checks where the server shows no token ids (`return_token_ids`). Prompts
are short, answers at most 192 tokens; a run is a few hundred requests.

Two things cannot be provoked from outside and are not checked: that a stream which fails ends
without its last chunk, and that a silent stream carries keep-alive comments. `make test` runs the
kit against a mesh, where every check passes.

The checks of `training.records` drive a session and compare its record, as a trainer reads it, with
the prompts and samples of the engine. The degradations that they find raise no error elsewhere. A
small adapter at the capture URL translates a server's record: the docstring of
`rollmesh.conformance.training.capture` describes it, and `benchmarks/peers/ours.py` is the one of
rollmesh. A server that records each request by itself needs no other form: rows that continue each
other count as one sequence. Three checks need an engine that follows a script, and are not
seen at another one. [Other servers](peers.md) were checked in the same way.
"""
_VLLM = """
## vLLM's own server

The kit at `vllm serve` {version}, {date}, with a small random model of Qwen2.5-VL's kind on the CPU
(`--enable-auto-tool-choice --tool-call-parser hermes`): {counts}.

Most rows have one of two causes: a retry is sampled again, and a history is tokenised again from
its text. The random model shows the second at once, because its text is rarely tokenised as it was
sampled; it also calls tools with arguments that are no objects. A trained model does both more
rarely. Checks that are not listed passed, or are newer than the run.

| check | ended | seen |
|---|---|---|
"""


def record(version: str, report: Path) -> dict[str, Any]:
    """Returns the record of a run from its JUnit report."""
    results: dict[str, list[str]] = {}
    for case in ET.parse(report).getroot()[0]:  # noqa: S314 - the kit wrote it
        ended = next(iter(case), None)
        name = f"{case.attrib['classname']}.{case.attrib['name']}"
        kind = _KINDS["" if ended is None else ended.tag]
        results[name] = [kind, "" if ended is None else _short(ended.attrib["message"])]
    return {"version": version, "date": f"{datetime.now(UTC):%Y-%m-%d}", "results": results}


def page() -> str:
    """Returns the page."""
    text = _INTRO
    for family, checks in groupby(CHECKS, lambda one: one.name.rpartition(".")[0]):
        text += f"\n## {family}\n\n| check | required | without it |\n|---|---|---|\n"
        for one in checks:
            name = one.name.rpartition(".")[2]
            text += f"| `{name}` | {cell(one.what)} | {cell(one.breaks)} |\n"
    found = json.loads(RECORD.read_text("utf-8"))
    results: dict[str, list[str]] = found["results"]
    counted = Counter(kind for kind, _ in results.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(counted.items()))
    text += _VLLM.format(version=found["version"], date=found["date"], counts=counts)
    for name, (kind, detail) in results.items():
        if kind != "passed":
            text += f"| `{name}` | {kind} | {cell(detail)} |\n"
    return text


def _short(detail: str) -> str:
    return detail if len(detail) <= _LONGEST else f"{detail[:_LONGEST]}..."


def cell(text: str) -> str:
    """Returns text that Markdown shows as it is, in a table."""
    for mark in "\\`*_[]<>|{}":
        text = text.replace(mark, f"\\{mark}")
    return text


if __name__ == "__main__":
    match sys.argv[1:]:
        case [version, report]:
            print(json.dumps(record(version, Path(report)), indent=1))
        case _:
            print(page(), end="")
