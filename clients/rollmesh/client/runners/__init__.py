"""Agent runners: functions that run one agent on one sample in one session.

This module has the registry of runners, and `commands` runs agents as commands. May import
`sessions` and the modules below it.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from rollmesh.client.sessions import Session
from rollmesh.runtime.errors import InvalidFieldError

AgentRunner: TypeAlias = Callable[[Any, Session], Awaitable[Any]]
"""Runs one agent on one sample in one session.

Returns the reward (a number, `Rewards`, a mapping, or None), or anything else if the rollout has a
reward function, which receives it. If it has a method `closed(client, session_id)`, the rollout
awaits that after it closed a session. The collector may not have the session yet.
"""

_RUNNERS: dict[str, AgentRunner] = {}


def register_runner(name: str, runner: AgentRunner) -> None:
    """Registers a runner under a name.

    Raises:
        InvalidFieldError: The name is registered for another runner.
    """
    if _RUNNERS.get(name, runner) is not runner:
        raise InvalidFieldError("name", f"{name!r} is taken; give another")
    _RUNNERS[name] = runner


def find_runner(runner: str | AgentRunner | None) -> AgentRunner:
    """Returns the runner of a name, or the given function.

    Raises:
        InvalidFieldError: The name is not registered, or the runner is not callable.
    """
    found = _RUNNERS.get(runner) if isinstance(runner, str) else runner
    if found is None:
        given = f"{runner!r} is not registered" if runner else "is not given"
        raise InvalidFieldError("runner", f"{given}; registered are {sorted(_RUNNERS)}")
    if not callable(found):
        raise InvalidFieldError("runner", f"is {found!r:.200}; give a function or a name")
    return found


def agent_name(sample: Any) -> str:
    """Returns the `agent_name` of a sample, empty if it has none."""
    if isinstance(sample, Mapping):
        return str(sample.get("agent_name") or "")
    return str(getattr(sample, "agent_name", None) or "")
