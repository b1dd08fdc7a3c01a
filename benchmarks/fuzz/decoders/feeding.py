"""Feeds decoders, and notes what is no typed error."""

import base64
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fuzz.decoders.target import Target
from benchmarks.fuzz.findings import Findings

FOUND = Path(__file__).parents[3] / "tests" / "faults" / "books" / "decoders.jsonl"
"""Inputs of earlier findings, each with the name of its target."""
_SLOW_S = 5.0
_MOST_BYTES = 16_384


class Feeder:
    """Feeds targets one input after the other."""

    def __init__(self, targets: Sequence[Target], findings: Findings) -> None:
        """Takes what is fed, and where findings go."""
        self.targets = targets
        self._findings = findings
        self._inputs = [[*target.seeds(), *found_for(target.name)] for target in targets]

    def inputs(self) -> Iterator[tuple[int, bytes]]:
        """Yields the inputs that every target has, with the target's index."""
        for at, inputs in enumerate(self._inputs):
            yield from ((at, data) for data in inputs)

    def feed(self, at: int, data: bytes) -> None:
        """Feeds a target. Only its typed errors are right."""
        target = self.targets[at]
        self._findings.sent()
        self._findings.counts["decoder_inputs"] += 1
        began = time.process_time()
        try:
            target.run(data)
        except target.errors:
            pass
        except Exception as error:  # any other error is a finding
            what = f"{type(error).__name__}: {error}"
            self._findings.found("untyped_errors", target.name, what, data)
        if time.process_time() - began > _SLOW_S:
            self._findings.found("hangs", target.name, "takes seconds", data)

    def made(self, rng: random.Random) -> tuple[int, bytes]:
        """Returns an input made from one that a target has, without a look at coverage."""
        at = rng.randrange(len(self.targets))
        data = rng.choice(self._inputs[at])
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            if len(data) < _MOST_BYTES:  # repeated parts multiply
                data = self.targets[at].change(rng, data)
        return at, data


def found_for(name: str) -> list[bytes]:
    """Returns the inputs of earlier findings of a target."""
    entries = [json.loads(line) for line in FOUND.read_text("utf-8").splitlines()]
    return [_found(entry) for entry in entries if entry["target"] == name]


def _found(entry: dict[str, Any]) -> bytes:
    """Returns an input: a text, bytes in base64, or a body with a value nested in a member."""
    if "text" in entry:
        return str(entry["text"]).encode()
    if "base64" in entry:
        return base64.b64decode(entry["base64"])
    member, depth = entry["nested"]
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return json.dumps({"model": "policy", "input": "go", member: value}).encode()
