"""The sidecar's routes: chat completions, models, health."""

import uuid

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollmesh.mesh.gateways import GatewayDirectory
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import ModelUnknownError, PathUnknownError, error_response
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.openai_chat.endpoint import ChatEndpoint


def make_app(config: SidecarConfig, directory: GatewayDirectory) -> Starlette:
    """Returns the ASGI application of a sidecar.

    Args:
        config: Its settings.
        directory: Finds the gateways.
    """
    gateways = Gateways(config, directory)

    async def models(_request: Request) -> Response:
        try:
            entries = [_entry(name) for name in await gateways.models()]
        except RollmeshError as error:
            return error_response(error, uuid.uuid4().hex)
        return JSONResponse({"object": "list", "data": entries})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        try:
            served = await gateways.models()
            if name not in served:
                listed = ", ".join(served) or "none is served now"
                problem = f"{name!r:.300} does not exist; give one of those served ({listed})"
                raise ModelUnknownError("model", problem)
        except RollmeshError as error:
            return error_response(error, uuid.uuid4().hex)
        return JSONResponse(_entry(name))

    async def health(_request: Request) -> Response:
        try:
            await gateways.check()
        except RollmeshError as error:
            return error_response(error, uuid.uuid4().hex)
        return JSONResponse({"status": "ok"})

    chat, routes = ChatEndpoint(gateways, config), []
    for prefix in ("", "/sessions/{session}"):
        routes += [
            Route(f"{prefix}/v1/chat/completions", chat, methods=["POST"]),
            Route(f"{prefix}/v1/models", models),
            Route(f"{prefix}/v1/models/{{model:path}}", model),
            Route(f"{prefix}/healthz", health),
        ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse_path})


def _entry(name: str) -> dict[str, object]:
    """Returns a model as OpenAI's API lists it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollmesh"}


async def _refuse_path(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method with an error body that the SDKs read."""
    refused = PathUnknownError(  # the path is not echoed: it may contain a key
        f"{request.method}: this path is not served; call .../v1/chat/completions or .../v1/models"
    )
    response = error_response(refused, uuid.uuid4().hex)
    response.status_code = error.status_code if isinstance(error, HTTPException) else 404
    return response
