"""The routes of a sidecar, and its HTTP server."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollmesh.mesh import DialOut, GatewayDirectory, Membership
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import bind_host
from rollmesh.sidecar import body
from rollmesh.sidecar.chat import CHAT
from rollmesh.sidecar.config import SidecarConfig, advertised
from rollmesh.sidecar.errors import MethodUnknownError, ModelUnknownError, PathUnknownError, typed
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.google import COUNT_CONTENT, GENERATE, STREAM
from rollmesh.sidecar.http import HttpServer, bound, http_served
from rollmesh.sidecar.messages import COUNT_TOKENS, MESSAGES
from rollmesh.sidecar.responses import COUNT_INPUT, RESPONSES, delete, retrieve
from rollmesh.sidecar.turn import HELD_BODY, Protocol, TurnEndpoint, read_head
from rollmesh.v1 import gateway_pb2, router_pb2

# The route by which agents declare how their model requests belong together.


async def declare_lineage(gateways: Gateways, request: Request) -> Response:
    """`POST /v1/lineage`: keeps edges, and answers once they are durable.

    The key is checked before the body is received, and the body is read in a thread.
    """
    head = read_head(request.scope)
    await gateways.check_key(head.session_id, head.session_key)
    if (held := request.scope.get(HELD_BODY)) is not None:
        held.hold(owner=f"session {head.session_id}")
    edges = await asyncio.to_thread(body.read_edges, await request.body())
    asked = gateway_pb2.DeclareLineageRequest(
        session_id=head.session_id, session_key=head.session_key, edges=edges
    )
    declared = await gateways.ask(head.session_id, "DeclareLineage", asked)
    return JSONResponse({"object": "lineage", "edges": declared.edges})


# The routes that list the models of the mesh, in the form of the SDK that asks.


async def list_models(directory: GatewayDirectory, request: Request) -> Response:
    """`GET /v1/models`, or `GET /v1beta/models`: the models that gateways serve."""
    entries = [_model_entry(name, request) for name in await directory.models()]
    if _is_of_google(request):
        return JSONResponse({"models": entries})
    return JSONResponse({"object": "list", "data": entries})


async def get_model(directory: GatewayDirectory, request: Request) -> Response:
    """The same with the name of a model behind.

    Raises:
        ModelUnknownError: It is not served.
    """
    name = request.path_params["model"]
    served = await directory.models()
    if name not in served:
        listed = ", ".join(served) or "none is served now"
        problem = f"{name!r:.300} does not exist; give one of those served ({listed})"
        raise ModelUnknownError("model", problem)
    return JSONResponse(_model_entry(name, request))


def _is_of_google(request: Request) -> bool:
    """Returns whether Google's SDK asks, which calls the path of OpenAI too."""
    return "/v1beta/" in request.scope["path"] or "x-goog-api-client" in request.headers


def _model_entry(name: str, request: Request) -> dict[str, object]:
    if not _is_of_google(request):
        return {"id": name, "object": "model", "created": 0, "owned_by": "rollmesh"}
    methods = ["generateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}


# All routes, and the server.

PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": COUNT_INPUT,
    **{
        f"/{version}/models/{{model:path}}:{method}": protocol
        for version in ("v1beta", "v1")
        for method, protocol in (
            ("generateContent", GENERATE),
            ("streamGenerateContent", STREAM),
            ("countTokens", COUNT_CONTENT),
        )
    },
}
"""The protocols that agents POST to, by path."""


class Opens(StrEnum):
    """The credential that a request needs."""

    NOTHING = "nothing"
    SESSION_KEY = "the session's key"


ROUTES: Mapping[str, Opens] = {
    **{f"POST {path}": Opens.SESSION_KEY for path in PROTOCOLS},
    "GET /v1/responses/{response}": Opens.SESSION_KEY,
    "DELETE /v1/responses/{response}": Opens.SESSION_KEY,
    "POST /v1/lineage": Opens.SESSION_KEY,
    "GET /v1/models": Opens.NOTHING,
    "GET /v1/models/{model:path}": Opens.NOTHING,
    "GET /v1beta/models": Opens.NOTHING,
    "GET /v1beta/models/{model:path}": Opens.NOTHING,
    "GET /healthz": Opens.NOTHING,
}
"""What opens a route, by its method and path. `HEAD` counts as `GET`."""
_IN_SESSION = "/sessions/{session}"
"""May precede each path. It has the session's id or key."""
_SPOKEN = re.compile(
    r"(?:https?://[^/]*)?(?:/sessions/[^/?]*)?"
    r"(?:/v1/(messages|responses)(?:[/?]|$)|/v1beta/|/v1/models/[^?]*:[a-zA-Z]+(?:\?|$))"
)


