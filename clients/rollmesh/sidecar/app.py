"""The sidecar's HTTP: chat completions, models, health."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypedDict

import grpc
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.memory import FreedMemory
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.runtime.telemetry.logs import fields, set_request_id
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import ModelUnknownError, PathUnknownError, to_http
from rollmesh.sidecar.metrics import measured
from rollmesh.sidecar.openai_chat.lineages import said_lineage
from rollmesh.sidecar.openai_chat.requests import (
    parse_body,
    read_model,
    read_request,
    read_shown,
    wants_stream,
    wants_usage,
)
from rollmesh.sidecar.openai_chat.responses import ChunkWriter, whole_answer
from rollmesh.sidecar.openai_chat.sampled import Shown
from rollmesh.sidecar.openai_chat.streams import StreamReply
from rollmesh.sidecar.sessions import named_session
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc

_log = logging.getLogger(__name__)
_CHECK_TIMEOUT_S = 5.0
_UNNAMED = "policy"
"""What an answer calls the model where the request names none."""
_LAST_WORD_S = 5.0
"""What a stream gets beyond its turn's time, to say why it ends."""


class _CallOptions(TypedDict):
    timeout: float
    metadata: tuple[tuple[str, str], ...]


class Sidecar:
    """Turns HTTP requests into calls to one gateway."""

    def __init__(self, config: SidecarConfig, channel: grpc.aio.Channel) -> None:
        """Takes an open channel to the gateway."""
        self._config = config
        self._stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self._model = ""
        self.freed_memory = FreedMemory()

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes: list[Route] = []
        for prefix in ("", "/sessions/{session}"):
            routes += [
                Route(f"{prefix}/v1/chat/completions", ChatEndpoint(self), methods=["POST"]),
                Route(f"{prefix}/v1/models", self._models),
                Route(f"{prefix}/healthz", self._health),
            ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refuse_path})

    async def chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> gateway_pb2.ChatResponse:
        """Returns a gateway's answers, one for each choice."""
        with typed_errors():
            response = await self._stub.Chat(request, **self._call_options(request_id))
        if len(response.answers) != request.choices:
            raise RollmeshError("the gateway did not answer every choice")
        return response

    async def stream_chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> AsyncGenerator[gateway_pb2.StreamChatResponse, None]:
        """Yields a gateway's answers piece by piece; closing the iterator cancels the call."""
        call = self._stub.StreamChat(
            gateway_pb2.StreamChatRequest(chat=request), **self._call_options(request_id)
        )
        async with aclosing(read_stream(call)) as responses:
            async for response in responses:
                yield response

    def _call_options(self, request_id: str) -> _CallOptions:
        return _CallOptions(
            timeout=self._config.turn_timeout_ms / 1000, metadata=(("x-request-id", request_id),)
        )

    async def model(self) -> str:
        """Returns the model's name; asked of the gateway once."""
        if not self._model:
            with typed_errors():
                info = await self._stub.GetGatewayInfo(
                    gateway_pb2.GetGatewayInfoRequest(), timeout=_CHECK_TIMEOUT_S
                )
            self._model = info.model
        return self._model

    async def check_model(self, name: str) -> None:
        """Checks the model that a request names, where others than the gateway's are refused.

        Raises:
            ModelUnknownError: It is another.
            RollmeshError: The gateway does not say which it serves.
        """
        if not name or self._config.unknown_models == "take" or name == self._model:
            return
        self._model = ""  # asked for again: the gateway may have a successor
        if name != (served := await self.model()):
            raise ModelUnknownError("model", f"{name!r} does not exist; {served!r} is served here")

    @property
    def config(self) -> SidecarConfig:
        """Returns the settings."""
        return self._config

    async def _models(self, _request: Request) -> Response:
        try:
            entry = {"id": await self.model(), "object": "model", "owned_by": "rollmesh"}
        except RollmeshError as error:
            return _error_response(error, uuid.uuid4().hex)
        return JSONResponse({"object": "list", "data": [{**entry, "created": 0}]})

    async def _health(self, _request: Request) -> Response:
        self._model = ""
        try:
            await self.model()
        except RollmeshError as error:
            return _error_response(error, uuid.uuid4().hex)
        return JSONResponse({"status": "ok"})


