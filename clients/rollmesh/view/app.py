"""The viewer's HTTP: its pages, and JSON of a mesh or a record. It reads, and changes nothing.

Agents' text is hostile: it reaches a page as JSON and is shown as text, pages run no script but
their own, and a browser that was led here by another name gets nothing.
"""

import asyncio
import hashlib
import hmac
import math
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollmesh.runtime import REASONS, clock
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionUnknownError
from rollmesh.v1 import collector_pb2
from rollmesh.view.index import Index, Selection
from rollmesh.view.mesh import Mesh
from rollmesh.view.sessions import Decode, closed_session, running_session

_CHOICES_MS = 2_000
_OF_MESH = ("mesh", "alarms", "history", "open")
"""Pages that a record alone does not have."""
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
    special: Sequence[int] = ()
    """Ids of the special tokens, sorted. Pages mark them."""
    modules: Mapping[str, bytes] = field(default_factory=dict)
    """JavaScript modules that sessions may name in `metadata["view"]`, by that name."""


class Source(Protocol):
    """What closed sessions are read from."""

    async def follow(self) -> None:
        """Reads sessions into the index as they come, until it is cancelled."""

    async def stored(self, session_id: str) -> collector_pb2.ReadSessionsResponse:
        """Returns a session with its arrays.

        Raises:
            SessionUnknownError: It does not have the session.
            RollmeshError: It cannot be read.
            TimeoutError: Nobody answers in time.
        """
        ...

    def notes(self) -> list[str]:
        """Returns what all lists say about the source."""
        ...


