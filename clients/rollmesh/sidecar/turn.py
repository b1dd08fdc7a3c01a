"""One turn over HTTP, in whatever protocol: its session, its answer or its stream, its error.

A protocol reads its JSON into the gateway's `ChatRequest` and writes its JSON from the gateway's
answers and deltas, both synchronously. `TurnEndpoint` owns the connection.
"""

import asyncio
import logging
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from prometheus_client import Counter, Histogram
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rollmesh.runtime.codec.enums import name_of, text_of
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionKeyWrongError
from rollmesh.runtime.fairness import FairSlots
from rollmesh.runtime.process import faults
from rollmesh.runtime.process.memory import FreedMemory
from rollmesh.runtime.telemetry.logs import fields, set_request_id
from rollmesh.sidecar.body import Parameters
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import JSON, Headers, HttpError, StoppingError, shown_text, typed
from rollmesh.sidecar.gateways import Gateways
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2

TURNS = Counter(
    "rollmesh_sidecar_turns_total",
    "Requests for an answer, by protocol and HTTP status; 499 if the client left before it.",
    ["protocol", "status"],
)
FIRST_BYTE_SECONDS = Histogram(
    "rollmesh_sidecar_first_byte_seconds",
    "Time from a request's arrival to the first byte of its answer.",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
HELD_BODY = "rollmesh.held_body"
"""Key of a request's `HeldRequest` in its scope. The bytes count for the client's address until an
endpoint knows the session."""
LINEAGE_HEADER = "x-rollmesh-lineage"
_log = logging.getLogger(__name__)
_LEFT = 499
_LARGE_BODY_BYTES = 64 * 1024
"""A body of this size is parsed in a thread, and received only once its key was checked."""
_UNCHECKED_S = 1.0
"""A smaller body that takes longer is received only once its key was checked."""
_READ_AT_A_TIME = 2
"""Large bodies that are parsed at a time: they take up to 30 times their size."""
_STOPPED_MS = 1000
_LAST_WORD_S = 5.0
"""Extra time after the turn's timeout in which a stream may send its error."""

# The head of a request

_KEY_PREFIX = "rmk-"
_MOST_METADATA_BYTES = 16 * 1024
_LINEAGES = {
    "main": trajectory_pb2.LINEAGE_MAIN,
    "sub_agent": trajectory_pb2.LINEAGE_SUB_AGENT,
    "compaction": trajectory_pb2.LINEAGE_COMPACTION,
    "auxiliary": trajectory_pb2.LINEAGE_AUXILIARY,
}


@dataclass(frozen=True, slots=True)
class Head:
    """The path and the headers of one request."""

    session_id: str
    session_key: str
    headers: Mapping[bytes, str]
    """Headers by lower-case name."""
    lineage: trajectory_pb2.Lineage.ValueType
    """The lineage that the headers state. UNSPECIFIED if they state none."""

    def mark(self, chat: gateway_pb2.ChatRequest) -> None:
        """Sets the session, the lineage and the retry marks of a request.

        A lineage that the protocol has set stays unless the headers state one.
        """
        chat.session_id, chat.session_key = self.session_id, self.session_key
        chat.call_id = secrets.token_hex(16)  # a gateway that went away may have its answer
        chat.idempotency_key = self.headers.get(b"idempotency-key", "")
        if self.lineage:
            chat.lineage = self.lineage
        retries = self.headers.get(b"x-stainless-retry-count", "0")
        chat.retry_count = int(retries) if retries.isdecimal() and len(retries) < 9 else 0


def read_head(scope: Scope) -> Head:
    """Reads the path and the headers of a request.

    The path has the session's key, which works with any placeholder as bearer token. The session's
    id, which needs the key as bearer token, or neither, if the bearer token names the session.
    `x-api-key` is read if there is no bearer token.

    Raises:
        InvalidFieldError: `x-rollmesh-lineage` names an unknown lineage.
        SessionKeyWrongError: There is no key, or there are two different ones.
    """
    headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
    session, key = scope["path_params"].get("session", ""), _key_of(headers)
    if session.startswith(_KEY_PREFIX):
        if key and key != session:
            raise SessionKeyWrongError(
                "the bearer token differs from the key in the path; send only one of them"
            )
        session, key = "", session
    if not key:
        raise SessionKeyWrongError(
            "send the session's key as bearer token, or call the session's base URL, "
            "which contains it"
        )
    return Head(session or key.split("-")[1], key, headers, _lineage(headers))


def _key_of(headers: Mapping[bytes, str]) -> str:
    """Returns the key in the headers. Empty for a placeholder, which many agents require."""
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    given = given or headers.get(b"x-api-key", "")
    return given if given.startswith(_KEY_PREFIX) else ""


def _lineage(headers: Mapping[bytes, str]) -> trajectory_pb2.Lineage.ValueType:
    """Returns the lineage that a request states itself, or by the headers of a known agent.

    Claude Code sends `x-claude-code-agent-id` for its sub-agents. Codex sends `x-openai-subagent`,
    and the kind of the request in `x-codex-turn-metadata`.
    """
    if named := headers.get(LINEAGE_HEADER.encode(), "").strip().lower():
        if named not in _LINEAGES:
            raise InvalidFieldError(
                LINEAGE_HEADER, f"is {named!r:.64}; give one of {', '.join(_LINEAGES)}"
            )
        return _LINEAGES[named]
    metadata: Any = headers.get(b"x-codex-turn-metadata", "")
    if metadata and len(metadata) <= _MOST_METADATA_BYTES:
        with suppress(orjson.JSONDecodeError):
            metadata = orjson.loads(metadata)
    if isinstance(metadata, dict) and metadata.get("request_kind") == "compaction":
        return trajectory_pb2.LINEAGE_COMPACTION
    if headers.get(b"x-claude-code-agent-id") or headers.get(b"x-openai-subagent"):
        return trajectory_pb2.LINEAGE_SUB_AGENT
    return trajectory_pb2.LINEAGE_UNSPECIFIED


# The interface of a protocol


class Turn(ABC):
    """One request, as its protocol read it, and how its answer is written.

    For a stream the calls of a choice come in the order `begin`, `prompt` (choice 0, if its ids
    were requested), `delta` (any number), `finish`. Then comes one `end`. Choice 0 begins first.
    Their results are sent at once. An empty result sends nothing.
    """

    def __init__(self, chat: gateway_pb2.ChatRequest, model: str, *, streams: bool) -> None:
        """Takes the parts of the request.

        Args:
            chat: The request to the gateway. The endpoint adds the headers' part.
            model: Model that the request names, empty if it names none. The endpoint replaces it
                by the name under which the session's model answers.
            streams: Whether the answer is streamed.
        """
        self.chat = chat
        self.model = model
        self.streams = streams

    async def complete(self, gateways: Gateways) -> None:  # noqa: B027 - most need nothing
        """Adds stored parts of the conversation to which the body only refers.

        Raises:
            RollmeshError: They do not exist, or the gateway failed.
        """

    @abstractmethod
    def whole(self, response: gateway_pb2.ChatResponse) -> bytes:
        """Returns the body of the complete answer, given one answer for each choice."""

    def begin(self, index: int, begun: gateway_pb2.ChatBegun) -> bytes:
        """Returns the events that begin a choice. `begun` has the id of its answer."""
        del index, begun
        return b""

    def prompt(self, packed: bytes) -> bytes:
        """Returns the events for the ids of the prompt, unsigned 32-bit little-endian."""
        del packed
        return b""

    @abstractmethod
    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for the next part of a choice."""

    @abstractmethod
    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the events that end a choice.

        Parts that no delta brought are written from the answer: a replay has no deltas.
        """

    def end(self, answers: list[gateway_pb2.ChatAnswer]) -> bytes:
        """Returns the events that end the stream, given the complete answers by choice."""
        del answers
        return b""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol that agents speak over HTTP."""

    name: str
    """Its name in metrics."""
    parameters: Parameters
    """Which parameters of the API are served, refused or ignored."""
    read: Callable[[bytes, Head], Turn]
    """Reads a body. Raises an InvalidFieldError that names the parameter."""
    error: Callable[[RollmeshError, str], HttpError]
    """Returns an error as an answer, given the request's id."""
    error_event: bytes
    """The beginning of the event that reports an error inside a stream, before its JSON."""
    keep_alive: bytes
    """The event that is sent on a stream after a silence."""
    request_id_header: bytes = b"x-request-id"
    """Header of every answer with the request's id."""
    count: Callable[[int], bytes] | None = None
    """Writes the number of a prompt's tokens, for an endpoint that samples nothing."""


def as_delta(done: gateway_pb2.ChatAnswer) -> gateway_pb2.ChatDelta:
    """Returns a complete answer as one part of a stream."""
    message = done.message
    delta = gateway_pb2.ChatDelta(
        content=text_of(message), reasoning_content=message.reasoning_content
    )
    for at, call in enumerate(message.tool_calls):
        delta.tool_calls.add(
            index=at, id=call.id, name=call.name, arguments_json=call.arguments_json
        )
    return delta


def unknown_finish(done: gateway_pb2.ChatAnswer) -> RollmeshError:
    """Returns the error of an answer that ended in a way in which no turn ends, as an abort."""
    name = name_of(sampling_pb2.FinishReason.DESCRIPTOR, done.finish_reason)
    return RollmeshError(f"finish_reason: the gateway sent {name}, which cannot end a turn")


# The connection


class Reply:
    """The answer to one request on its connection.

    Nothing is buffered here for a slow client. While the server's 64 KiB buffer is full, a write
    waits and nothing more is read from the gateway; gRPC's flow-control window then bounds the
    backlog to a few MiB per choice.
    """

    def __init__(self, protocol: Protocol, send: Send) -> None:
        """Takes the protocol of the request, and its ASGI channel."""
        self.request_id = uuid.uuid4().hex
        self._protocol = protocol
        self._send = send
        self._received = time.perf_counter()
        self._status = _LEFT
        self._is_complete = False
        self._is_silent = True

    async def whole(
        self, body: bytes, status: int = HTTPStatus.OK, headers: Headers = JSON
    ) -> None:
        """Sends a complete answer."""
        await self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, events: bytes) -> None:
        """Sends events of a stream, after its headers: an earlier error gets a status."""
        if not events:
            return
        self._is_silent = False
        if self._status == _LEFT:
            await self._start(
                HTTPStatus.OK,
                (
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                ),
            )
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Sends the last events of a stream."""
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def fail(self, error: RollmeshError) -> None:
        """Sends an error with its status, or as an event if the stream has started.

        A started stream is not terminated properly and the server closes the connection. Clients
        would mistake a properly terminated partial answer for a complete one.
        """
        if self._is_complete:
            return
        http = self._protocol.error(error, self.request_id)
        if self._status != _LEFT:
            _log.warning("stream failed", extra=fields(reason=error.reason))
            await self.write(self._protocol.error_event + http.body + b"\n\n")
            return
        if http.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error(
                "request failed",
                extra=fields(reason=error.reason, error=shown_text(error.message)),
            )
        await self.whole(http.body, http.status, http.headers)

    async def fill_silence(self, pause_ms: int) -> None:
        """Sends a keep-alive after each silence of `pause_ms`. Runs until cancelled."""
        while True:
            await asyncio.sleep(pause_ms / 1000)
            if self._is_silent:
                await self.write(self._protocol.keep_alive)
            self._is_silent = True

    def count(self) -> None:
        """Counts the request, which is over."""
        TURNS.labels(self._protocol.name, str(int(self._status))).inc()

    async def _start(self, status: int, headers: Headers) -> None:
        self._status = status
        FIRST_BYTE_SECONDS.observe(time.perf_counter() - self._received)
        named = [*headers, (self._protocol.request_id_header, self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": named})


class TurnEndpoint:
    """An ASGI application, so that it owns the connection and notices when the client leaves."""

    def __init__(self, protocol: Protocol, gateways: Gateways, config: SidecarConfig) -> None:
        """Takes the protocol, the gateways, and the settings."""
        self._protocol = protocol
        self._gateways = gateways
        self._turn_timeout_s = config.turn_timeout_ms / 1000
        self._keep_alive_ms = config.keep_alive_ms
        self._freed_memory = FreedMemory()
        self._large_bodies = FairSlots(_READ_AT_A_TIME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. A client that leaves cancels the call to the gateway.

        The server cancels the requests that are still running when its grace is over.
        """
        reply, body = Reply(self._protocol, send), _Body(receive)
        set_request_id(reply.request_id)
        try:
            await self._serve(scope, body, reply)
        except asyncio.CancelledError:
            stopping = "the sidecar is stopping; try again"
            await reply.fail(StoppingError(stopping, retry_delay_ms=_STOPPED_MS))
        finally:
            reply.count()
            self._freed_memory.served(body.size)

    async def _serve(self, scope: Scope, body: "_Body", reply: Reply) -> None:
        try:
            head = read_head(scope)
            turn = await self._read(await self._receive(scope, body, head), head)
            head.mark(turn.chat)
            await turn.complete(self._gateways)
            turn.model = await self._gateways.model_of(head.session_id, turn.model)
            answering = self._stream if turn.streams else self._answer
            await _while_present(body.receive, answering(turn, reply))
        except ClientDisconnect:
            return
        except Exception as error:  # the edge: everything becomes an answer
            await reply.fail(typed(error))

    async def _receive(self, scope: Scope, body: "_Body", head: Head) -> bytes:
        """Returns the body of a request.

        A small one is received first, and the gateway checks the key with the request. The key of a
        larger or slower one is checked before more of it is taken than the server reads ahead.
        """
        if int(head.headers.get(b"content-length") or _LARGE_BODY_BYTES) < _LARGE_BODY_BYTES:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNCHECKED_S):
                    await body.read()
        if not body.is_complete:
            await self._gateways.check_key(head.session_id, head.session_key)
        if (held := scope.get(HELD_BODY)) is not None:
            held.belongs_to(f"session {head.session_id}")
        return await body.read()

    async def _read(self, body: bytes, head: Head) -> Turn:
        """Reads a request. A large one in a thread, so that it does not block the event loop."""
        if len(body) < _LARGE_BODY_BYTES:
            return self._protocol.read(body, head)
        async with self._large_bodies.slot(head.session_id):
            return await asyncio.to_thread(self._protocol.read, body, head)

    async def _answer(self, turn: Turn, reply: Reply) -> None:
        if self._protocol.count is not None:
            counted = await self._gateways.count_tokens(turn.chat, reply.request_id)
            await reply.whole(self._protocol.count(counted.prompt_tokens))
            return
        response = await self._gateways.chat(turn.chat, reply.request_id)
        await faults.reach("sidecar-before-answer")
        await reply.whole(turn.whole(response))

    async def _stream(self, turn: Turn, reply: Reply) -> None:
        """Streams all choices within the turn's timeout, even if the client does not read."""
        limit_s = self._turn_timeout_s + _LAST_WORD_S
        try:
            async with asyncio.timeout(limit_s):
                try:
                    async with asyncio.TaskGroup() as group:
                        filling = group.create_task(reply.fill_silence(self._keep_alive_ms))
                        answers = await self._relay(turn, reply)
                        filling.cancel()
                    await reply.end(turn.end(answers))
                except ExceptionGroup as error:
                    await reply.fail(typed(error))
        except TimeoutError:  # the server closes a connection whose answer is incomplete
            _log.warning("stream was not read in time", extra=fields(after_s=limit_s))

    async def _relay(self, turn: Turn, reply: Reply) -> list[gateway_pb2.ChatAnswer]:
        """Forwards every event as it arrives. Returns the complete answers by choice."""
        found: dict[int, gateway_pb2.ChatAnswer] = {}
        begun: set[int] = set()
        early: list[gateway_pb2.StreamChatResponse] = []
        async with aclosing(self._gateways.stream_chat(turn.chat, reply.request_id)) as responses:
            async for response in responses:  # read to the end: the gateway treats less as not read
                early.append(response)
                if 0 not in begun:
                    if response.choice_index != 0:
                        continue  # the first choice begins the stream
                    early.insert(0, early.pop())
                for one in early:
                    await reply.write(_events_of(one, turn, begun))
                    if one.HasField("done"):
                        found[one.choice_index] = one.done
                    elif one.HasField("delta"):
                        await faults.reach("sidecar-mid-answer")
                early.clear()
        if found.keys() != set(range(turn.chat.choices)):
            raise RollmeshError("the gateway's answer ended without its final message")
        return [found[at] for at in range(turn.chat.choices)]


def _events_of(response: gateway_pb2.StreamChatResponse, turn: Turn, begun: set[int]) -> bytes:
    """Returns the events of a response. `begun` are the choices that have begun."""
    index = response.choice_index
    event = response.WhichOneof("event")
    if event == "begun":
        begun.add(index)
        return turn.begin(index, response.begun)
    if index not in begun:
        raise RollmeshError("the gateway's answer began without an id")
    match event:
        case "delta":
            return turn.delta(index, response.delta)
        case "done":
            return turn.finish(index, response.done)
        case "prompt":
            return turn.prompt(response.prompt.token_ids_u32le)
        case _:
            return b""


class _Body:
    """The body of a request, as far as it has been received. The server bounds its size."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.is_complete = False
        self.size = 0
        self._parts: list[bytes] = []

    async def read(self) -> bytes:
        """Returns the complete body. A read that is cancelled may be followed by another.

        Raises:
            ClientDisconnect: The client left.
        """
        while not self.is_complete:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._parts.append(message.get("body", b""))
            self.size += len(self._parts[-1])
            self.is_complete = not message.get("more_body", False)
        return b"".join(self._parts)


async def _while_present(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does work on a request whose body was read.

    Raises:
        ClientDisconnect: The client left. The work is cancelled.
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
