"""Compares the answers agents got with the deliveries the trainer got."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Audit:
    """The contents of the agents' and the trainer's logs."""

    opened: dict[str, str] = field(default_factory=dict)
    """Key of each session, by session id."""
    closed: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    received: dict[str, str] = field(default_factory=dict)
    """Digest of each delivered session, by session id."""
    trained: Counter[str] = field(default_factory=Counter)
    """Number of delivered rows in which each turn is trained."""
    excluded: set[str] = field(default_factory=set)
    """Turns that were delivered but not trained, for a stated reason."""
    changed: int = 0
    """Redeliveries that differ from the first delivery."""
    after_acknowledgement: int = 0
    """Deliveries that the trainer already knew to be acknowledged."""
    redelivered: int = 0
    drift: int = 0
    """Turns whose prompt in the engine differs from the prompt in the trajectory."""

    @classmethod
    def read(cls, agents: Path, trainer: Path) -> "Audit":
        """Reads both files; ignores a last line cut off by a kill."""
        audit = cls()
        for line in _whole_lines(agents):
            what, id_, *key = line.split(" ")
            if what == "OPEN":
                audit.opened[id_] = key[0]
            else:
                {"CLOSED": audit.closed, "ANSWERED": audit.answered}[what].add(id_)
        acknowledged: set[str] = set()
        for line in _whole_lines(trainer):
            entry = json.loads(line)
            if "acknowledged" in entry:
                acknowledged.add(entry["acknowledged"])
                continue
            audit.after_acknowledgement += entry["received"] in acknowledged
            for session in entry["sessions"]:
                audit._receive(session)
        return audit

    def _receive(self, session: dict[str, Any]) -> None:
        session_id, digest = session["session_id"], session["digest"]
        if session_id in self.received:
            self.redelivered += 1
            self.changed += self.received[session_id] != digest
            return
        self.received[session_id] = digest
        self.drift += session["drift"]
        for turn, is_trained in session["turns"]:
            if is_trained:
                self.trained[turn] += 1
            else:
                self.excluded.add(turn)

    @property
    def delivered(self) -> int:
        """Answered turns that arrived."""
        return len(self.answered & (self.trained.keys() | self.excluded))

    @property
    def lost(self) -> int:
        """Answered turns that did not arrive."""
        return len(self.answered) - self.delivered

    @property
    def doubled(self) -> int:
        """Turns trained more than once, plus redeliveries of acknowledged deliveries."""
        twice = sum(count - 1 for count in self.trained.values() if count > 1)
        return twice + self.changed + self.after_acknowledgement


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
