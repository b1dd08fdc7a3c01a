"""The route by which agents declare how their model requests belong together."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import body
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.turn import HELD_BODY, read_head
from rollmesh.v1 import gateway_pb2

_FIELDS = ("source_request_id", "target_request_id", "type")


async def declare_lineage(gateways: Gateways, request: Request) -> Response:
    """`POST /v1/lineage`: keeps edges, and answers once they are durable.

    The key is checked before the body is received, and the body is read in a thread.
    """
    head = read_head(request.scope)
    await gateways.check_key(head.session_id, head.session_key)
    if (held := request.scope.get(HELD_BODY)) is not None:
        held.belongs_to(f"session {head.session_id}")
    declared = await asyncio.to_thread(_read, await request.body())
    declared.session_id, declared.session_key = head.session_id, head.session_key
    return JSONResponse({"object": "lineage", "edges": await gateways.declare(declared)})


def _read(data: bytes) -> gateway_pb2.DeclareLineageRequest:
    """Reads `{"edges": [{"source_request_id", "target_request_id", "type"}]}`.

    Raises:
        InvalidFieldError: It is something else. The error names the edge.
    """
    given, declared = body.parse(data).get("edges"), gateway_pb2.DeclareLineageRequest()
    if not isinstance(given, list):
        raise InvalidFieldError("edges", "give an array of edges")
    for at, edge in enumerate(given):
        try:
            declared.edges.add(**{name: edge[name] for name in _FIELDS})
        except (LookupError, TypeError) as error:
            problem = f"give an object with {', '.join(_FIELDS)}, each a text"
            raise InvalidFieldError(f"edges[{at}]", problem) from error
    return declared
