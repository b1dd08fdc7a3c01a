"""`/v1/responses/{id}`: what needs no turn.

Responses are not stored here: a response is an answer of its session's tree, in the gateway.
"""

import uuid
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.errors import as_response, typed
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.openai_responses import ids
from rollmesh.sidecar.openai_responses.outputs import Items
from rollmesh.sidecar.openai_responses.parameters import ENCRYPTED_REASONING
from rollmesh.sidecar.openai_responses.protocol import http_error
from rollmesh.sidecar.openai_responses.requests import settings_of
from rollmesh.sidecar.openai_responses.responses import ResponseWriter
from rollmesh.sidecar.openai_responses.tools import given_tools, toolbox_of
from rollmesh.sidecar.turns.heads import Head, read_head

_FIELD, _ID_HEADER = "response_id", b"x-request-id"


class StoredResponses:
    """Answers the requests; an error is answered in OpenAI's form."""

    def __init__(self, gateways: Gateways) -> None:
        """Takes the gateways."""
        self._gateways = gateways

    async def retrieve(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`: the response as it is without streaming."""
        return await _answered(request, lambda head: self._retrieve(request, head))

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`: it is no longer found; its turn is trained all the same."""
        return await _answered(request, lambda head: self._delete(request, head))

    async def _retrieve(self, request: Request, head: Head) -> bytes:
        if request.query_params.get("stream", "false").lower() not in {"", "0", "false"}:
            raise InvalidFieldError("stream", "is not served for an earlier response; leave it out")
        name = request.path_params["response"]
        answer_id, instructed = ids.answer_of_response(name, _FIELD)
        stored = await self._gateways.answer(
            head.session_id, head.session_key, answer_id, with_messages=False
        )
        model = await self._gateways.model_of(head.session_id, "")
        toolbox = toolbox_of(stored.tools_json)
        settings = settings_of({"tools": given_tools(toolbox)})
        is_sealed = ENCRYPTED_REASONING in request.query_params.getlist("include")
        items = Items(answer_id, toolbox, head.session_key if is_sealed else "")
        return ResponseWriter(settings, model, instructed=instructed).whole(stored.answer, items)

    async def _delete(self, request: Request, head: Head) -> bytes:
        name = request.path_params["response"]
        answer_id, _ = ids.answer_of_response(name, _FIELD)
        await self._gateways.withdraw(head.session_id, head.session_key, answer_id)
        return orjson.dumps({"id": name, "object": "response", "deleted": True})


async def _answered(request: Request, work: Callable[[Head], Awaitable[bytes]]) -> Response:
    request_id = uuid.uuid4().hex
    try:
        body = await work(read_head(request.scope, request_id))
    except ClientDisconnect:
        return Response()
    except Exception as error:  # noqa: BLE001 - the edge: everything becomes an answer
        return as_response(http_error(typed(error)), _ID_HEADER, request_id)
    headers = {"content-type": "application/json", _ID_HEADER.decode(): request_id}
    return Response(body, headers=headers)