class ChatEndpoint:
    """`POST .../v1/chat/completions`: an ASGI application of its own, to own its connection."""

    def __init__(self, sidecar: Sidecar) -> None:
        """Takes the sidecar."""
        self._sidecar = sidecar

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that leaves ends the call to the gateway."""
        request_id = uuid.uuid4().hex
        set_request_id(request_id)
        receive, send, watch = measured(receive, send)
        try:
            await self._answer(scope, receive, send, request_id)
        finally:
            watch.ended()
            self._sidecar.freed_memory.served(watch.received_bytes)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        try:
            body = parse_body(await self._read_body(receive))
            chat = read_request(body)
            named = read_model(body)
            _mark(chat, scope)
            shown = read_shown(body)
            streams, include_usage = wants_stream(body), wants_usage(body)
            await self._sidecar.check_model(named)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes an answer
            await _error_response(_typed(error), request_id)(scope, receive, send)
            return
        name = named or _UNNAMED
        answer = (
            self._in_time(
                self._stream(chat, request_id, name, shown, send, include_usage=include_usage)
            )
            if streams
            else self._whole(chat, request_id, name, shown, scope, receive, send)
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(answer)
            leaving = group.create_task(_cancel_when_gone(receive, task))
            await asyncio.wait([task])
            leaving.cancel()

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        more = True
        while more:  # the server bounds it
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _whole(
        self,
        chat: gateway_pb2.ChatRequest,
        request_id: str,
        model: str,
        shown: Shown,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            response = await self._sidecar.chat(chat, request_id)
            await faults.reach("sidecar-before-answer")
            body = whole_answer(response, model, shown, named=_named(chat))
        except RollmeshError as error:
            await _error_response(_typed(error), request_id)(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _in_time(self, stream: Awaitable[None]) -> None:
        """Streams until the turn's time is over, also to a client that neither reads nor leaves."""
        limit_s = self._sidecar.config.turn_timeout_ms / 1000 + _LAST_WORD_S
        try:
            async with asyncio.timeout(limit_s):
                await stream
        except TimeoutError:  # the server closes a connection whose answer has no end
            _log.warning("stream not read", extra=fields(after_s=limit_s))

    async def _stream(
        self,
        chat: gateway_pb2.ChatRequest,
        request_id: str,
        model: str,
        shown: Shown,
        send: Send,
        *,
        include_usage: bool,
    ) -> None:
        """Streams all choices at the same time."""
        created = clock.unix_ms() // 1000
        writer = ChunkWriter(created, model, shown, named=_named(chat))
        reply = StreamReply(send, request_id, writer)
        try:
            async with asyncio.TaskGroup() as group:
                filling = group.create_task(reply.fill_silence(self._sidecar.config.keep_alive_ms))
                answers = await self._relay(chat, request_id, reply)
                filling.cancel()
        except ExceptionGroup as group_error:
            error = _typed(group_error)
            _log.warning("stream failed", extra=fields(reason=error.reason))
            await reply.fail(error)
            return
        await reply.end(answers, include_usage=include_usage)

    async def _relay(
        self, chat: gateway_pb2.ChatRequest, request_id: str, reply: StreamReply
    ) -> list[gateway_pb2.ChatAnswer]:
        """Sends every event of every choice as soon as the gateway does."""
        found: dict[int, gateway_pb2.ChatAnswer] = {}
        early: list[gateway_pb2.StreamChatResponse] = []
        async with aclosing(self._sidecar.stream_chat(chat, request_id)) as responses:
            async for response in responses:  # to its end: a call cut short looks like one not read
                early.append(response)
                if response.HasField("begun"):
                    reply.begin(response.choice_index, response.begun.answer_id)
                if not reply.knows(response.choice_index):
                    raise RollmeshError("the gateway began its answer without its id")
                if not reply.knows(0):  # whose id all chunks carry
                    continue
                for one in early:
                    await _pass_on(one, reply)
                    if one.HasField("done"):
                        found[one.choice_index] = one.done
                early.clear()
        return _in_order(found, chat.choices)


async def _pass_on(response: gateway_pb2.StreamChatResponse, reply: StreamReply) -> None:
    index = response.choice_index
    match response.WhichOneof("event"):
        case "done":
            await reply.finish(index, response.done)
        case "prompt":
            await reply.prompt(response.prompt)
        case "delta":
            await reply.delta(index, response.delta)
            await faults.reach("sidecar-mid-answer")
        case _:
            pass


def _mark(request: gateway_pb2.ChatRequest, scope: Scope) -> None:
    """Sets the session and the marks of the headers."""
    headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
    session = scope["path_params"].get("session", "")
    request.session_id, request.session_key = named_session(session, headers)
    request.idempotency_key = headers.get(b"idempotency-key", "")
    request.lineage = said_lineage(headers)
    retries = headers.get(b"x-stainless-retry-count", "0")
    request.retry_count = int(retries) if retries.isdecimal() and len(retries) < 9 else 0


def _in_order(
    found: dict[int, gateway_pb2.ChatAnswer], choices: int
) -> list[gateway_pb2.ChatAnswer]:
    """Returns the ends of all choices.

    Raises:
        RollmeshError: One is missing.
    """
    if found.keys() != set(range(choices)):
        raise RollmeshError("the gateway ended its answer without an end")
    return [found[at] for at in range(choices)]


def _named(chat: gateway_pb2.ChatRequest) -> bool:
    return chat.tool_choice == gateway_pb2.TOOL_CHOICE_NAMED


def _typed(error: Exception) -> RollmeshError:
    """Returns the first typed error of a group; anything else is logged and kept back."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RollmeshError):
        return error
    _log.error("unexpected error", exc_info=error)
    return RollmeshError("unexpected error; the log has it under the request id")


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    task.cancel()


async def _refuse_path(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method as the SDKs read errors."""
    refused = PathUnknownError(  # the path is not repeated: it may hold a key
        f"{request.method}: this path is not served; call .../v1/chat/completions or .../v1/models"
    )
    response = _error_response(refused, uuid.uuid4().hex)
    response.status_code = error.status_code if isinstance(error, HTTPException) else 404
    return response


def _error_response(error: RollmeshError, request_id: str) -> Response:
    http = to_http(error)
    response = Response(http.body, http.status)
    for name, value in http.headers:
        response.headers[name.decode()] = value.decode()
    response.headers["x-request-id"] = request_id
    return response
