"""Agent runners by name: what plays one session."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from rollmesh.client.sessions import Session
from rollmesh.runtime.errors import InvalidFieldError


@dataclass(frozen=True)
class RunResult:
    """What a runner may return where a reward is not all."""

    reward: float | None = None
    """Reward of the session."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Added to the session's metadata."""


Ran: TypeAlias = RunResult | float | None
Runner: TypeAlias = Callable[[Session, Any], Ran | Awaitable[Ran]]
"""Plays one session for one prompt and returns its reward.

A coroutine function runs on the event loop, a plain function in a thread of its own.
"""
_Runner = TypeVar("_Runner", bound=Runner)

_runners: dict[str, Runner] = {}


def register_runner(name: str) -> Callable[[_Runner], _Runner]:
    """Registers the decorated function under a name.

    Raises:
        InvalidFieldError: The name is taken by another function.
    """

    def register(runner: _Runner) -> _Runner:
        if _runners.setdefault(name, runner) is not runner:
            raise InvalidFieldError("name", f"{name!r} names another runner; give another name")
        return runner

    return register


def find_runner(runner: str | Runner) -> Runner:
    """Returns the runner of that name; a function is returned as it is.

    Raises:
        InvalidFieldError: There is none of that name.
    """
    if not isinstance(runner, str):
        return runner
    if runner not in _runners:
        known = ", ".join(sorted(_runners)) or "none"
        raise InvalidFieldError("runner", f"{runner!r} is not registered; known are: {known}")
    return _runners[runner]
