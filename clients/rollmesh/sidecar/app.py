"""The sidecar's HTTP: chat completions, models, health."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollmesh.runtime import clock
from rollmesh.runtime.channels import read_stream, typed_errors
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionKeyWrongError
from rollmesh.runtime.logs import fields, set_request_id
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import error_event, to_http
from rollmesh.sidecar.requests import parse_body, read_choices, read_request, wants_usage
from rollmesh.sidecar.responses import DONE, KEEP_ALIVE, ChunkWriter, whole_answer
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc

_log = logging.getLogger(__name__)
_KEY_PREFIX = "rmk-"
_CHECK_TIMEOUT_S = 5.0


class BrokenStreamError(Exception):
    """Ends a response without its last chunk: clients must not take half an answer for a whole."""


class Sidecar:
    """Turns HTTP requests into calls to one gateway."""

    def __init__(self, config: SidecarConfig, channel: grpc.aio.Channel) -> None:
        """Takes an open channel to the gateway."""
        self._config = config
        self._stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self._model = ""

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes: list[Route] = []
        for prefix in ("", "/sessions/{session_id}"):
            routes += [
                Route(f"{prefix}/v1/chat/completions", ChatEndpoint(self), methods=["POST"]),
                Route(f"{prefix}/v1/models", self._models),
                Route(f"{prefix}/healthz", self._health),
            ]
        return Starlette(routes=routes)

    async def chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> AsyncIterator[gateway_pb2.ChatResponse]:
        """Yields a gateway's answers; closing the iterator cancels the call."""
        call = self._stub.Chat(
            request,
            timeout=self._config.turn_timeout_ms / 1000,
            metadata=(("x-request-id", request_id),),
        )
        async with aclosing(read_stream(call)) as responses:
            async for response in responses:
                yield response

    async def model(self) -> str:
        """Returns the model's name; asked of the gateway once."""
        if not self._model:
            with typed_errors():
                info = await self._stub.GetGatewayInfo(
                    gateway_pb2.GetGatewayInfoRequest(), timeout=_CHECK_TIMEOUT_S
                )
            self._model = info.model
        return self._model

    @property
    def config(self) -> SidecarConfig:
        """Returns the settings."""
        return self._config

    async def _models(self, request: Request) -> Response:
        try:
            entry = {"id": await self.model(), "object": "model", "owned_by": "rollmesh"}
        except RollmeshError as error:
            return _error_response(error, "")
        return JSONResponse({"object": "list", "data": [{**entry, "created": 0}]})

    async def _health(self, request: Request) -> Response:
        self._model = ""
        try:
            await self.model()
        except RollmeshError as error:
            return _error_response(error, "")
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
        try:
            body = parse_body(await self._read_body(receive))
            chat = read_request(body)
            choices = [self._choice(chat, scope, at) for at in range(read_choices(body))]
        except RollmeshError as error:
            await _error_response(error, request_id)(scope, receive, send)
            return
        model = body.get("model")
        name = model if isinstance(model, str) and model else "policy"
        answer = (
            self._stream(choices, request_id, name, send, include_usage=wants_usage(body))
            if chat.stream
            else self._whole(choices, request_id, name, scope, receive, send)
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(answer)
            leaving = group.create_task(_cancel_when_gone(receive, task))
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
            leaving.cancel()

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size > self._sidecar.config.max_body_bytes:
                raise InvalidFieldError(
                    "body", f"is larger than {self._sidecar.config.max_body_bytes} bytes"
                )
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    def _choice(
        self, chat: gateway_pb2.ChatRequest, scope: Scope, index: int
    ) -> gateway_pb2.ChatRequest:
        """Returns the request of one choice, with the session and the marks of the headers."""
        request = gateway_pb2.ChatRequest()
        request.CopyFrom(chat)
        request.choice_index = index
        headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
        key = headers.get(b"authorization", "").removeprefix("Bearer ").strip()
        key = key or headers.get(b"x-api-key", "")
        session_id = scope["path_params"].get("session_id", "")
        if key.startswith(_KEY_PREFIX):
            request.session_key = key
            request.session_id = session_id or key.split("-")[1]
        elif session_id:
            request.session_id = session_id  # the path cannot be guessed: it opens the session
        else:
            raise SessionKeyWrongError("give the session's key as bearer token, or call by its URL")
        request.idempotency_key = headers.get(b"idempotency-key", "")
        retries = headers.get(b"x-stainless-retry-count", "0")
        request.retry_count = int(retries) if retries.isdecimal() else 0
        return request

    async def _whole(
        self,
        choices: list[gateway_pb2.ChatRequest],
        request_id: str,
        model: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            answers = await asyncio.gather(*(self._one(choice, request_id) for choice in choices))
        except RollmeshError as error:
            await _error_response(error, request_id)(scope, receive, send)
            return
        body = whole_answer(list(answers), model)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _one(
        self, choice: gateway_pb2.ChatRequest, request_id: str
    ) -> gateway_pb2.ChatDone:
        done: gateway_pb2.ChatDone | None = None
        async with aclosing(self._sidecar.chat(choice, request_id)) as responses:
            async for response in responses:
                done = response.done if response.HasField("done") else done
        if done is None:
            raise RollmeshError("the gateway ended its answer without an end")
        return done

    async def _stream(
        self,
        choices: list[gateway_pb2.ChatRequest],
        request_id: str,
        model: str,
        send: Send,
        *,
        include_usage: bool,
    ) -> None:
        """Streams all choices; headers leave with the first event, so early errors have a status."""
        events = _merged(self._sidecar, choices, request_id)
        writer = ChunkWriter(f"chatcmpl-{request_id}", clock.unix_ms() // 1000, model)
        started = False
        answers: dict[int, gateway_pb2.ChatDone] = {}
        try:
            async with aclosing(_with_pauses(events, self._sidecar.config.keep_alive_ms)) as items:
                async for item in items:
                    if not started:
                        await send(_stream_start(request_id))
                        for at in range(len(choices)):
                            await _send_part(send, writer.role(at))
                        started = True
                    if item is None:
                        await _send_part(send, KEEP_ALIVE)
                        continue
                    index, response = item
                    if response.HasField("delta"):
                        await _send_part(send, writer.delta(index, response.delta))
                    else:
                        answers[index] = response.done
                        await _send_part(send, writer.finish(index, response.done))
        except RollmeshError as error:
            if not started:
                await _send_error(send, error, request_id)
                return
            _log.warning("stream failed", extra=fields(reason=error.reason))
            await _send_part(send, error_event(error))
            raise BrokenStreamError(error.reason) from error
        if include_usage:
            await _send_part(send, writer.usage([answers[at] for at in sorted(answers)]))
        await _send_part(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _merged(
    sidecar: Sidecar, choices: list[gateway_pb2.ChatRequest], request_id: str
) -> AsyncIterator[tuple[int, gateway_pb2.ChatResponse]]:
    """Yields the events of all choices as they come, each with its index."""
    if len(choices) == 1:
        async with aclosing(sidecar.chat(choices[0], request_id)) as responses:
            async for response in responses:
                yield 0, response
        return
    queue: asyncio.Queue[tuple[int, gateway_pb2.ChatResponse | RollmeshError | None]]
    queue = asyncio.Queue(maxsize=256)

    async def pump(index: int) -> None:
        try:
            async with aclosing(sidecar.chat(choices[index], request_id)) as responses:
                async for response in responses:
                    await queue.put((index, response))
            await queue.put((index, None))
        except RollmeshError as error:
            await queue.put((index, error))

    async with asyncio.TaskGroup() as group:
        pumps = [group.create_task(pump(at)) for at in range(len(choices))]
        try:
            left = len(choices)
            while left:
                index, item = await queue.get()
                if isinstance(item, RollmeshError):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield index, item
        finally:
            for task in pumps:
                task.cancel()


async def _with_pauses(
    events: AsyncIterator[tuple[int, gateway_pb2.ChatResponse]], pause_ms: int
) -> AsyncIterator[tuple[int, gateway_pb2.ChatResponse] | None]:
    """Yields the events, and None after each silence of `pause_ms`."""
    async with aclosing(events), asyncio.TaskGroup() as group:  # type: ignore[type-var]
        while True:
            pending = group.create_task(anext(events, None))  # type: ignore[arg-type]
            try:
                while not (await asyncio.wait([pending], timeout=pause_ms / 1000))[0]:
                    yield None
            finally:
                if not pending.done():
                    pending.cancel()
            item = pending.result()
            if item is None:
                return
            yield item


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    task.cancel()


def _stream_start(request_id: str) -> dict[str, object]:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-request-id", request_id.encode()),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _error_response(error: RollmeshError, request_id: str) -> Response:
    http = to_http(error)
    response = Response(http.body, http.status)
    for name, value in http.headers:
        response.headers[name.decode()] = value.decode()
    response.headers["x-request-id"] = request_id
    return response


async def _send_error(send: Send, error: RollmeshError, request_id: str) -> None:
    http = to_http(error)
    headers = [*http.headers, (b"x-request-id", request_id.encode())]
    await send({"type": "http.response.start", "status": http.status, "headers": headers})
    await send({"type": "http.response.body", "body": http.body})
