"""The door by which the conformance kit opens sessions and reads their records."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

Record = dict[str, Any]


class Recorder(Protocol):
    """A server under test, as a trainer uses it."""

    async def open(self, sampling: Record, /) -> Record:
        """Opens a session whose requests have these fields. Returns `id`, `base_url`, `key`."""
        ...

    async def renew(self) -> bool:
        """Gives the engine new weights. Returns false if the server knows no versions."""
        ...

    async def close(self, session_id: str) -> Record:
        """Ends a session. Returns `rows`, and `calls` if the engine logs them."""
        ...


@asynccontextmanager
async def door(recorder: Recorder) -> AsyncIterator[str]:
    """Serves a recorder. Yields the capture URL."""

    async def opened(request: web.Request) -> web.Response:
        return web.json_response(await recorder.open((await request.json())["sampling"]))

    async def renewed(_request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if await recorder.renew() else 501)

    async def closed(request: web.Request) -> web.Response:
        return web.json_response(await recorder.close(request.match_info["id"]))

    routes = {
        ("POST", "/sessions"): opened,
        ("POST", "/sessions/{id}/version"): renewed,
        ("DELETE", "/sessions/{id}"): closed,
    }
    async with listening(routes) as url:
        yield url


@asynccontextmanager
async def listening(
    routes: Mapping[tuple[str, str], Callable[[web.Request], Awaitable[web.StreamResponse]]],
) -> AsyncIterator[str]:
    """Serves HTTP at a free port. Yields its URL."""
    app = web.Application(client_max_size=2**24)
    for (method, path), handle in routes.items():
        app.router.add_route(method, path, handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def span(start: int, end: int, logprobs: list[float], **fields: Any) -> Record:
    """Returns the record of one answer within a row."""
    return {"start": start, "end": end, "trained": True, "logprobs": logprobs, **fields}
