"""HTTP calls to a server. Each has a deadline, and reads a bounded number of bytes."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partialmethod
from typing import Any

import aiohttp

from rollmesh.runtime.errors import EngineDeadError, EngineFaultError

_LARGEST = 4 * 1024 * 1024
"""Bytes of the answer to a control call. /server_info has the largest answer."""
_SHOWN = 300
_LARGE = 64 * 1024
_END_S = 1.0
DUE = object()
"""Stands among events for the time `due_s`."""
_RETRY_MS = 5_000


class RefusedError(Exception):
    """The server answered a call with an error."""

    def __init__(self, path: str, status: int, message: str) -> None:
        """Takes the path of the call, the HTTP status, and the server's message."""
        super().__init__(f"{path} answered {status}: {message}")
        self.status = status
        self.message = message


class Stream:
    """The answer to one request."""

    def __init__(self, response: aiohttp.ClientResponse, most: int, server: "Server") -> None:
        """Takes the response, its size limit in bytes, and the server."""
        self._response = response
        self._most = most
        self._server = server
        self.due_s: float | None = None
        """When `events` yields `DUE`, by the loop's clock. None is never."""

    @property
    def connection(self) -> object:
        """Returns the connection of the answer. A connection belongs to one server process."""
        connection = self._response.connection
        return None if connection is None else connection.transport

    async def whole(self) -> Any:
        """Returns the JSON value of the whole answer.

        Raises:
            EngineFaultError: It is too large, or no JSON.
        """
        async with self._server.wait():
            data = await _read(self._response, self._most)
        return await _json_of(data)

    async def events(self) -> AsyncGenerator[Any, None]:
        """Yields the JSON values of server-sent events, until the event that ends them.

        Raises:
            EngineFaultError: An event is too large or no JSON, or the last one is missing.
        """
        unread = bytearray()
        while (part := await self._next()) != b"":
            if part is None:
                yield DUE
                continue
            unread += part
            while (end := unread.find(b"\n\n")) >= 0:
                event, unread = bytes(unread[:end]), unread[end + 2 :]
                if not event.startswith(b"data: "):  # a comment that keeps the connection alive
                    continue
                if event == b"data: [DONE]":
                    with suppress(TimeoutError):  # the connection serves the next request then
                        async with asyncio.timeout(_END_S):
                            await self._response.content.read(1)
                    return
                yield _parse(event[6:])
            if len(unread) > self._most:
                raise EngineFaultError(f"the server sent an event of more than {self._most} bytes")
        raise EngineFaultError("the server ended a stream before its last event")

    async def _next(self) -> bytes | None:
        """Returns the next bytes, b"" at the end, None when something is due."""
        async with self._server.wait():
            try:
                async with asyncio.timeout_at(self.due_s):
                    part: bytes = await self._response.content.readany()
            except TimeoutError:
                return None
            except RuntimeError as error:  # of aiohttp, once the pool of connections is closed
                raise aiohttp.ClientConnectionError(str(error)) from error
        return part


class Server:
    """A server that samples."""

    def __init__(self, url: str, key: str, timeout_ms: int) -> None:
        """Takes its URL, its API key, and the deadline of a call, milliseconds."""
        self._url = url.rstrip("/")
        self._timeout_s = timeout_ms / 1000
        self._headers = {"accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._waits: set[asyncio.Timeout] = set()
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Opens the pool of connections. Needs a running loop."""
        connect = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=connect, headers=self._headers
        )

    async def close(self) -> None:
        """Ends all requests and closes their connections."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Waits in the block, without a deadline of its own.

        Raises:
            TimeoutError: `close` was called.
        """
        async with asyncio.timeout(None) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any], most: int) -> AsyncIterator[Stream]:
        """Yields the answer to a request that takes as long as the model samples.

        Leaving before its end closes the connection, and the server ends the request. A silent
        server is noticed by other calls. `close` ends the answer then.

        Raises:
            RefusedError: The server answered with an error.
            EngineDeadError: The connection broke.
        """
        data = await asyncio.to_thread(lambda: json.dumps(body).encode())
        try:
            async with self.wait():
                response = await self._opened().post(
                    self._url + path, data=data, headers=_JSON, allow_redirects=False
                )
            async with response:
                async with self.wait():
                    await _check(path, response)
                yield Stream(response, most, self)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise self._lost(error) from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_ms: int = 0,
    ) -> dict[str, Any]:
        """Returns the answer of a call. `timeout_ms` is its deadline, if it is another one.

        Raises:
            RefusedError: The server answered with an error.
            EngineDeadError: It did not answer in time, or the connection broke.
            EngineFaultError: The answer is too large, or no JSON object.
        """
        timeout_s = timeout_ms / 1000 if timeout_ms else self._timeout_s
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._opened().request(
                    method, self._url + path, json=body, params=query, allow_redirects=False
                ) as response,
            ):
                await _check(path, response)
                data = await _read(response, _LARGEST)
                is_json = response.content_type == "application/json" and data not in {b"", b"null"}
                answer = await _json_of(data) if is_json else {}
        except TimeoutError as error:
            raise EngineDeadError(
                f"the server at {self._url} did not answer {path} in {timeout_s:g} s",
                retry_delay_ms=_RETRY_MS,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(error) from error
        if not isinstance(answer, dict):
            raise EngineFaultError(f"the server answered {path} with no JSON object")
        return answer

    get, post = partialmethod(_call, "GET"), partialmethod(_call, "POST")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise EngineDeadError("the server is no longer attached", retry_delay_ms=_RETRY_MS)
        return self._session

    def _lost(self, error: BaseException) -> EngineDeadError:
        said = str(error) or type(error).__name__
        return EngineDeadError(
            f"the connection to the server at {self._url} was lost: {said:.{_SHOWN}}",
            retry_delay_ms=_RETRY_MS,
        )


_JSON = {"content-type": "application/json"}


async def _check(path: str, response: aiohttp.ClientResponse) -> None:
    """Checks the status of a response.

    Raises:
        RefusedError: It is an error.
    """
    if response.status == 200:
        return
    data = await response.content.read(_LARGE)
    try:
        message = f"{json.loads(data)['error']['message']:.{_SHOWN}}"
    except (ValueError, TypeError, KeyError, RecursionError):
        message = data[:_SHOWN].decode(errors="replace")
    raise RefusedError(path, response.status, message)


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Returns the whole body.

    Raises:
        EngineFaultError: It has more than `most` bytes.
    """
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > most:
            raise EngineFaultError(f"the server sent an answer of more than {most} bytes")
    return bytes(data)


async def _json_of(data: bytes) -> Any:
    return _parse(data) if len(data) < _LARGE else await asyncio.to_thread(_parse, data)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineFaultError(f"the server sent no JSON: {error}") from error
