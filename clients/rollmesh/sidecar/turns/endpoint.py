"""One endpoint that answers turns: a request, its complete answer or its stream."""

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.memory import FreedMemory
from rollmesh.runtime.telemetry.logs import fields, set_request_id
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import StoppingError, typed
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.metrics import Watch, measured
from rollmesh.sidecar.turns.fetching import ImageFetcher
from rollmesh.sidecar.turns.heads import Head, read_head
from rollmesh.sidecar.turns.protocol import Protocol, TurnCall
from rollmesh.sidecar.turns.replies import StreamReply
from rollmesh.v1 import gateway_pb2

_log = logging.getLogger(__name__)
_LARGE_BODY_BYTES = 256 * 1024
_READ_AT_A_TIME = 2
"""Number of large bodies that are parsed at a time: they take up to 30 times their size."""
_STOPPED_MS = 1000
_LAST_WORD_S = 5.0
"""Extra time after the turn's timeout in which a stream may send its error."""


class TurnEndpoint:
    """An ASGI application, so that it owns the connection and notices when the client leaves."""

    def __init__(
        self, protocol: Protocol, gateways: Gateways, images: ImageFetcher, config: SidecarConfig
    ) -> None:
        """Takes the protocol, the gateways, what fetches images, and the settings."""
        self._protocol = protocol
        self._gateways = gateways
        self._images = images
        self._turn_timeout_s = config.turn_timeout_ms / 1000
        self._keep_alive_ms = config.keep_alive_ms
        self._freed_memory = FreedMemory()
        self._large_bodies = asyncio.Semaphore(_READ_AT_A_TIME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that leaves cancels the call to the gateway.

        The server cancels what is still running when its grace is over.
        """
        request_id = uuid.uuid4().hex
        set_request_id(request_id)
        receive, send, watch = measured(receive, send, self._protocol.name)
        try:
            await self._serve(scope, receive, send, request_id)
        except asyncio.CancelledError:
            await self._stop(watch, send, request_id)
        finally:
            watch.ended()
            self._freed_memory.served(watch.received_bytes)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        try:
            body = await _read_body(receive)
            head = read_head(scope, request_id)
            call = await self._read_call(body, head)
            head.mark(call.chat)
            await call.complete(self._gateways)
            if b"image" in body:
                await _while_present(receive, self._images.fill(call.chat))
            model = await self._gateways.model_of(head.session_id, call.model)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the edge: everything becomes an answer
            await self._refuse(typed(error), send, request_id)
            return
        answer = self._stream if call.streams else self._answer
        with suppress(ClientDisconnect):
            await _while_present(receive, answer(call, model, send, request_id))

    async def _read_call(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request; a large one in a thread, so that it does not block the event loop."""
        if len(body) < _LARGE_BODY_BYTES:
            return self._protocol.read(body, head)
        async with self._large_bodies:
            return await asyncio.to_thread(self._protocol.read, body, head)

    async def _answer(self, call: TurnCall, model: str, send: Send, request_id: str) -> None:
        """Sends the complete answer."""
        try:
            body = await call.answer(self._gateways, model, request_id)
        except RollmeshError as error:
            await self._refuse(error, send, request_id)
            return
        await self._send_whole(
            send, request_id, 200, body, ((b"content-type", b"application/json"),)
        )

    async def _refuse(self, error: RollmeshError, send: Send, request_id: str) -> None:
        """Sends an error before anything of an answer."""
        http = self._protocol.error(error, request_id)
        await self._send_whole(send, request_id, http.status, http.body, http.headers)

    async def _stop(self, watch: Watch, send: Send, request_id: str) -> None:
        """Tells a client that the server stops before its answer is complete."""
        error = StoppingError("the sidecar is stopping; try again", retry_delay_ms=_STOPPED_MS)
        if not watch.has_begun:
            await self._refuse(error, send, request_id)
        elif watch.streams:  # without an end, so that the server closes the connection
            event = self._protocol.error_event(error, request_id)
            await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _send_whole(
        self,
        send: Send,
        request_id: str,
        status: int,
        body: bytes,
        headers: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        named = [
            *headers,
            (b"content-length", str(len(body)).encode()),
            (self._protocol.request_id_header, request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": named})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, call: TurnCall, model: str, send: Send, request_id: str) -> None:
        """Streams all choices within the turn's timeout, even if the client does not read."""
        reply = StreamReply(send, request_id, self._protocol, call.writer(model))
        limit_s = self._turn_timeout_s + _LAST_WORD_S
        try:
            async with asyncio.timeout(limit_s):
                await self._stream_choices(call, reply, request_id)
        except TimeoutError:  # the server closes a connection whose answer is incomplete
            _log.warning("stream not read", extra=fields(after_s=limit_s))

    async def _stream_choices(self, call: TurnCall, reply: StreamReply, request_id: str) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                filling = group.create_task(reply.fill_silence(self._keep_alive_ms))
                answers = await self._relay(call.chat, reply, request_id)
                filling.cancel()
        except ExceptionGroup as group_error:
            error = typed(group_error)
            _log.warning("stream failed", extra=fields(reason=error.reason))
            await reply.fail(error)
            return
        await reply.end(answers)

    async def _relay(
        self, chat: gateway_pb2.ChatRequest, reply: StreamReply, request_id: str
    ) -> list[gateway_pb2.ChatAnswer]:
        """Forwards every event as it arrives; returns the complete answers by choice."""
        found: dict[int, gateway_pb2.ChatAnswer] = {}
        early: list[gateway_pb2.StreamChatResponse] = []
        async with aclosing(self._gateways.stream_chat(chat, request_id)) as responses:
            async for response in responses:  # read to the end: the gateway treats less as not read
                early.append(response)
                if response.choice_index != 0 and not reply.knows(0):
                    continue  # the first choice begins the stream
                if response.choice_index == 0 and len(early) > 1:
                    early.insert(0, early.pop())
                for one in early:
                    await _pass_on(one, reply)
                    if one.HasField("done"):
                        found[one.choice_index] = one.done
                early.clear()
        if found.keys() != set(range(chat.choices)):
            raise RollmeshError("the gateway's answer ended without its final message")
        return [found[at] for at in range(chat.choices)]


async def _pass_on(response: gateway_pb2.StreamChatResponse, reply: StreamReply) -> None:
    index = response.choice_index
    event = response.WhichOneof("event")
    if event == "begun":
        await reply.begin(index, response.begun.answer_id)
        return
    if not reply.knows(index):
        raise RollmeshError("the gateway's answer began without an id")
    match event:
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


async def _while_present(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does work on a request whose body was read.

    Raises:
        ClientDisconnect: The client left; the work is cancelled.
    """
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        leaving = group.create_task(_cancel_when_gone(receive, task))
        await asyncio.wait([task])
        leaving.cancel()
    if task.cancelled():
        raise ClientDisconnect


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    task.cancel()
