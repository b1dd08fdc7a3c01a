"""The viewer's HTTP: its pages, and JSON of a mesh. It reads, and changes nothing.

Agents' text is hostile: it reaches a page as JSON and is shown as text, pages run no script but
their own, and a browser that was led here by another name gets nothing.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollmesh.client import Client, Observer, states_of
from rollmesh.runtime import clock
from rollmesh.runtime.alarms import Alarm
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionUnknownError
from rollmesh.runtime.runs import told
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2, router_pb2, session_pb2
from rollmesh.view.history import History
from rollmesh.view.index import Index, Selection
from rollmesh.view.sessions import REASONS, Decode, closed_session, listed, running_session

_log = logging.getLogger(__name__)
_PAGE = 500
_POLL_S, _LOOK_S = 1.0, 5.0
_AT_ONCE = 50
_REWARDS_MS = 10_000
"""Time between two looks for rewards that came late, so that they cost the collector little."""
_CALL_S = 20.0
_CHOICES_MS = 2_000
_SEARCHED_BYTES = 1 << 20
"""Sessions with more messages are found by their ids and metadata only."""
_LOGINS = 1000
_COOKIE = "rollmesh-view"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSettings:
    """How a viewer is reached, and how it shows tokens."""

    hosts: frozenset[str]
    """Values of the `Host` header that it answers, without the port."""
    key: str = ""
    """The key that a browser must show. Empty lets everybody in who reaches the port."""
    decode: Decode | None = None
    """Returns the text of token ids. None shows ids."""
    modules: Mapping[str, bytes] = field(default_factory=dict)
    """JavaScript modules that sessions may name in `metadata["view"]`, by that name."""


class Viewer:
    """An ASGI application over one mesh. Run `follow` and `watch` for as long as it serves."""

    def __init__(
        self, client: Client, observer: Observer, index: Index, settings: ViewSettings
    ) -> None:
        """Takes the mesh's client and observer, an empty index, and the settings."""
        self._client = client
        self._observer = observer
        self._alarms: list[Alarm] = []
        self._history = History()
        self._index = index
        self._settings = settings
        self._after = self._error = ""
        self._damaged = 0
        self._choices: dict[str, list[str]] = {}
        self._choices_until = self._rewards_from = 0
        self._logins: OrderedDict[str, None] = OrderedDict()
        static = resources.files("rollmesh.view") / "static"
        self._files = {
            one.name: (one.read_bytes(), _TYPES[one.name[one.name.rindex(".") :]])
            for one in static.iterdir()
        }
        for name, data in settings.modules.items():
            self._files[f"views/{name}.js"] = data, _TYPES[".js"]
        routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/api/mesh": self._mesh,
            "/api/alarms": self._show_alarms,
            "/api/history": self._show_history,
            "/api/choices": self._choose,
            "/api/sessions": partial(self._page, index.sessions),
            "/api/groups": partial(self._page, index.groups),
            "/api/series": self._series,
            "/api/evaluations": self._evaluations,
            "/api/open": self._open,
            "/api/session/{id}": self._session,
            "/api/session/{id}/images/{sha256}": self._image,
        }
        api = [Route(path, end, methods=["GET"]) for path, end in routes.items()]
        self.app = _Guard(
            Starlette(
                routes=[
                    Route("/api/login", self._login, methods=["POST"]),
                    *api,
                    Route("/{name:path}", self._file),
                ],
                exception_handlers={RollmeshError: _answered, TimeoutError: _answered},
            ),
            settings.hosts,
            self._is_known,
        )

    async def follow(self) -> None:
        """Reads the mesh's closed sessions into the index as they arrive, until it is cancelled."""
        backoff = Backoff(0.5, 10.0)
        while True:
            try:
                async with asyncio.timeout(_CALL_S * 3):
                    is_last = await self._read()
                self._error = ""
                backoff.reset()
            except (RollmeshError, TimeoutError) as error:
                self._error = getattr(error, "message", "no collector answers in time")
                _log.warning("the collector is not read", extra=fields(error=self._error))
                await asyncio.sleep(backoff.next_s())
                continue
            if is_last:
                await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Looks for alarms again and again, until it is cancelled."""
        while True:
            self._alarms = await self._observer.watch()
            self._history.add(self._observer.history[-1], clock.unix_ms())
            await asyncio.sleep(_LOOK_S)

    async def _read(self) -> bool:
        """Reads a page of sessions. Returns whether it was the last."""
        page = await self._client.stored_sessions(after=self._after, limit=_PAGE)
        for start in range(0, len(page), _AT_ONCE):  # a slow read goes on where it was cut
            part = page[start : start + _AT_ONCE]
            whole = [one.session for one in part if not one.damaged_session_id]
            records = [await self._with_messages(one) for one in whole]
            left_out = await asyncio.to_thread(self._index.add, records)
            self._damaged += len(part) - len(whole) + left_out
            self._after = part[-1].resume_token
        if len(page) == _PAGE:
            return False
        if clock.monotonic_ms() >= self._rewards_from:
            self._rewards_from = clock.monotonic_ms() + _REWARDS_MS
            await self._read_rewards()
        return True

    async def _read_rewards(self) -> None:
        """Reads sessions again that the collector holds back for a reward."""
        records = []
        for session_id in await asyncio.to_thread(self._index.waiting, clock.unix_ms()):
            with suppress(SessionUnknownError):
                found = await self._client.stored_sessions(session_id=session_id)
                records += [one.session for one in found if one.session.HasField("reward")]
        await asyncio.to_thread(self._index.add, records)

    async def _with_messages(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRecord:
        """Reads the messages of a session that recorded some, to be searched."""
        if 0 < sum(one.data_bytes for one in record.messages) <= _SEARCHED_BYTES:
            with suppress(SessionUnknownError):
                return (await self._stored(record.session_id)).session
        return record

    # Pages.

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"] or "index.html"
        found = self._files.get(name)
        if found is None:
            return JSONResponse({"error": f"there is no {name[:100]}"}, 404)
        return Response(found[0], media_type=found[1])

    async def _login(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 4096:
                return JSONResponse({"error": "the key is too long"}, 413)
        if not _same(body.decode(errors="replace").strip(), self._settings.key):
            await asyncio.sleep(0.5)  # a guess costs time
            return JSONResponse({"error": "this is not the key"}, 401)
        login = secrets.token_urlsafe(32)
        self._logins[_digest(login)] = None
        while len(self._logins) > _LOGINS:
            self._logins.popitem(last=False)
        response = JSONResponse({})
        response.set_cookie(_COOKIE, login, httponly=True, samesite="strict")
        return response

    def _is_known(self, request: Request) -> bool:
        if not self._settings.key:
            return True
        return _digest(request.cookies.get(_COOKIE, "")) in self._logins

    async def _mesh(self, request: Request) -> Response:
        """Members, weights, consumers with their steps, and the state of the index."""
        async with asyncio.timeout(_CALL_S):
            replicas, stats = await asyncio.gather(self._client.replicas(), self._client.stats())
            steps = {
                one.name: await self._client.steps(one.name, 1000)
                for one in stats.consumers
                if one.HasField("step")
            }
        return JSONResponse(
            {
                "models": {one.model: told(one.target_policy_version) for one in replicas.models},
                "members": [_member(one) for one in replicas.replicas],
                "consumers": [_consumer(one) for one in stats.consumers],
                "steps": {
                    name: [
                        {"step": one.step, "unix_ms": one.reported_unix_ms, **_finite(one.metrics)}
                        for one in found
                    ]
                    for name, found in steps.items()
                },
                "sessions": stats.sessions,
                "open_groups": stats.open_groups,
                "complete_groups": stats.complete_groups,
                "waiting_for_rewards": stats.waiting_for_rewards,
                "stored_bytes": stats.stored_bytes,
                "damaged": self._damaged,
                "error": self._error,
                "unix_ms": clock.unix_ms(),
            }
        )

    async def _show_alarms(self, request: Request) -> Response:
        """Alarms as they were seen last. Nothing is asked, so a silent server holds up no page."""
        return JSONResponse({"alarms": [one._asdict() for one in self._alarms]})

    async def _show_history(self, request: Request) -> Response:
        return JSONResponse(self._history.shown())

    async def _choose(self, request: Request) -> Response:
        if clock.monotonic_ms() >= self._choices_until:
            self._choices_until = clock.monotonic_ms() + _CHOICES_MS
            self._choices = await asyncio.to_thread(self._index.choices)
        views = sorted(self._settings.modules)
        more = {"sentences": REASONS, "views": views, "error": self._error}
        return JSONResponse(self._choices | more)

    async def _page(self, read: Callable[..., dict[str, Any]], request: Request) -> Response:
        query = request.query_params
        try:
            offset, limit = int(query.get("offset", 0)), int(query.get("limit", 100))
        except ValueError:
            raise InvalidFieldError("offset, limit", "are no numbers") from None
        order = query.get("order", "newest")
        chosen = Selection.read(query)
        return JSONResponse(await asyncio.to_thread(read, chosen, order, offset, limit))

    async def _series(self, request: Request) -> Response:
        query = request.query_params
        by = query.get("by", "version")
        return JSONResponse(await asyncio.to_thread(self._index.series, Selection.read(query), by))

    async def _evaluations(self, request: Request) -> Response:
        return JSONResponse({"rows": await asyncio.to_thread(self._index.evaluations)})

    async def _open(self, request: Request) -> Response:
        async with asyncio.timeout(_CALL_S):
            found = await self._client.open_sessions()
        return JSONResponse({"rows": [listed(one) for one in found]})

    async def _session(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        async with asyncio.timeout(_CALL_S):
            try:
                stored = await self._stored(session_id)
            except SessionUnknownError:
                found = await self._client.open_sessions()
                if session_id not in {one.session_id for one in found}:
                    raise
                tree = await self._client.open_session_tree(session_id)
                shown = partial(running_session, tree, self._settings.decode)
            else:
                shown = partial(closed_session, stored, self._settings.decode)
        return JSONResponse(await asyncio.to_thread(shown))

    async def _image(self, request: Request) -> Response:
        async with asyncio.timeout(_CALL_S):
            stored = await self._stored(request.path_params["id"])
        for one in stored.session.images:
            if one.sha256 == request.path_params["sha256"] and one.media_type in _IMAGES:
                return Response(one.data, media_type=one.media_type)
        return JSONResponse({"error": "the session has no such image"}, 404)

    async def _stored(self, session_id: str) -> collector_pb2.ReadSessionsResponse:
        found = await self._client.stored_sessions(session_id=session_id, arrays=True)
        return found[0]


class _Guard:
    """Answers requests by a known name and with a login, and adds the headers of every answer."""

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str], is_known: Callable[[Request], bool]
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._is_known = is_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
            await send(message)

        await self._chosen(Request(scope))(scope, receive, with_headers)

    def _chosen(self, request: Request) -> ASGIApp:
        host = request.headers.get("host", "").rpartition(":")
        if (host[0] or host[2]).strip("[]") not in self._hosts:
            error = "this viewer has another name; give --allow-host NAME, or call it by its own"
            return JSONResponse({"error": error}, 421)
        path = request.url.path
        if path.startswith("/api/") and path != "/api/login" and not self._is_known(request):
            return JSONResponse({"error": "log in with the viewer's key"}, 401)
        return self._app


async def _answered(_: Request, error: Exception) -> Response:
    if not isinstance(error, RollmeshError):
        return JSONResponse({"error": "the mesh does not answer in time"}, 504)
    status = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400, "PERMISSION_DENIED": 403}
    return JSONResponse({"error": error.message}, status.get(error.code, 503))


def _member(one: router_pb2.Replica) -> dict[str, Any]:
    hello, load = one.hello, one.hello.load
    return {
        "kind": name_of(router_pb2.ReplicaKind.DESCRIPTOR, hello.kind).lower(),
        "replica_id": hello.replica_id,
        "address": hello.address,
        "model": hello.model,
        "version": told(load.policy_version),
        "leases": one.leases,
        "lease_capacity": hello.lease_capacity,
        "sessions": one.sessions or load.live_sessions,
        "running": load.running,
        "waiting": load.waiting,
        "state": states_of(one),
    }


def _consumer(one: collector_pb2.ConsumerStats) -> dict[str, Any]:
    return {
        "name": one.name,
        "ready": one.ready,
        "leased": one.leased,
        "acknowledged": one.acknowledged,
        "filtered": {
            name_of(collector_pb2.FilterReason.DESCRIPTOR, part.reason): part.units
            for part in one.filtered
        },
    }


def _finite(metrics: Any) -> dict[str, float | None]:
    """Returns numbers that JSON has. None stands for the others."""
    return {name: one if abs(one) < float("inf") else None for name, one in metrics.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
