"""Agents as Ray tasks: one task per session, with the base URL and key in its environment.

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
    """Called with the sample in the task; plain or asynchronous. Returns a runner's result."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task: `num_cpus`, `resources`, `runtime_env`, ..."""
    model: str = ""
    """Name of the model that the agent is told; empty: the session's."""
    grace_s: float = 10.0
    """From cancelling a task to killing its worker, seconds; limited by the rollout's grace."""

    async def __call__(self, sample: Any, session: Session) -> Any:
        """Runs the agent in a task; returns its result.

        Raises:
            InvalidFieldError: This process is not connected to Ray.
            RayError: The agent failed, or its worker died. The class of the agent's error is among
                its bases.
        """
        import ray  # noqa: PLC0415 - optional

        if not ray.is_initialized():  # Ray would start a cluster and block the loop
            raise InvalidFieldError("runner", "Ray is not connected; call ray.init() first")
        environment = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": self.model or session.model,
            "ROLLMESH_SESSION_ID": session.session_id,
        }
        # Ray's own retries would mix two attempts in one session.
        task = _task().options(**self.options, max_retries=0, retry_exceptions=False)
        ref = task.remote(self.agent, sample, environment)
        result: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await self._end(ray, ref, result)
            raise

    async def _end(self, ray: Any, ref: Any, result: asyncio.Future[Any]) -> None:
        """Cancels a task; kills its worker after the grace or at a second cancellation."""
        ray.cancel(ref, force=False)
        try:
            await asyncio.wait({result}, timeout=self.grace_s)
        finally:
            if not result.done():
                ray.cancel(ref, force=True)
        await asyncio.wait({result}, timeout=self.grace_s)
        if result.done() and not result.cancelled():
            result.exception()  # retrieved, so that asyncio does not report it


@functools.cache
def _task() -> Any:
    """Returns the remote function; sent by value, because workers may lack rollmesh."""
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
