"""`POST .../v1/chat/completions`: one request, its complete answer or its stream."""

import asyncio
import dataclasses
import logging
import uuid
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.memory import FreedMemory
from rollmesh.runtime.telemetry.logs import fields, set_request_id
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import error_response, typed
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.metrics import measured
from rollmesh.sidecar.openai_chat.calls import ChatCall, read_call
from rollmesh.sidecar.openai_chat.responses import ChunkWriter, whole_answer
from rollmesh.sidecar.openai_chat.streams import StreamReply
from rollmesh.v1 import gateway_pb2

_log = logging.getLogger(__name__)
_LARGE_BODY_BYTES = 256 * 1024
_READ_AT_A_TIME = 2
"""Number of large bodies that are parsed at a time: they take up to 30 times their size."""
_LAST_WORD_S = 5.0
"""Extra time after the turn's timeout in which a stream may send its error."""


class ChatEndpoint:
    """An ASGI application, so that it owns the connection and notices when the client leaves."""

    def __init__(self, gateways: Gateways, config: SidecarConfig) -> None:
        """Takes the gateways and the settings."""
        self._gateways = gateways
        self._turn_timeout_s = config.turn_timeout_ms / 1000
        self._keep_alive_ms = config.keep_alive_ms
        self._freed_memory = FreedMemory()
        self._large_bodies = asyncio.Semaphore(_READ_AT_A_TIME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that leaves cancels the call to the gateway."""
        request_id = uuid.uuid4().hex
        set_request_id(request_id)
        receive, send, watch = measured(receive, send)
        try:
            await self._serve(scope, receive, send, request_id)
        finally:
            watch.ended()
            self._freed_memory.served(watch.received_bytes)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        try:
            call = await self._read_call(await _read_body(receive), scope, request_id)
            model = await self._gateways.model_of(call.chat.session_id, call.model)
            call = dataclasses.replace(call, model=model)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes an answer
            await error_response(typed(error), request_id)(scope, receive, send)
            return
        answer = (
            self._stream(call, send) if call.streams else self._answer(call, scope, receive, send)
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(answer)
            leaving = group.create_task(_cancel_when_gone(receive, task))
            await asyncio.wait([task])
            leaving.cancel()

    async def _read_call(self, body: bytes, scope: Scope, request_id: str) -> ChatCall:
        """Reads a request; a large one in a thread, so that it does not block the event loop."""
        if len(body) < _LARGE_BODY_BYTES:
            return read_call(body, scope, request_id)
        async with self._large_bodies:
            return await asyncio.to_thread(read_call, body, scope, request_id)

    async def _answer(self, call: ChatCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the complete answer."""
        try:
            response = await self._gateways.chat(call.chat, call.request_id)
            await faults.reach("sidecar-before-answer")
            body = whole_answer(response, call.model, call.shown, named=call.names_tool)
        except RollmeshError as error:
            await error_response(error, call.request_id)(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", call.request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, call: ChatCall, send: Send) -> None:
        """Streams all choices within the turn's timeout, even if the client does not read."""
        limit_s = self._turn_timeout_s + _LAST_WORD_S
        try:
            async with asyncio.timeout(limit_s):
                await self._stream_choices(call, send)
        except TimeoutError:  # the server closes a connection whose answer is incomplete
            _log.warning("stream not read", extra=fields(after_s=limit_s))

    async def _stream_choices(self, call: ChatCall, send: Send) -> None:
        created = clock.unix_ms() // 1000
        writer = ChunkWriter(created, call.model, call.shown, named=call.names_tool)
        reply = StreamReply(send, call.request_id, writer)
        try:
            async with asyncio.TaskGroup() as group:
                filling = group.create_task(reply.fill_silence(self._keep_alive_ms))
                answers = await self._relay(call, reply)
                filling.cancel()
        except ExceptionGroup as group_error:
            error = typed(group_error)
            _log.warning("stream failed", extra=fields(reason=error.reason))
            await reply.fail(error)
            return
        await reply.end(answers, include_usage=call.include_usage)

    async def _relay(self, call: ChatCall, reply: StreamReply) -> list[gateway_pb2.ChatAnswer]:
        """Forwards every event as it arrives; returns the complete answers by choice."""
        found: dict[int, gateway_pb2.ChatAnswer] = {}
        early: list[gateway_pb2.StreamChatResponse] = []
        async with aclosing(self._gateways.stream_chat(call.chat, call.request_id)) as responses:
            async for response in responses:  # read to the end: the gateway treats less as not read
                early.append(response)
                if response.HasField("begun"):
                    reply.begin(response.choice_index, response.begun.answer_id)
                if not reply.knows(response.choice_index):
                    raise RollmeshError("the gateway's answer began without an id")
                if not reply.knows(0):  # all chunks carry the id of the first choice
                    continue
                for one in early:
                    await _pass_on(one, reply)
                    if one.HasField("done"):
                        found[one.choice_index] = one.done
                early.clear()
        if found.keys() != set(range(call.chat.choices)):
            raise RollmeshError("the gateway's answer ended without its final message")
        return [found[at] for at in range(call.chat.choices)]


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


async def _read_body(receive: Receive) -> bytes:
    """Returns the body of a request; the server bounds its size.

    Raises:
        ClientDisconnect: The client left.
    """
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    task.cancel()