def prefixes(path_prefix: str) -> Iterator[str]:
    """Yields the beginnings of paths. A proxy may strip its own prefix or keep it."""
    for root in dict.fromkeys(("", path_prefix)):
        yield root
        yield f"{root}{_IN_SESSION}"


def protocol_of(path: str, prefix: str = "") -> Protocol:
    """Returns the protocol in which errors of a path are written, perhaps with its query."""
    spoken = _SPOKEN.match(path.removeprefix(prefix))
    if spoken is None:
        return CHAT
    return PROTOCOLS[f"/v1/{spoken[1]}"] if spoken[1] else GENERATE


def make_app(config: SidecarConfig, directory: GatewayDirectory) -> Starlette:
    """Returns the ASGI application of a sidecar.

    Args:
        config: Its settings.
        directory: Finds the gateways.
    """
    gateways = Gateways(config, directory)

    async def health(_request: Request) -> Response:
        await gateways.check()
        return JSONResponse({"status": "ok"})

    turns = {path: TurnEndpoint(path, one, gateways, config) for path, one in PROTOCOLS.items()}
    endpoints: dict[str, Callable[..., Any]] = {
        **{f"POST {path}": one for path, one in turns.items()},
        "GET /v1/responses/{response}": partial(retrieve, gateways),
        "DELETE /v1/responses/{response}": partial(delete, gateways),
        "POST /v1/lineage": partial(declare_lineage, gateways),
        "GET /v1/models": partial(list_models, directory),
        "GET /v1/models/{model:path}": partial(get_model, directory),
        "GET /v1beta/models": partial(list_models, directory),
        "GET /v1beta/models/{model:path}": partial(get_model, directory),
        "GET /healthz": health,
    }
    routes = [
        Route(f"{prefix}{path}", endpoints[f"{method} {path}"], methods=[method])
        for method, path in (name.split(" ") for name in ROUTES)
        for prefix in prefixes(config.path_prefix)
    ]

    async def refuse(request: Request, error: Exception) -> Response:
        """Answers an error in the form of the protocol that the path speaks."""
        protocol = protocol_of(request.scope["path"], config.path_prefix)
        request_id = uuid.uuid4().hex
        http = protocol.error(typed(error), request_id)
        named = (*http.headers, (protocol.request_id_header, request_id.encode()))
        headers = {name.decode(): value.decode() for name, value in named}
        return Response(http.body, http.status, headers)

    async def refuse_path(request: Request, error: Exception) -> Response:
        """Answers an unknown path or method. The path is not echoed: it may contain a key."""
        allowed = error.headers if isinstance(error, HTTPException) else None
        if not allowed:
            problem = (
                f"{request.method}: this path is not served; call .../v1/chat/completions, "
                ".../v1/messages, .../v1/responses, .../v1beta/models/MODEL:generateContent or "
                ".../v1/models"
            )
            return await refuse(request, PathUnknownError(problem))
        problem = f"{request.method}: this path is served with {', '.join(allowed.values())}"
        response = await refuse(request, MethodUnknownError(problem))
        response.headers.update(allowed)
        return response

    handlers = {HTTPException: refuse_path, RollmeshError: refuse, Exception: refuse}
    return Starlette(routes=routes, exception_handlers=handlers)


# Serving


@asynccontextmanager
async def serving(
    config: SidecarConfig,
    directory: GatewayDirectory,
    identity: Identity | None = None,
    *,
    joins: bool = True,
) -> AsyncIterator[int]:
    """Serves agents while the block runs. Yields the port.

    At the end the sidecar leaves the router. Running requests may finish within the grace, and the
    others end with an error.

    Args:
        config: The settings of the sidecar.
        directory: Finds the gateways.
        identity: Credentials of calls to the router. None means the process's own.
        joins: Whether the sidecar registers with the router, which tells it to the SDK.

    Raises:
        ConfigError: The certificate or its key cannot be read, or `advertise` is no URL of HTTP.
        OSError: The port is taken.
    """
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bound(config, config.port))
        port: int = listener.getsockname()[1]
        if config.relay:
            dialled = DialOut(
                f"sidecar-{uuid.uuid4().hex}",
                f"{bind_host(config)}:{port}",
                config.relay,
                identity=identity,
                join_ms=config.relay_join_ms,
            )
            await stack.enter_async_context(dialled.held())
        address, https, path_prefix = advertised(config, port)
        speaks = partial(protocol_of, prefix=config.path_prefix)
        http = HttpServer(make_app(config, directory), config, speaks)
        await stack.enter_async_context(http_served(http, listener))
        if joins:
            hello = router_pb2.ReplicaHello(
                replica_id=f"sidecar-{uuid.uuid4().hex}",
                kind=router_pb2.REPLICA_KIND_SIDECAR,
                address=address,
                https=https,
                path_prefix=path_prefix,
            )
            member = Membership(config.router, hello, router_pb2.ReplicaLoad, identity)
            await stack.enter_async_context(member)
        yield port
