"""The routes that list the models of the mesh, in the form of the SDK that asks."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollmesh.mesh import GatewayDirectory
from rollmesh.sidecar.errors import ModelUnknownError


async def list_models(directory: GatewayDirectory, request: Request) -> Response:
    """`GET /v1/models`, or `GET /v1beta/models`: the models that gateways serve."""
    entries = [_entry(name, request) for name in await directory.models()]
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
    return JSONResponse(_entry(name, request))


def _is_of_google(request: Request) -> bool:
    """Returns whether Google's SDK asks, which calls the path of OpenAI too."""
    return "/v1beta/" in request.scope["path"] or "x-goog-api-client" in request.headers


def _entry(name: str, request: Request) -> dict[str, object]:
    if not _is_of_google(request):
        return {"id": name, "object": "model", "created": 0, "owned_by": "rollmesh"}
    methods = ["generateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
