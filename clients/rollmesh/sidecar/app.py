"""The sidecar's routes: chat completions, models, health."""

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollmesh.mesh.directories.gateways import GatewayDirectory
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.anthropic_messages.protocol import CountTokens, Messages
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import (
    MethodUnknownError,
    ModelUnknownError,
    PathUnknownError,
    as_response,
    typed,
)
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.openai_chat.protocol import ChatCompletions
from rollmesh.sidecar.openai_responses.protocol import CountTokens as CountInputTokens, Responses
from rollmesh.sidecar.openai_responses.stored import StoredResponses
from rollmesh.sidecar.paths import protocol_of
from rollmesh.sidecar.routes import TABLE, prefixes
from rollmesh.sidecar.turns.endpoint import TurnEndpoint
from rollmesh.sidecar.turns.fetching import ImageFetcher


def make_app(config: SidecarConfig, directory: GatewayDirectory) -> Starlette:
    """Returns the ASGI application of a sidecar.

    Args:
        config: Its settings.
        directory: Finds the gateways.
    """
    gateways, images = Gateways(config, directory), ImageFetcher(config)

    async def models(_request: Request) -> Response:
        entries = [_entry(name) for name in await gateways.models()]
        return JSONResponse({"object": "list", "data": entries})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        served = await gateways.models()
        if name not in served:
            listed = ", ".join(served) or "none is served now"
            problem = f"{name!r:.300} does not exist; give one of those served ({listed})"
            raise ModelUnknownError("model", problem)
        return JSONResponse(_entry(name))

    async def health(_request: Request) -> Response:
        await gateways.check()
        return JSONResponse({"status": "ok"})

    chat = TurnEndpoint(ChatCompletions(), gateways, images, config)
    messages = TurnEndpoint(Messages(), gateways, images, config)
    count_tokens = TurnEndpoint(CountTokens(), gateways, images, config)
    responses = TurnEndpoint(Responses(), gateways, images, config)
    count_input = TurnEndpoint(CountInputTokens(), gateways, images, config)
    stored = StoredResponses(gateways)
    endpoints: dict[str, Callable[..., Any]] = {
        "POST /v1/chat/completions": chat,
        "POST /v1/messages": messages,
        "POST /v1/messages/count_tokens": count_tokens,
        "POST /v1/responses": responses,
        "POST /v1/responses/input_tokens": count_input,
        "GET /v1/responses/{response}": stored.retrieve,
        "DELETE /v1/responses/{response}": stored.delete,
        "GET /v1/models": models,
        "GET /v1/models/{model:path}": model,
        "GET /healthz": health,
    }
    routes = [
        Route(f"{prefix}{path}", endpoints[f"{method} {path}"], methods=[method])
        for prefix in prefixes(config.path_prefix)
        for method, path in (name.split(" ") for name in TABLE)
    ]
    refuse = partial(_refuse, config.path_prefix)
    handlers = {
        HTTPException: partial(_refuse_path, config.path_prefix),
        RollmeshError: refuse,
        Exception: refuse,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _entry(name: str) -> dict[str, object]:
    """Returns a model as OpenAI's API lists it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollmesh"}


async def _refuse_path(prefix: str, request: Request, error: Exception) -> Response:
    """Answers an unknown path or method; the path is not echoed, because it may contain a key."""
    allowed = error.headers if isinstance(error, HTTPException) else None
    if not allowed:
        problem = (
            f"{request.method}: this path is not served; call .../v1/chat/completions, "
            ".../v1/messages, .../v1/responses or .../v1/models"
        )
        return await _refuse(prefix, request, PathUnknownError(problem))
    problem = f"{request.method}: this path is served with {', '.join(allowed.values())}"
    response = await _refuse(prefix, request, MethodUnknownError(problem))
    response.headers.update(allowed)
    return response


async def _refuse(prefix: str, request: Request, error: Exception) -> Response:
    """Answers an error in the form of the protocol that the path speaks."""
    protocol, request_id = protocol_of(request.scope["path"], prefix), uuid.uuid4().hex
    http = protocol.error(typed(error), request_id)
    return as_response(http, protocol.request_id_header, request_id)
