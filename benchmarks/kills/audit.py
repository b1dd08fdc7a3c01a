"""What the agents were answered against what the trainer was delivered."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Audit:
    """Read from the files of agents and trainers."""

    opened: dict[str, str] = field(default_factory=dict)
    """Key of each session, by id."""
    closed: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    received: dict[str, str] = field(default_factory=dict)
    """Digest of each delivered session, by id."""
    trained: Counter[str] = field(default_factory=Counter)
    """In how many delivered rows each turn is trained."""
    excluded: set[str] = field(default_factory=set)
    """Turns that were delivered and not trained, with a reason."""
    changed: int = 0
    """Redeliveries that were not what had been delivered before."""
    after_acknowledgement: int = 0
    """Deliveries of what the trainer knew to be acknowledged."""
    redelivered: int = 0
    drift: int = 0
    """Turns whose prompt the engine received otherwise than the trajectory has it."""

    @classmethod
    def read(cls, agents: Path, trainer: Path) -> "Audit":
        """Reads both files; a last line that a kill cut off does not count."""
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
        """Answered turns that did not."""
        return len(self.answered) - self.delivered

    @property
    def doubled(self) -> int:
        """Turns trained more than once, and deliveries that came again though acknowledged."""
        twice = sum(count - 1 for count in self.trained.values() if count > 1)
        return twice + self.changed + self.after_acknowledgement


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
