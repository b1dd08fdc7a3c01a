"""Compares the answers agents got with the deliveries the trainer got."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """A stretch of time, seconds on the monotonic clock."""

    began: float
    ended: float


@dataclass(slots=True)
class Audit:
    """The contents of the agents' and the trainer's logs."""

    opened: dict[str, str] = field(default_factory=dict)
    """Key of each session, by session id."""
    closed: set[str] = field(default_factory=set)
    answered: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the token ids that the agent received, by answer."""
    failures: list[Interval] = field(default_factory=list)
    """Requests that ended with an error for the agent, after the SDK's own retries."""
    received: dict[str, str] = field(default_factory=dict)
    """Digest of each delivered session, by session id."""
    trained: Counter[str] = field(default_factory=Counter)
    """Number of delivered rows in which each turn is trained."""
    excluded: set[str] = field(default_factory=set)
    """Turns that were delivered but not trained, for a stated reason."""
    tokens: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the token ids that the trainer received, by turn."""
    migrated: set[str] = field(default_factory=set)
    """Turns that one engine began and another one completed."""
    versions: dict[str, list[int | str]] = field(default_factory=dict)
    """Versions that sampled each turn: of the weights, or as text of an adapter."""
    scored: Counter[bool] = field(default_factory=Counter)
    """Trajectories that came with the scores of a teacher, by whether these were right."""
    answered_s: dict[str, float] = field(default_factory=dict)
    """When the agent had each answer, on the monotonic clock."""
    pushing_s: dict[int | str, float] = field(default_factory=dict)
    """When the push of each version began. Version 0 is what engines begin with."""
    pushed: set[int | str] = field(default_factory=set)
    """Versions whose push was accepted, as far as the trainer knows."""
    changed: int = 0
    """Redeliveries that differ from the first delivery."""
    after_acknowledgement: int = 0
    """Deliveries that the trainer already knew to be acknowledged."""
    redelivered: int = 0
    drift: int = 0
    """Turns whose prompt in the engine differs from the prompt in the trajectory."""

    @classmethod
    def read(cls, agents: Path, trainer: Path) -> "Audit":
        """Reads both files. Ignores a last line cut off by a kill."""
        audit = cls()
        for line in _whole_lines(agents):
            audit._note(*line.split(" "))
        acknowledged: set[str] = set()
        for line in _whole_lines(trainer):
            entry = json.loads(line)
            if "acknowledged" in entry:
                acknowledged.add(entry["acknowledged"])
            elif "pushing" in entry:
                audit.pushing_s.setdefault(entry["pushing"], entry["at_s"])
            elif "pushed" in entry:
                audit.pushed.add(entry["pushed"])
            if "received" not in entry:
                continue
            audit.after_acknowledgement += entry["received"] in acknowledged
            for session in entry["sessions"]:
                audit._receive(session)
        return audit

    def _note(self, what: str, first: str, second: str = "", third: str = "", *_: str) -> None:
        """Takes one line of the agents' log."""
        match what:
            case "OPEN":
                self.opened[first] = second
            case "CLOSED":
                self.closed.add(first)
            case "ANSWERED":
                self.answered[first] = int(second)
                if third:
                    self.answered_s[first] = float(third)
            case _:
                self.failures.append(Interval(float(first), float(second)))

    def _receive(self, session: dict[str, Any]) -> None:
        session_id, digest = session["session_id"], session["digest"]
        if session_id in self.received:
            self.redelivered += 1
            self.changed += self.received[session_id] != digest
            return
        self.received[session_id] = digest
        self.drift += session["drift"]
        self.scored.update(session.get("scores", []))
        for turn, is_trained, is_migrated, crc, versions in session["turns"]:
            self.tokens[turn] = crc
            self.versions[turn] = versions
            if is_migrated:
                self.migrated.add(turn)
            if is_trained:
                self.trained[turn] += 1
            else:
                self.excluded.add(turn)

    @property
    def delivered(self) -> int:
        """Answered turns that arrived."""
        return len(self.answered.keys() & (self.trained.keys() | self.excluded))

    @property
    def lost(self) -> int:
        """Answered turns that did not arrive."""
        return len(self.answered) - self.delivered

    @property
    def doubled(self) -> int:
        """Turns trained more than once, plus redeliveries of acknowledged deliveries."""
        twice = sum(count - 1 for count in self.trained.values() if count > 1)
        return twice + self.changed + self.after_acknowledgement

    @property
    def wrong_tokens(self) -> int:
        """Answered turns that arrived with other tokens than the agent received."""
        arrived = self.answered.keys() & self.tokens.keys()
        return sum(self.answered[turn] != self.tokens[turn] for turn in arrived)

    @property
    def wrong_versions(self) -> int:
        """Turns with a version that nobody pushed, or only after the agent had the answer."""
        begun_s: dict[int | str, float] = {0: 0.0, **self.pushing_s}
        return sum(
            any(
                one not in begun_s or begun_s[one] > self.answered_s.get(turn, begun_s[one])
                for one in versions
            )
            for turn, versions in self.versions.items()
        )

    def unexplained(self, outages: Iterable[Interval], after_s: float) -> int:
        """Returns how many failures overlap none of the outages.

        Args:
            outages: When something without which no answer is possible was away.
            after_s: How long after an outage its consequences may last, seconds.
        """
        away = [Interval(began, ended + after_s) for began, ended in outages]
        return sum(
            not any(one.began <= it.ended and it.began <= one.ended for it in away)
            for one in self.failures
        )


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
