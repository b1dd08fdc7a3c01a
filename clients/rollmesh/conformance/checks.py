"""A check, and how it ends."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from rollmesh.conformance.server import Server

Run = Callable[[Server], Awaitable[None]]


class Verdict(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_SEEN = "not seen"
    """The server or its model gave no occasion to see it."""
    SKIPPED = "skipped"
    """The server does not serve the protocol."""


class NotSeenError(Exception):
    """A check had no occasion. The message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that agents or trainers rely on."""

    name: str
    """`protocol.family.check`."""
    what: str
    """The requirement, as a sentence."""
    breaks: str
    """What breaks for whom where it does not hold."""
    run: Run

    @property
    def protocol(self) -> str:
        """The protocol that it is about."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Result:
    """How a check ended at one server."""

    check: Check
    verdict: Verdict
    detail: str = ""
    """Why, where it did not pass."""
    seconds: float = 0.0


@dataclass(slots=True)
class Family:
    """Checks about one subject."""

    name: str
    """`protocol.family`."""
    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, what: str, breaks: str, run: Run) -> None:
        """Adds a check."""
        self.checks.append(Check(f"{self.name}.{name}", what, breaks, run))

    def check(self, what: str, breaks: str) -> Callable[[Run], Run]:
        """Returns a decorator that adds a function as the check of its name."""

        def added(run: Run) -> Run:
            name = getattr(run, "__name__", "").strip("_").replace("_", "-")
            self.add(name, what, breaks, run)
            return run

        return added
