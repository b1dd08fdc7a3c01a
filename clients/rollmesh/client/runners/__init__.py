"""Agent runners: what runs one agent on one sample in one session.

Here are the functions known by name; beside it what runs agents elsewhere: as a command
(`commands`), behind HTTP (`remote`), as a Ray task (`ray_tasks`).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from rollmesh.client.sessions.session import Session
from rollmesh.runtime.errors import InvalidFieldError

AgentRunner: TypeAlias = Callable[[Any, Session], Awaitable[Any]]
"""Runs one agent on one sample in one session.

Returns the reward (a number, `Rewards`, None to leave it out), or anything else where the rollout
has a reward function, which then gets it.
"""

_RUNNERS: dict[str, AgentRunner] = {}


def register_runner(name: str, runner: AgentRunner) -> None:
    """Makes a runner known by name.

    Raises:
        InvalidFieldError: The name is taken by another one.
    """
    if _RUNNERS.get(name, runner) is not runner:
        raise InvalidFieldError("name", f"{name!r} is taken; give another")
    _RUNNERS[name] = runner


def find_runner(runner: str | AgentRunner | None) -> AgentRunner:
    """Returns a runner by its name, or the one that is given.

    Raises:
        InvalidFieldError: There is none, or it cannot be called.
    """
    found = _RUNNERS.get(runner) if isinstance(runner, str) else runner
    if found is None:
        given = f"{runner!r} is not registered" if runner else "is not given"
        raise InvalidFieldError("runner", f"{given}; registered are {sorted(_RUNNERS)}")
    if not callable(found):
        raise InvalidFieldError("runner", f"is {found!r:.200}; give a function or a name")
    return found


def agent_name(sample: Any) -> str:
    """Returns the name of the runner that a sample asks for: its `agent_name`; empty for none."""
    if isinstance(sample, Mapping):
        return str(sample.get("agent_name") or "")
    return str(getattr(sample, "agent_name", None) or "")
