"""The route by which agents declare how their model requests belong together."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rollmesh.sidecar import body
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.turn import HELD_BODY, read_head
from rollmesh.v1 import gateway_pb2


async def declare_lineage(gateways: Gateways, request: Request) -> Response:
    """`POST /v1/lineage`: keeps edges, and answers once they are durable.

    The key is checked before the body is received, and the body is read in a thread.
    """
    head = read_head(request.scope)
    await gateways.check_key(head.session_id, head.session_key)
    if (held := request.scope.get(HELD_BODY)) is not None:
        held.belongs_to(f"session {head.session_id}")
    edges = await asyncio.to_thread(body.read_edges, await request.body())
    asked = gateway_pb2.DeclareLineageRequest(
        session_id=head.session_id, session_key=head.session_key, edges=edges
    )
    declared = await gateways.ask(head.session_id, "DeclareLineage", asked)
    return JSONResponse({"object": "lineage", "edges": declared.edges})
