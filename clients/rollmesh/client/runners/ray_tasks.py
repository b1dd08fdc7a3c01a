"""Agents as Ray tasks: one task for each session, with the base URL and key in its environment.

The protocol is in docs/runners.md. Ray is imported when the first agent runs.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.client.sessions.session import Session
from rollmesh.runtime.errors import InvalidFieldError


@dataclass(frozen=True, kw_only=True)
class RayRunner:
    """Runs a function as a Ray task for each session; an `AgentRunner`."""

    agent: Callable[[Any], Any]
    """Gets the sample, in the task; plain or asynchronous. Returns what a runner returns."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task: `num_cpus`, `resources`, `runtime_env`, ..."""
    model: str = "policy"
    """Name of the model, for agents that must be told one."""
    grace_s: float = 10.0
    """From asking a task to end to killing its worker, seconds; shorter where the rollout's is."""

    async def __call__(self, sample: Any, session: Session) -> Any:
        """Runs the agent in a task; returns what it returns.

        Raises:
            InvalidFieldError: This process is not connected to Ray.
            RayError: The agent failed, or its worker died; the agent's own class is among its
                bases.
        """
        import ray  # noqa: PLC0415 - not everyone has it

        if not ray.is_initialized():  # Ray would start a cluster here, and block the loop meanwhile
            raise InvalidFieldError("runner", "Ray is not connected; call ray.init() first")
        environment = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": self.model,
            "ROLLMESH_SESSION_ID": session.session_id,
        }
        # A task that Ray ran again by itself would mix two attempts in one session.
        task = _task().options(**self.options, max_retries=0, retry_exceptions=False)
        ref = task.remote(self.agent, sample, environment)
        result: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await self._end(ray, ref, result)
            raise

    async def _end(self, ray: Any, ref: Any, result: asyncio.Future[Any]) -> None:
        """Interrupts a task; kills its worker where it goes on, or at a second cancellation."""
        ray.cancel(ref, force=False)
        try:
            await asyncio.wait({result}, timeout=self.grace_s)
        finally:
            if not result.done():
                ray.cancel(ref, force=True)
        await asyncio.wait({result}, timeout=self.grace_s)
        if result.done() and not result.cancelled():
            result.exception()  # seen: that it was cancelled


@functools.cache
def _task() -> Any:
    """Returns the remote function; it goes to the workers by value, which may lack rollmesh."""
    import ray  # noqa: PLC0415

    def run_agent(agent: Callable[[Any], Any], sample: Any, environment: dict[str, str]) -> Any:
        import asyncio  # noqa: PLC0415
        import inspect  # noqa: PLC0415
        import os  # noqa: PLC0415

        former = dict(os.environ)  # noqa: TID251 - the worker's: the next agent gets another key
        os.environ.update(environment)  # noqa: TID251
        try:
            result = agent(sample)
            return asyncio.run(result) if inspect.iscoroutine(result) else result
        finally:
            os.environ.clear()  # noqa: TID251
            os.environ.update(former)  # noqa: TID251

    return ray.remote(run_agent)
