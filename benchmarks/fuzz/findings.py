"""What the attackers count, and what they keep of an input that something was wrong with."""

import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_MOST_KEPT = 200


@dataclass
class Findings:
    """Counts of one process, and the inputs behind its findings, one JSON object a line."""

    log: Path
    counts: Counter[str] = field(default_factory=Counter)
    """Inputs, and findings by kind: hangs, untyped_errors."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How often each route or RPC gave each answer, so that a run can be judged."""

    def sent(self, inputs: int = 1) -> None:
        """Counts inputs."""
        self.counts["inputs"] += inputs

    def answered(self, where: str, outcome: str) -> None:
        """Counts an answer."""
        self.outcomes[f"{where} {outcome}"] += 1

    def found(self, kind: str, where: str, what: str, *inputs: bytes) -> None:
        """Counts a finding and keeps the inputs.

        Args:
            kind: hangs or untyped_errors.
            where: The RPC or the route.
            what: What happened.
            *inputs: The messages or the body that were sent.
        """
        self.counts[kind] += 1
        if self.counts[kind] <= _MOST_KEPT:
            entry = {
                "kind": kind,
                "where": where,
                "what": what[:2000],
                "inputs": [base64.b64encode(one).decode() for one in inputs],
            }
            with self.log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
