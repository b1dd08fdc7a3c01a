"""Agents behind an agent server: submit, poll, collect and cancel over HTTP.

The protocol is in docs/runners.md. A run is named by its session, so resubmitting it is safe while
the server remembers it. If the server has forgotten a run that may have started, the attempt fails:
restarting it in the same session would mix two attempts.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from rollmesh.client.sessions.session import Session
from rollmesh.client.shielding import shielded
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import InvalidFieldError

_ERROR_CHARS = 2_000
_CONNECT_S = 10.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_BUSY = {429, 503}
_JSON = {"content-type": "application/json"}


class RemoteAgentError(Exception):
    """An agent server refused a run, or the agent failed there."""


class RemoteAgentLostError(Exception):
    """An agent server has forgotten a run, or was unavailable for too long."""


@dataclass(frozen=True, kw_only=True)
class RemoteRunner:
    """Runs agents on an agent server; an `AgentRunner`.

    Use it as a context or `close` it, because it keeps connections open.
    """

    url: str
    """Base URL of the server, without `/runs`."""
    token: str = ""
    """Sent as a bearer token; empty sends none."""
    model: str = ""
    """Name of the model that the agent is told; empty: the session's."""
    encode: Callable[[Any], Any] = lambda sample: sample
    """Converts a sample to JSON values."""
    poll_s: float = 10.0
    """Time for which the server may hold a poll open, seconds."""
    away_s: float = 60.0
    """Time for which the server may be unavailable before the attempt fails, seconds."""
    cancel_s: float = 5.0
    """Time limit for deleting a run, seconds."""
    max_connections: int = 256
    """Maximum number of connections; a run holds one while it is polled."""

    def __post_init__(self) -> None:
        """Makes the connection pool; nothing connects yet.

        Raises:
            InvalidFieldError: The URL is not an HTTP URL.
        """
        if not self.url.startswith(("http://", "https://")):
            raise InvalidFieldError(
                "url", f"is {self.url!r}; give a URL that begins with http:// or https://"
            )
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        timeout = httpx2.Timeout(self.poll_s + _CONNECT_S, connect=_CONNECT_S, pool=None)
        limits = httpx2.Limits(max_connections=self.max_connections)
        http = httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        object.__setattr__(self, "_http", http)  # derived from the frozen fields

    async def __aenter__(self) -> "RemoteRunner":
        """Returns itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the connections."""
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def __call__(self, sample: Any, session: Session) -> Any:
        """Runs an agent on the server; returns its result.

        Raises:
            RemoteAgentError: The server refused the run, or the agent failed.
            RemoteAgentLostError: The server forgot the run, or was unavailable for too long.
            InvalidFieldError: The sample is not JSON.
        """
        path = f"/runs/{session.session_id}"
        body = self._body(sample, session)
        try:
            run = await self._submit(path, body)
            while run.get("status") == "running":
                run = await self._poll(path)
        finally:
            with suppress(httpx2.HTTPError, TimeoutError):  # best effort
                await shielded(self._forget(path), self.cancel_s)
        if run.get("status") != "completed":
            raise RemoteAgentError(f"the agent failed: {run.get('error')!s:.{_ERROR_CHARS}}")
        return run.get("result")

    def _body(self, sample: Any, session: Session) -> bytes:
        run = {
            "session_id": session.session_id,
            "base_url": session.base_url,
            "api_key": session.api_key,
            "model": self.model or session.model,
        }
        try:
            return json.dumps({**run, "sample": self.encode(sample)}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidFieldError("sample", f"{error}; give the runner an `encode`") from error

    @property
    def _client(self) -> httpx2.AsyncClient:
        http: httpx2.AsyncClient = vars(self)["_http"]
        return http

    async def _submit(self, path: str, body: bytes) -> Mapping[str, Any]:
        """Submits a run until the server has it.

        If the reply to a request was lost, the run may have started, so the server is polled.
        If the server does not know the run, the attempt is lost.
        """
        waits = _Waits(self.away_s)
        while True:
            try:
                response = await self._client.put(path, content=body, headers=_JSON)
            except (
                httpx2.ConnectError,
                httpx2.ConnectTimeout,
            ) as error:  # the request was not sent
                await waits.next(error)
            except httpx2.TransportError:
                return await self._poll(path)
            else:
                if response.status_code not in _BUSY:
                    return _read(response)
                await waits.next(None, response)

    async def _poll(self, path: str) -> Mapping[str, Any]:
        """Waits for a run to end, or until the server has held the poll long enough."""
        waits = _Waits(self.away_s)
        while True:
            try:
                response = await self._client.get(path, params={"wait_s": self.poll_s})
            except httpx2.TransportError as error:
                await waits.next(error)
                continue
            if response.status_code == 404:
                raise RemoteAgentLostError(
                    "the agent server no longer knows the run; was it restarted?"
                )
            if response.status_code < 500 and response.status_code != 429:
                return _read(response)
            await waits.next(None, response)

    async def _forget(self, path: str) -> None:
        async with asyncio.timeout(self.cancel_s):
            await self._client.delete(path)


class _Waits:
    """Delays between tries, which together have a limit."""

    def __init__(self, limit_s: float) -> None:
        self._deadline = asyncio.get_running_loop().time() + limit_s
        self._limit_s = limit_s
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)

    async def next(self, error: Exception | None, response: httpx2.Response | None = None) -> None:
        """Waits for the next try.

        Raises:
            RemoteAgentLostError: There is no time for another.
        """
        asked_s = 0.0
        if response is not None:
            with suppress(ValueError):  # absent, or a date
                asked_s = float(response.headers.get("retry-after", ""))
        wait_s = max(asked_s, self._backoff.next_s())
        if asyncio.get_running_loop().time() + wait_s >= self._deadline:
            why = repr(error) if response is None else f"status {response.status_code}"
            raise RemoteAgentLostError(
                f"the agent server was unavailable for {self._limit_s:g} s: {why}"
            ) from error
        await asyncio.sleep(wait_s)


def _read(response: httpx2.Response) -> Mapping[str, Any]:
    """Returns a run as the server describes it.

    Raises:
        RemoteAgentError: The server refused the request, or speaks something else.
    """
    if response.status_code >= 300:
        said = response.text[:_ERROR_CHARS]
        raise RemoteAgentError(f"the agent server answered {response.status_code}: {said}")
    try:
        run = response.json()
    except ValueError as error:
        raise RemoteAgentError(f"the agent server's answer is not JSON: {error}") from error
    if not isinstance(run, dict) or run.get("status") not in ("running", "completed", "failed"):
        raise RemoteAgentError(
            f"the agent server's answer does not describe a run: {response.text[:200]}"
        )
    return run