class Viewer:
    """An ASGI application over a mesh, a record, or both. Run `follow` for as long as it serves."""

    def __init__(
        self,
        index: Index,
        settings: ViewSettings,
        *,
        mesh: Mesh | None = None,
        record: Source | None = None,
    ) -> None:
        """Takes the index that the sources fill, the settings, and at least one source."""
        self._index = index
        self._settings = settings
        self._mesh = mesh
        self._sources: list[Source] = [one for one in (mesh, record) if one is not None]
        self._choices: dict[str, list[str]] = {}
        self._choices_until = 0
        self._logins: OrderedDict[str, None] = OrderedDict()
        static = resources.files("rollmesh.view") / "static"
        self._files = {
            one.name: (one.read_bytes(), _TYPES[one.name[one.name.rindex(".") :]])
            for one in static.iterdir()
        }
        for name, data in settings.modules.items():
            self._files[f"views/{name}.js"] = data, _TYPES[".js"]
        routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            **{f"/api/{name}": partial(self._of_mesh, name) for name in _OF_MESH},
            "/api/choices": self._choose,
            "/api/sessions": partial(self._page, index.sessions),
            "/api/groups": partial(self._page, index.groups),
            "/api/series": self._series,
            "/api/evaluations": self._evaluations,
            "/api/session": self._session,
            "/api/image/{sha256}": self._image,
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
        """Reads the sources until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for one in self._sources:
                group.create_task(one.follow())

    # Pages.

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"] or "index.html"
        found = self._files.get(name)
        if found is None:
            return _json({"error": f"there is no {name[:100]}"}, 404)
        return Response(found[0], media_type=found[1])

    async def _login(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 4096:
                return _json({"error": "the key is too long"}, 413)
        if not _same(body.decode(errors="replace").strip(), self._settings.key):
            await asyncio.sleep(0.5)  # a guess costs time
            return _json({"error": "this is not the key"}, 401)
        login = secrets.token_urlsafe(32)
        self._logins[_digest(login)] = None
        while len(self._logins) > _LOGINS:
            self._logins.popitem(last=False)
        response = _json({})
        response.set_cookie(_COOKIE, login, httponly=True, samesite="strict")
        return response

    def _is_known(self, request: Request) -> bool:
        if not self._settings.key:
            return True
        return _digest(request.cookies.get(_COOKIE, "")) in self._logins

    async def _of_mesh(self, name: str, _: Request) -> Response:
        if self._mesh is None:
            error = "this viewer shows a record, and no mesh; start it with --router, too"
            return _json({"error": error}, 404)
        return _json(await getattr(self._mesh, name)())

    async def _choose(self, request: Request) -> Response:
        if clock.monotonic_ms() >= self._choices_until:
            self._choices_until = clock.monotonic_ms() + _CHOICES_MS
            self._choices = await asyncio.to_thread(self._index.choices)
        views = sorted(self._settings.modules)
        more = {"sentences": REASONS, "views": views, "mesh": self._mesh is not None}
        more["special"] = list(self._settings.special)
        more["error"] = self._mesh.error if self._mesh else ""
        more["notes"] = [note for one in self._sources for note in one.notes()]
        return _json(self._choices | more)

    async def _page(self, read: Callable[..., dict[str, Any]], request: Request) -> Response:
        query = request.query_params
        try:
            offset, limit = int(query.get("offset", 0)), int(query.get("limit", 100))
        except ValueError:
            raise InvalidFieldError("offset, limit", "are no numbers") from None
        order = query.get("order", "newest")
        chosen = Selection.read(query)
        return _json(await asyncio.to_thread(read, chosen, order, offset, limit))

    async def _series(self, request: Request) -> Response:
        query = request.query_params
        by = query.get("by", "version")
        return _json(await asyncio.to_thread(self._index.series, Selection.read(query), by))

    async def _evaluations(self, request: Request) -> Response:
        return _json({"rows": await asyncio.to_thread(self._index.evaluations)})

    async def _session(self, request: Request) -> Response:
        session_id = request.query_params.get("id", "")
        try:
            stored = await self._stored(session_id)
        except SessionUnknownError:
            if self._mesh is None:
                raise
            tree = await self._mesh.running(session_id)
            shown = partial(running_session, tree, self._settings.decode)
        else:
            shown = partial(closed_session, stored, self._settings.decode)
        return _json(await asyncio.to_thread(shown))

    async def _image(self, request: Request) -> Response:
        stored = await self._stored(request.query_params.get("session", ""))
        for one in stored.session.images:
            if one.sha256 == request.path_params["sha256"] and one.media_type in _IMAGES:
                return Response(one.data, media_type=one.media_type)
        return _json({"error": "the session has no such image"}, 404)

    async def _stored(self, session_id: str) -> collector_pb2.ReadSessionsResponse:
        """Returns a session of the first source that can read it.

        Raises:
            SessionUnknownError: No source has it.
            RollmeshError: Of the first source that failed otherwise.
            TimeoutError: Likewise.
        """
        errors = list[RollmeshError | TimeoutError]()
        for one in self._sources:
            try:
                return await one.stored(session_id)
            except (RollmeshError, TimeoutError) as error:
                errors.append(error)
        raise min(errors, key=lambda error: isinstance(error, SessionUnknownError))


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
            return _json({"error": error}, 421)
        path = request.scope["path"]  # as routes see it: a URL has the name that was called
        if path.startswith("/api/") and path != "/api/login" and not self._is_known(request):
            return _json({"error": "log in with the viewer's key"}, 401)
        return self._app


async def _answered(_: Request, error: Exception) -> Response:
    if not isinstance(error, RollmeshError):
        return _json({"error": "the mesh does not answer in time"}, 504)
    status = {"NOT_FOUND": 404, "INVALID_ARGUMENT": 400, "PERMISSION_DENIED": 403}
    return _json({"error": error.message}, status.get(error.code, 503))


def _json(content: Any, status: int = 200) -> Response:
    """Answers with JSON. None stands for NaN and infinity, and `?` for half a character."""
    try:
        return JSONResponse(content, status)
    except ValueError:
        return JSONResponse(_sendable(content), status)


def _sendable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_sendable(name): _sendable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_sendable(one) for one in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
